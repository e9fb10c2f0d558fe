"""Tests of lowering/context.py: the facts about a graph and how rules use them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from fqvit.ir.fixed import multiplier
from fqvit.ir.program import Move
from fqvit.lowering.context import LoweringContext
from fqvit.lowering.emit import Emitter
from fqvit.lowering.encode import encode_ratio
from fqvit.lowering.rules.base import Lowering
from fqvit.models.graph import Graph, Node, trace
from fqvit.models.layers import Add, Leaf, Linear, Softmax
from fqvit.models.maps import Grid, Relu
from fqvit.quant.calibration import Calibration
from fqvit.quant.qparams import QParams
from fqvit.quant.recipe import Recipe
from tests.factories import calibration_of, float_model

from .test_rules import MASK, PREPROCESS, params


def context_of(mult: Any = "full", **facts: Any) -> LoweringContext:
    return LoweringContext(Calibration(Recipe(name="test", mult=mult), "logits", 1, {}), PREPROCESS, **facts)


def lowering_in(context: LoweringContext) -> Lowering:
    return Lowering(context, Emitter(), Node("y", Leaf("norm"), ()), [])


def facts_of(graph: Graph, **sites: QParams) -> LoweringContext:
    return LoweringContext.of(graph, PREPROCESS, Calibration(Recipe(name="test"), "logits", 1, sites))


def test_sums_maps_every_input_of_a_sum_to_the_parameters_of_that_sum() -> None:
    model = float_model("vit")
    calibration = calibration_of(model, count=4)
    sums = LoweringContext.of(trace(model.module), model.preprocess, calibration).sums
    assert sums["patch_embed.proj"] is calibration.sites["embed"]
    assert sums["embed"] is sums["blocks.0.attn.proj"] is calibration.sites["blocks.0.add1"]
    assert sums["blocks.1.mlp.fc2"] is calibration.sites["blocks.1.add2"] and "blocks.0.mlp.fc1" not in sums


def test_context_collects_facts_about_a_graph() -> None:
    linear, act = Node("linear", Linear(4, 4, "inner"), ("images",)), Node("act", Relu(), ("linear",))
    plain = facts_of(Graph((linear, act), "act"))
    assert plain.fused_relus == {"linear": "act"} and plain.sums == {} and not plain.masked and not plain.resizable
    q = params(0.5, 3)
    added = Graph((linear, Node("sum", Add(), ("linear", "images"))), "sum")
    assert facts_of(added, sum=q).sums == {"linear": q, "images": q}
    assert facts_of(Graph((Node("grid", Grid((2, 3)), ("images",)),), "grid")).resizable
    for mask in (None, MASK):
        assert facts_of(Graph((Node("soft", Softmax(mask), ("images",)),), "soft")).masked == (mask is not None)


def test_the_recipe_decides_the_width_of_multipliers() -> None:
    full, short = context_of(), context_of("short")
    assert not full.short and lowering_in(full).encode_ratio(0.3) == multiplier(0.3)
    assert short.short and lowering_in(short).encode_ratio(0.3) == encode_ratio("y", 0.3, short=True)


def test_with_short_multipliers_the_unit_of_a_term_is_a_fraction_of_the_scale_of_its_sum() -> None:
    for bits, fraction in ((8, 8), (13, 3), (14, 2), (15, 2), (16, 2)):
        found = context_of("short", sums={"y": QParams(bits, np.array([0.5]), np.array([3]))})
        assert found.sum_unit("y") == 0.5 / 2**fraction and found.sum_unit("other") is None
    assert context_of(sums={"y": params(0.5, 3)}).sum_unit("y") is None


def test_moves_are_recorded_only_in_resizable_programs() -> None:
    fixed, resizable = lowering_in(context_of()), lowering_in(context_of(resizable=True))
    fixed.move("y", "windows", (7, 3))
    assert fixed.emit.moves == {}
    resizable.move("y", "windows", (7, 3))
    resizable.move("z", "grid")
    resizable.move("up", "enlarged", of="large")
    assert resizable.emit.moves == {"y": Move("windows", 7, 3), "z": Move("grid"), "up": Move("enlarged", of="large")}
