"""Tests of multiply, rotary, depthwise and max: bounds, rejected programs, and agreement with float functions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fqvit.errors import FqvitError
from fqvit.ir.elementwise import Depthwise, Max, Multiply, Rotary
from fqvit.ir.kit import kit
from fqvit.ir.ops import Mean
from fqvit.ir.value import Scope, Value
from tests.factories import many
from tests.ir.test_bounds import BYTE, farthest, proofs_of, u8

RATIO: Any = {"mult": 1, "shift": 1}
Arrays = dict[str, np.ndarray[Any, Any]]


def value_of(op: Any, values: dict[str, Value], constants: Arrays | None = None) -> Value:
    value: Value = op.infer(Scope(values, constants or {}, "y"))[0]
    return value


def result_of(op: Any, arrays: Arrays) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = op.run(kit("numpy"), arrays.__getitem__)
    return found


@many
@given(st.integers(1, 16), st.integers(1, 16), BYTE, BYTE)
def test_multiply_is_bounded_by_both_operands(a_bits: int, b_bits: int, a_zero: int, b_zero: int) -> None:
    a_last, b_last = 2**a_bits - 1, 2**b_bits - 1
    values = {"a": Value("u16", (2, 3), 0, a_last), "b": Value("u16", (3,), 0, b_last)}
    op = Multiply(y="y", a="a", b="b", **RATIO, a_zero=a_zero, b_zero=b_zero)
    worst = farthest(a_zero, 0, a_last) * farthest(b_zero, 0, b_last)
    assert proofs_of(op, values) == {"product": (worst, 31)}
    assert value_of(op, values).shape == (2, 3)


def test_two_operands_of_16_bits_overflow_unless_their_zero_points_are_in_the_middle() -> None:
    values = {"a": Value("u16", (3,), 0, 2**16 - 1), "b": Value("u16", (3,), 0, 2**16 - 1)}
    edge, middle = (Multiply(y="y", a="a", b="b", **RATIO, a_zero=z, b_zero=z) for z in (0, 2**15))
    assert not edge.infer(Scope(values, {}, "y"))[1][0].holds and middle.infer(Scope(values, {}, "y"))[1][0].holds


@many
@given(st.integers(-(2**15), 2**15 - 1), st.integers(-(2**15), 2**15 - 1), BYTE)
def test_rotary_is_bounded_by_the_largest_pair_of_its_table(cosine: int, sine: int, zero: int) -> None:
    table = np.array([[[0, cosine], [3, 0]], [[0, sine], [-4, 0]]], np.int16)
    op = Rotary(y="y", x="x", partner="p", **RATIO, zero=zero)
    worst = farthest(zero) * max(abs(cosine) + abs(sine), 7)
    assert proofs_of(op, {"x": u8(5, 2, 4)}, {"y.table": table, "p": np.array([1, 0], np.int32)}) == {"acc": (worst, 31)}


@many
@given(st.lists(st.integers(-128, 127), min_size=1, max_size=9), st.integers(-(2**20), 2**20), st.integers(1, 16))
def test_depthwise_is_bounded_by_its_positive_and_negative_weights(w: list[int], bias: int, bits: int) -> None:
    last = 2**bits - 1
    high = sum(last * max(x, 0) for x in w) + max(bias, 0)
    low = sum(last * min(x, 0) for x in w) + min(bias, 0)
    # The second channel has smaller sums.
    constants = {"y.w": np.array([[x, 0] for x in w], np.int8), "y.bias": np.array([bias, 0], np.int32)}
    constants |= {"y.mult": np.ones(2, np.int32), "y.shift": np.ones(2, np.uint8), "i": np.zeros((7, len(w)), np.int32)}
    values = {"x": Value("u8" if bits <= 8 else "u16", (3, 2), 0, last)}
    op = Depthwise(y="y", x="x", index="i")
    assert proofs_of(op, values, constants) == {"acc": (max(high, -low), 31)}
    assert value_of(op, values, constants).shape == (7, 2)


def test_max_keeps_the_type_the_range_and_the_mask_of_its_input() -> None:
    x = Value("u16", (2, 5, 3), 7, 900, row_sum=9, masked=True, row_code=8)
    assert value_of(Max(y="y", x="x"), {"x": x}) == Value("u16", (2, 3), 7, 900, masked=True)
    assert proofs_of(Max(y="y", x="x"), {"x": x}) == {}


GATE = {"a": u8(4, 6), "b": u8(3, 6)}
TABLE = {"y.table": np.zeros((2, 4, 3), np.int16), "p": np.zeros(3, np.int32)}
TAPS = {"y.w": np.ones((2, 6), np.int8), "y.bias": np.zeros(6, np.int32), "y.mult": np.ones(6, np.uint16)}
TAPS |= {"y.shift": np.ones(6, np.uint8), "i": np.zeros((5, 2), np.int32)}
MULTIPLY, ROTARY = Multiply(y="y", a="a", b="b", **RATIO), Rotary(y="y", x="x", partner="p", **RATIO)
DEPTHWISE, X = Depthwise(y="y", x="x", index="i"), {"x": u8(4, 6)}
REJECTED: dict[str, tuple[Any, dict[str, Value], Arrays, str]] = {
    "a gate with a different number of rows": (
        MULTIPLY,
        GATE,
        {},
        r"'b' has shape \[3, 6\], expected \[4, 6\] or its last axes",
    ),
    "a gate with more axes": (MULTIPLY, GATE | {"b": u8(2, 4, 6)}, {}, "expected .4, 6. or its last axes"),
    "a gate of accumulators": (MULTIPLY, GATE | {"b": Value("i32", (4, 6), 0, 9)}, {}, "'b' is i32"),
    "a gate that is a constant": (MULTIPLY, {"a": u8(4, 6)}, {"b": np.zeros(6, np.uint8)}, "reads 'b' before"),
    "a period that does not divide the channels": (
        ROTARY,
        {"x": u8(4, 8)},
        TABLE,
        "table of 3 columns does not divide 8 channels",
    ),
    "rotation of vectors": (ROTARY, {"x": u8(6)}, TABLE, "expected 2 axes or more"),
    "a table for a different number of tokens": (ROTARY, {"x": u8(5, 6)}, TABLE, "constant 'y.table' has shape"),
    "a partner past the last channel": (
        ROTARY,
        X,
        TABLE | {"p": np.array([0, 1, 3], np.uint16)},
        "'p' points outside 3 channels",
    ),
    "a negative partner": (ROTARY, X, TABLE | {"p": np.array([0, 1, -1], np.int32)}, "'p' points outside 3 channels"),
    "an index past the last row": (DEPTHWISE, X, TAPS | {"i": np.full((5, 2), 4, np.int32)}, "'i' points outside 4 rows"),
    "an index below -1": (DEPTHWISE, X, TAPS | {"i": np.full((5, 2), -2, np.int32)}, "'i' points outside 4 rows"),
    "an index with a different number of taps": (
        DEPTHWISE,
        X,
        TAPS | {"i": np.zeros((5, 3), np.int32)},
        "constant 'i' has shape",
    ),
    "an index that is one number": (DEPTHWISE, X, TAPS | {"i": np.array(0, np.int32)}, "constant 'i' has shape"),
    "no index": (Depthwise(y="y", x="x", index="none"), X, TAPS, "constant 'none' is missing"),
    "a fill that is not a code": (Depthwise(y="y", x="x", index="i", fill=256), X, TAPS, r"fill is outside 0\.\.255"),
    "a shift of 0": (DEPTHWISE, X, TAPS | {"y.shift": np.zeros(6, np.uint8)}, "shift must be in"),
    "a maximum of a vector": (Max(y="y", x="x"), {"x": u8(6)}, {}, "expected 2 axes or more"),
    "a mean that skips all rows": (Mean(y="y", x="x", **RATIO, skip=2), {"x": u8(9, 2, 6)}, {}, "skip is 2 for shape"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_infer_rejects_an_op_that_does_not_match_its_inputs(case: str) -> None:
    op, values, constants, message = REJECTED[case]
    with pytest.raises(FqvitError, match=f"^y: .*{message}"):
        op.infer(Scope(values, constants, "y"))


def test_a_gate_has_its_own_values_for_every_image() -> None:
    a, b = np.full((2, 3, 2), 100, np.uint8), np.array([[1, 2], [3, 4]], np.uint8)
    op = Multiply(y="y", a="a", b="b", mult=2, shift=1, bits=16)
    assert result_of(op, {"a": a, "b": b})[:, 0].tolist() == [[100, 200], [300, 400]]


def test_rotary_turns_pairs_of_channels_by_their_angle() -> None:
    """A pair is two neighbours, as in EVA-02, or two channels half a head apart, as in DINOv3."""
    rng, tokens, width = np.random.default_rng(0), 5, 8
    angle = rng.uniform(0, 2 * math.pi, (tokens, width // 2))
    codes = rng.integers(0, 256, (1, tokens, 2 * width)).astype(np.uint8)
    x = (codes[0].astype(float) - 128).reshape(tokens, 2, width)
    for first in (np.arange(0, width, 2), np.arange(width // 2)):
        second = first + (1 if first[1] == 2 else width // 2)
        partner, cosine, sine = np.zeros(width, np.int32), np.zeros((tokens, width)), np.zeros((tokens, width))
        partner[first], partner[second] = second, first
        cosine[:, first] = cosine[:, second] = np.cos(angle)
        sine[:, first], sine[:, second] = -np.sin(angle), np.sin(angle)
        table = np.rint(np.stack([cosine, sine]) * 2**14).astype(np.int16)
        op = Rotary(y="y", x="x", partner="p", mult=2**20, shift=34, zero=128, y_zero=256, bits=9)
        got = result_of(op, {"x": codes, "y.table": table, "p": partner})[0].astype(float) - 256
        pair = x[..., first] + 1j * x[..., second]
        turned = pair * np.exp(1j * angle)[:, None]
        expected = np.empty_like(x)
        expected[..., first], expected[..., second] = turned.real, turned.imag
        assert np.abs(got.reshape(x.shape) - expected).max() < 0.52


@pytest.mark.parametrize("stride, dilation, padding", [(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 0)])
def test_depthwise_computes_grouped_convolutions(stride: int, dilation: int, padding: int) -> None:
    rng, side, channels, zero = np.random.default_rng(0), 7, 3, 99
    x = rng.integers(0, 256, (2, side, side, channels)).astype(np.uint8)
    w = rng.integers(-127, 128, (channels, 3, 3))
    planes = torch.tensor(x.astype(float) - zero).permute(0, 3, 1, 2)
    weights = torch.tensor(w.astype(float))[:, None]
    expected = torch.nn.functional.conv2d(planes, weights, None, stride, padding, dilation, channels).permute(0, 2, 3, 1)
    size = expected.shape[1]
    start = np.arange(size) * stride - padding
    at = [axis + np.arange(3) * dilation for axis in start]
    index = np.array(
        [[[r * side + c if 0 <= r < side and 0 <= c < side else -1 for r in rs for c in cs] for cs in at] for rs in at]
    )
    arrays = {"x": x, "i": index.astype(np.int32), "y.w": w.reshape(channels, 9).T.astype(np.int8)}
    arrays |= {"y.bias": (-zero * w.sum((1, 2))).astype(np.int32)}
    arrays |= {"y.mult": np.full(channels, 1, np.int32), "y.shift": np.full(channels, 3, np.uint8)}
    got = result_of(Depthwise(y="y", x="x", index="i", fill=zero, y_zero=2**15, bits=16), arrays)
    assert got.shape == (2, size, size, channels)
    assert (got.astype(int) - 2**15 == np.clip(np.floor(expected.numpy() / 8 + 0.5), -(2**15), 2**15 - 1)).all()


def test_means_and_maxima_are_computed_per_window() -> None:
    x = np.random.default_rng(0).integers(0, 256, (2, 5, 4, 3)).astype(np.uint8)
    assert (result_of(Max(y="y", x="x"), {"x": x}) == x.max(2)).all()
    mean = Mean(y="y", x="x", mult=2**28, shift=30)
    assert (result_of(mean, {"x": x}) == np.floor(x.mean(2) + 0.5)).all()
