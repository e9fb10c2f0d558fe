"""Tests of a lowered program's header (recipe, input, outputs, sites) and of a lowered detector's cache of pyramids."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from torch import nn

from fqvit.data.preprocess import Preprocess
from fqvit.detect import lower as lower_detector
from fqvit.detect.cache import SizeCache
from fqvit.detect.lower import KEPT_SIZES, LoweredDetector
from fqvit.errors import FqvitError
from fqvit.ir.ops import Linear
from fqvit.ir.program import CodeInput, Output
from fqvit.lowering.emit import Emitter, LoweredValue
from fqvit.lowering.lower import LATER_FIELDS, _input, _outputs, lower, recorded
from fqvit.models.graph import Captured, Graph, Node, returned_outputs
from fqvit.models.layers import Leaf
from fqvit.models.load import FloatModel
from fqvit.quant.calibration import Calibration
from fqvit.quant.qparams import QParams
from fqvit.quant.recipe import RECIPES, Recipe
from tests.factories import calibration_of, float_model

Q = QParams(7, np.array([0.5, 0.25]), np.array([3, 4]))


def calibration(features: Any = "logits", square: QParams | None = None) -> Calibration:
    return Calibration(Recipe(name="test"), features, 1, {}, square=square)


def test_a_recipe_is_stored_with_its_defaults_except_in_fields_added_later() -> None:
    plain = recorded(Recipe(name="test"))
    names = {field.name for field in msgspec.structs.fields(Recipe)}
    assert set(plain) == names - set(LATER_FIELDS) and plain["weight_bits"] == 8
    assert recorded(Recipe(name="test", mult="short", weight_bits=4)) == plain | {"mult": "short", "weight_bits": 4}


@pytest.mark.parametrize(
    "square, q, expected",
    [
        ((7, 7, 2), Q, CodeInput((7, 7, 2), 0.5, 3, 7)),
        (None, None, None),
        ((7, 7, 2), None, None),
        (None, Q, None),
    ],
)
def test_the_input_of_a_detector_head_is_codes(square: Any, q: QParams | None, expected: CodeInput | None) -> None:
    preprocess = Preprocess(4, 2, 3, 4, "bicubic", (0.5,) * 3, (0.5,) * 3)
    assert _input(FloatModel("head", nn.Identity(), preprocess, None, "", square), calibration(square=q)) == expected


@pytest.mark.parametrize(
    "role, value, features, expected",
    [
        ("logits", LoweredValue("y", (5,), unit=np.array([0.5])), "logits", Output("y", "logits", 0.5)),
        ("logits", LoweredValue("y", (2, 2, 5), unit=np.array([0.5])), "logits", Output("y", "scores", 0.5)),
        ("deltas", LoweredValue("y", (5,), unit=np.array([0.5])), "logits", Output("y", "deltas", 0.5)),
        ("deltas", LoweredValue("y", (2, 2, 5), unit=np.array([0.5])), "logits", Output("y", "deltas", 0.5)),
        ("fpn", LoweredValue("y", (2, 2, 2), Q), "logits", Output("y", "map", 0.5, 3)),
        ("norm", LoweredValue("y", (2, 2), Q), "tokens", Output("y", "tokens", 0.5, 3)),
        ("pooled", LoweredValue("y", (2,), Q), "pooled", Output("y", "pooled", 0.5, 3)),
    ],
)
def test_shape_and_role_decide_the_kind_of_an_output(role: Any, value: LoweredValue, features: Any, expected: Output) -> None:
    graph = Graph((Node("y", Leaf(role), ()),), "y")
    assert _outputs(graph, graph.outputs, calibration(features), {"y": value}, Emitter()) == [expected]


def test_outputs_are_in_the_order_in_which_the_model_returns_them() -> None:
    values = {name: LoweredValue(name, (5,), unit=np.array([0.5])) for name in "abc"}
    graph = Graph(tuple(Node(name, Leaf("logits"), ()) for name in "abc"), "a", ("c", "b"))
    for module, order in ((Leaf("logits"), "cba"), (Captured(graph), "acb")):
        names = returned_outputs(module, graph)
        assert [output.buffer for output in _outputs(graph, names, calibration(), values, Emitter())] == list(order)


def test_recipes_without_integer_programs_are_rejected() -> None:
    recipe = next(recipe for recipe in RECIPES.values() if not recipe.integer)
    model = float_model("vit")
    with pytest.raises(FqvitError, match="there is no integer program"):
        lower(model, Calibration(recipe, "logits", 1, {}))


@pytest.mark.parametrize("kind, masked", [("vit", False), ("padded swin", True)])
def test_the_last_log2_code_means_0_if_any_window_is_masked(kind: str, masked: bool) -> None:
    model = float_model(kind)
    sites = lower(model, calibration_of(model, Recipe(name="test", zero_code=False))).header.sites.values()
    assert {site.zero_code for site in sites if site.log2} == {masked}


@pytest.mark.parametrize("kind, added", [("vit", 5), ("swin", 6)])
def test_short_multipliers_replace_accumulator_outputs_by_requantized_i32(kind: str, added: int) -> None:
    model = float_model(kind)
    full, short = (
        [op.out for op in lower(model, calibration_of(model, recipe, 4)).ops if isinstance(op, Linear)]
        for recipe in (Recipe(name="test"), Recipe(name="test", mult="short"))
    )
    assert full.count("acc") == added and short == ["i32" if out == "acc" else out for out in full]


def test_class_names_with_line_breaks_are_rejected() -> None:
    model = float_model("distilled", classes=("a", "b", "c\nd", "e", "f"))
    with pytest.raises(FqvitError, match=r"^class name 'c\\nd': contains a line break"):
        lower(model, calibration_of(model, count=4))
    # Programs that output features have no class names.
    assert lower(model, calibration_of(model, count=4, features="pooled")).classes is None


def test_lowering_verifies_its_program() -> None:
    model = float_model("distilled", classes=("a", "b"))
    with pytest.raises(FqvitError, match="^2 class names for 5 logits"):
        lower(model, calibration_of(model, count=4))


def test_the_pyramids_of_the_most_recently_used_sizes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(lower_detector, "resized", lambda template, height, width: made.append(height) or (height, width))
    low = LoweredDetector.__new__(LoweredDetector)
    low.template, low._pyramids = None, SizeCache(KEPT_SIZES)  # type: ignore[assignment]

    def made_for(height: int) -> list[int]:
        """Request the pyramid of a height; return the heights of the pyramids built for it: none if it was cached."""
        made.clear()
        assert low.pyramid(height, 9) == (height, 9)  # type: ignore[comparison-overlap]
        return list(made)

    assert [made_for(height) for height in range(KEPT_SIZES)] == [[height] for height in range(KEPT_SIZES)]
    assert made_for(0) == []
    assert made_for(99) == [99]  # evicts 1, the least recently used
    assert made_for(0) == made_for(2) == [] and made_for(1) == [1] and len(low._pyramids) == KEPT_SIZES
