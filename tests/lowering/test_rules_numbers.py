"""Tests of the exact constants that lowering rules write. See also: test_rules.py (the results of their ops)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fqvit.errors import FqvitError
from fqvit.ir.ops import LayerNorm
from fqvit.lowering.context import LoweringContext
from fqvit.lowering.emit import Emitter, LoweredValue
from fqvit.lowering.rules import lower_node
from fqvit.lowering.rules.base import Lowering
from fqvit.models import layers, maps
from fqvit.models.graph import Node
from fqvit.quant.calibration import Calibration
from fqvit.quant.qparams import QParams
from fqvit.quant.recipe import Recipe

from .test_rules import PREPROCESS, Made, codes, linear, numbers, params, whole, with_weights


def emitted(leaf: layers.Leaf, x: LoweredValue, q: QParams, **recipe: Any) -> Emitter:
    """Apply a rule without running its ops."""
    calibration = Calibration(Recipe(name="test", **recipe), "logits", 1, {"y": q})
    context, emit = LoweringContext(calibration, PREPROCESS), Emitter()
    lower_node(Lowering(context, emit, Node("y", leaf, (x.buffer,)), [x]))
    return emit


def test_a_leaf_without_a_rule_is_rejected() -> None:
    with pytest.raises(FqvitError, match=r"^y: no lowering rule for Leaf\."):
        emitted(layers.Leaf("norm"), codes((3, 4))[0], params(0.5, 3))


def test_with_short_multipliers_the_unit_of_position_embeddings_is_a_fraction_of_the_scale_of_the_sum() -> None:
    # Position embeddings with 16 bits have the unit 2^-15. Short multipliers need the unit 0.5 / 2^8, 64 times as large.
    units = [32767, 31, 32, 33, 95, 96, -31, -32, -33, -95, -97, 0]
    positions = torch.tensor(units).double().reshape(1, 3, 4) / 2**15
    nothing = torch.zeros(1, 0, 4).double()
    patches, q = numbers((3, 4), np.array([2.0**-9])), params(0.5, 128)
    made = Made(layers.Embed(), [patches], q, nothing, positions, recipe={"mult": "short"}, sums={"x0": q})
    found = made.emit.constants["y.positions"]
    assert found.dtype == np.int32 and found.ravel().tolist() == [512, 0, 1, 1, 1, 2, 0, 0, -1, -1, -2, 0]
    made.check(0.5 + 2.0**-8)
    full = Made(layers.Embed(), [patches], q, nothing, positions, sums={"x0": q})
    assert full.emit.constants["y.positions"].ravel().tolist() == units


@pytest.mark.parametrize(
    "recipe, dtype", [({}, np.int32), ({"channels": True, "k": 4}, np.uint16), ({"mult": "short"}, np.uint16)]
)
def test_the_recipe_decides_whether_multipliers_of_codes_have_16_bits(recipe: dict[str, Any], dtype: Any) -> None:
    made = Made(linear(), [codes((5, 6))], params(0.7, 120), recipe=recipe)
    assert made.emit.constants["y.mult"].dtype == dtype
    # All levels of a pyramid share their weights but not their scales, so a convolution keeps 31 bits.
    conv = with_weights(maps.Conv2d(3, 4, "fpn"), whole(4, 3, 3, 3))
    wide = Made(conv, [codes((2, 3, 3))], params(0.7, 120), recipe={"channels": True, "k": 4})
    assert wide.emit.constants["y.mult"].dtype == np.int32


@pytest.mark.parametrize("mult, dtype", [("full", np.int32), ("short", np.uint16)])
def test_the_recipe_decides_the_width_of_multipliers_of_class_scores_and_sums(mult: str, dtype: Any) -> None:
    scores = Made(linear("logits"), [codes((6,))], None, recipe={"mult": mult})
    assert scores.emit.constants["y.mult"].dtype == dtype
    if mult == "short":
        term = Made(linear(), [codes((5, 6))], None, recipe={"mult": mult}, sums={"y": params(0.5, 3)})
        assert term.emit.constants["y.mult"].dtype == dtype


def test_a_sum_uses_the_unit_of_each_channel() -> None:
    Made(layers.Add(), [codes((3, 2), params(0.05, 99)), numbers((3, 2), np.array([0.01, 0.04]), 1)], params(0.3, 128)).check()


@pytest.mark.parametrize(
    "eps, channels, scale, epsilon",
    [(0.1, 4, 0.5, 6), (0.1, 4, 0.45, 8), (0.1, 3, 0.05, 360), (1e-6, 4, 0.5, 1), (1e-6, 4, 0.0025, 3)],
)
def test_epsilon_is_scaled_to_the_integer_variance(eps: float, channels: int, scale: float, epsilon: int) -> None:
    """epsilon = max(1, round(eps * (C / s)^2)), because the op's D is C^2 times the variance of codes with scale s."""
    made = Made(layers.LayerNorm(channels, eps), [codes((5, channels), params(scale, 100))], params(0.02, 128))
    (op,) = made.emit.ops
    assert isinstance(op, LayerNorm) and op.epsilon == epsilon
    made.check(1.0)  # rounding epsilon changes results slightly


@pytest.mark.parametrize("index", [[[0, 1], [5, 3]], [[-1, 4]]])
def test_take_flattens_leading_axes(index: list[list[int]]) -> None:
    Made(layers.Take(torch.tensor(index)), [codes((2, 3, 4))], None).check(1e-9)


def test_the_bias_of_scores_is_rounded_to_the_accumulators_unit() -> None:
    halves = codes((2, 2, 8), params(0.5, 120)), codes((2, 2, 8), params(0.5, 99), 1)
    table = torch.tensor([[0.48, 0.52], [-0.48, -0.52], [3.5, -3.5], [7.3, -7.3]]).double() / 8
    made = Made(layers.BiasedScores(0.5, torch.tensor([[0, 1], [2, 3]])), [*halves], params(3.0, 128), table)
    assert made.emit.constants["y.bias"].tolist() == [[0, 1], [0, -1], [4, -3], [7, -7]]
    made.check(0.6)


@pytest.mark.parametrize("exp", ["table", "polynomial"])
def test_the_sum_of_exponentials_of_a_row_fits_31_bits(exp: str) -> None:
    """The bound depends on the length of a row, not on the number of windows and heads."""
    emit = emitted(
        layers.Softmax(), LoweredValue("x", (3, 2, 4096, 4096), params(0.04, 128)), params(1.0, 0, 4, log2=True), exp=exp
    )
    assert 2**29 <= 4096 * int(emit.constants["y.table"].max()) <= 2**30


@pytest.mark.parametrize("bits", [6, 8])
def test_the_table_of_exponentials_has_one_entry_per_distance(bits: int) -> None:
    emit = emitted(layers.Softmax(), LoweredValue("x", (2, 9, 9), params(1e-3, 3, bits)), params(1.0, 0, 4, log2=True))
    assert len(emit.constants["y.table"]) == 2**bits


@pytest.mark.parametrize("first, table", [(255, [0] * 255 + [1]), (256, [0])])
def test_every_distance_maps_to_the_nearest_level(first: int, table: list[int]) -> None:
    """first: the smallest distance for which the lower level, half of the upper one, is nearer."""
    q = params(-math.log(0.75) / (first - 0.5), 128)
    emit = emitted(layers.Softmax(), LoweredValue("x", (2, 9, 9), q), params(1.0, 0, 1, levels=(100, 50)))
    assert emit.constants["y.table"].tolist() == table


def test_a_convolution_reads_per_channel_scales() -> None:
    by_channel = QParams(8, np.array([0.25, 0.5, 0.125]), np.array([100, 3, 200]))
    conv = with_weights(maps.Conv2d(3, 4, "fpn"), whole(4, 3, 3, 3))
    Made(conv, [codes((2, 3, 3), by_channel)], params(4.0, 120)).check(0.6)
