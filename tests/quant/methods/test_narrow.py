"""Tests of recipe auto, which narrows the weights of layers: costs per byte, max_loss and max_size, and saved recipes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fqvit.errors import FqvitError
from fqvit.ir.file import file_size
from fqvit.ir.ops import Linear
from fqvit.lowering.lower import lower
from fqvit.models.graph import trace
from fqvit.models.load import FloatModel
from fqvit.quant.calibrate import calibrate
from fqvit.quant.calibration import Calibration, Choice
from fqvit.quant.methods.narrow import bits_after, hull, weight_bytes
from fqvit.quant.recipe import RECIPES, Recipe, load_recipe
from fqvit.quant.recipe_file import save_recipe, to_toml
from tests.factories import float_model, images_for
from tests.factories import one_thread as one_thread

AUTO = msgspec.structs.replace(RECIPES["auto"], rounding="nearest", weight_group=8)


def search(recipe: Recipe, kind: str = "vit") -> tuple[FloatModel, Calibration, Choice]:
    model = float_model(kind)
    images = [images_for(model.preprocess, 6, 7)]
    calibration = calibrate(model, images, recipe, size_of=lambda found: file_size(lower(model, found)))
    assert calibration.choice is not None
    return model, calibration, calibration.choice


@cache
def unlimited(kind: str) -> tuple[FloatModel, Calibration, Choice]:
    return search(msgspec.structs.replace(AUTO, max_loss=100.0), kind)


@pytest.mark.parametrize(
    "points, kept",
    [
        ([(0, 0.0), (2, 0.1), (4, 1.0)], [0, 1, 2]),
        ([(0, 0.0), (2, 0.9), (4, 1.0)], [0, 2]),  # half the saving at nearly the full cost: not worth a step of its own
        ([(0, 0.0), (2, 0.0), (4, 0.0)], [0, 1, 2]),
        ([(0, 0.0), (0, 0.0), (4, 0.1)], [0, 2]),  # nothing saved
        ([(0, 0.0)], [0]),
    ],
)
def test_the_steps_of_a_layer_have_increasing_costs_per_byte(points: list[tuple[int, float]], kept: list[int]) -> None:
    assert hull(points) == kept


def test_a_size_limit_is_checked_even_if_no_width_is_left_to_try() -> None:
    _, calibration, choice = search(msgspec.structs.replace(AUTO, weight_bits=4, max_size=10))
    assert (
        not choice.narrowed and choice.max_size == 10 and choice.bytes is not None and choice.bytes > 10 and not choice.reached
    )
    assert calibration.recipe.layer_bits == {}


@pytest.mark.parametrize("kind", ["vit", "padded swin"])
def test_every_layer_is_narrowed_to_4_bits_if_any_loss_is_allowed(kind: str) -> None:
    model, calibration, choice = unlimited(kind)
    bits = bits_after(choice.narrowed)  # type: ignore[arg-type]
    assert choice.reached and choice.layers == len(bits) > 4
    nodes = {node.name: node for node in trace(model.module).nodes if node.name in bits}
    for layer, found in bits.items():  # the codebooks of a tiny layer may take more bytes than 4-bit codes save
        sizes = {n: weight_bytes(msgspec.structs.replace(AUTO, layer_bits={layer: n}), nodes[layer]) for n in (4, 6)}
        assert found == (4 if sizes[4] < sizes[6] else 6), layer
    assert 4 in bits.values() and (kind != "vit" or 6 not in bits.values())
    assert calibration.recipe.layer_bits == bits and not calibration.recipe.widths and calibration.recipe.max_loss is None
    program = lower(model, calibration)
    assert choice.bytes == file_size(program)
    stored = {op.y: op.weight_bits for op in program.ops if isinstance(op, Linear)}
    assert {name: stored[name] for name in bits} == bits
    assert 8 in stored.values()  # the patch embedding and the head


def test_the_reported_saving_equals_the_difference_in_weight_bytes() -> None:
    model, calibration, choice = unlimited("vit")
    wide = lower(model, calibrate(model, [images_for(model.preprocess, 6, 7)], RECIPES["fqvit"]))
    narrow = lower(model, calibration)
    saved = sum(step.saved for step in choice.narrowed)
    parts = (".w", ".choice", ".codebooks")
    sizes = [sum(a.nbytes for name, a in p.constants.items() if name.endswith(parts)) for p in (wide, narrow)]
    assert saved == sizes[0] - sizes[1]
    node = next(node for node in trace(model.module).nodes if node.name == choice.narrowed[0].layer)
    assert weight_bytes(calibration.recipe, node) == sum(
        narrow.constants[f"{node.name}.{part}"].nbytes for part in ("w", "choice", "codebooks")
    )


def test_nothing_is_narrowed_if_no_loss_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    from fqvit.quant.methods import auto

    exact = auto.measure
    calls = iter(range(10**6))
    # The first measurement, before anything is narrowed, has no loss; all later ones have a loss.
    monkeypatch.setattr(auto, "measure", lambda a, b: msgspec.structs.replace(exact(a, b), loss=float(next(calls) > 0)))
    _, calibration, choice = search(msgspec.structs.replace(AUTO, max_loss=0.5))
    assert choice.narrowed == [] and calibration.recipe.layer_bits == {} and not choice.reached


def test_max_size_narrows_no_more_layers_than_needed() -> None:
    model, calibration, choice = unlimited("vit")
    images = [images_for(model.preprocess, 6, 7)]
    layer_bits = [{step.layer: step.after for step in choice.narrowed[:n]} for n in range(1, len(choice.narrowed) + 1)]
    recipes = [msgspec.structs.replace(calibration.recipe, layer_bits=bits) for bits in layer_bits]
    # Not always the last size: the codebooks of a tiny layer add names to the file, which the search does not count.
    smallest = min(file_size(lower(model, calibrate(model, images, recipe))) for recipe in recipes)
    wide = file_size(lower(model, calibrate(model, images, RECIPES["fqvit"])))
    limit = (smallest + wide) // 2
    _, found, chosen = search(msgspec.structs.replace(AUTO, max_size=limit))
    assert chosen.reached and chosen.bytes is not None and chosen.bytes <= limit
    assert 0 < len(chosen.narrowed) < len(choice.narrowed) and chosen.narrowed == choice.narrowed[: len(chosen.narrowed)]
    # Without the last step, the file would still be larger than the limit.
    before = {step.layer: step.after for step in chosen.narrowed[:-1]}
    more = msgspec.structs.replace(found.recipe, layer_bits=before)
    assert file_size(lower(model, calibrate(model, [images_for(model.preprocess, 6, 7)], more))) > limit
    _, _, none = search(msgspec.structs.replace(AUTO, max_size=smallest - 1))
    assert not none.reached and len(none.narrowed) == len(choice.narrowed)


def test_layer_bits_of_the_recipe_are_fixed_choices() -> None:
    """The search keeps them, whatever the limits, and does not count these layers as candidates."""
    fixed = {"blocks.0.mlp.*": 7, "blocks.1.attn.qkv": 5}
    model, calibration, choice = search(msgspec.structs.replace(AUTO, max_loss=100.0, layer_bits=fixed))
    _, _, free = unlimited("vit")
    assert choice.layers == free.layers - 3
    bits = calibration.recipe.layer_bits
    assert list(bits.items())[:2] == list(fixed.items()) and set(bits) - set(fixed) == {step.layer for step in choice.narrowed}
    stored = {op.y: op.weight_bits for op in lower(model, calibration).ops if isinstance(op, Linear)}
    assert stored["blocks.1.attn.qkv"] == 5 and stored["blocks.0.mlp.fc1"] > 6 and stored["blocks.1.mlp.fc1"] == 4


def test_a_size_limit_is_checked_even_if_every_layer_has_fixed_bits() -> None:
    for limit in (10, 10**9):
        _, calibration, choice = search(msgspec.structs.replace(AUTO, max_size=limit, layer_bits={"blocks.*": 6}))
        assert calibration.recipe.layer_bits == {"blocks.*": 6} and choice.narrowed == [] and choice.layers == 0
        assert choice.bytes is not None and choice.reached == (limit > 10)


@pytest.mark.parametrize("rounding", ["nearest", "compensated"])
def test_the_saved_recipe_gives_the_same_program(rounding: Any, tmp_path: Path) -> None:
    model, calibration, _ = search(msgspec.structs.replace(AUTO, rounding=rounding, max_loss=100.0))
    save_recipe(calibration.recipe, tmp_path / "found.toml")
    recipe = load_recipe(tmp_path / "found.toml")
    assert recipe == calibration.recipe
    again = calibrate(model, [images_for(model.preprocess, 6, 7)], recipe)
    assert lower(model, again).fingerprint() == lower(model, calibration).fingerprint()


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_saved_as_toml(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(to_toml(RECIPES[name]))
    assert load_recipe(tmp_path / "x.toml") == RECIPES[name]


def test_layer_bits_set_the_bits_of_single_layers() -> None:
    model = float_model("vit")
    recipe = Recipe(name="mine", layer_bits={"blocks.*.mlp.fc?": 6, "blocks.1.*": 5, "head": 3})
    program = lower(model, calibrate(model, [images_for(model.preprocess, 4, 7)], recipe))
    widths = {op.y: op.width for op in program.ops if isinstance(op, Linear)}
    assert widths["blocks.0.mlp.fc1"] == 6 and widths["blocks.1.mlp.fc1"] == 5 and widths["head"] == 3
    assert widths["blocks.0.attn.qkv"] == 0 and program.header.version == 2
    assert program.header.recipe["layer_bits"] == recipe.layer_bits


def test_mistakes_are_reported() -> None:
    model = float_model("vit")
    images = [images_for(model.preprocess, 2, 7)]
    with pytest.raises(FqvitError, match=r"layer_bits 'blocks.9.\*' matches no layer with weights. Use names such as head"):
        calibrate(model, images, Recipe(name="mine", layer_bits={"blocks.9.*": 6}))
    with pytest.raises(FqvitError, match="recipe auto: max_size needs the argument size_of"):
        calibrate(model, images, msgspec.structs.replace(AUTO, max_size=9))
    with pytest.raises(ValueError, match="widths and max_size require max_loss"):
        Recipe(name="mine", widths=(4,))
