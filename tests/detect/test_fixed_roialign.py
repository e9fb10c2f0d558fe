"""Integer RoIAlign: exact weights, compiled code equal to numpy, and the difference from float RoIAlign."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fqvit import _native
from fqvit.detect.fixed.constants import Ratio, least_area
from fqvit.detect.fixed.roialign import (
    AlignParams,
    align_sums,
    axis_weights,
    level_of,
    multiscale_roi_align,
    native_roi_align,
    roi_align,
)
from fqvit.detect.float.roialign import level_of as float_level_of
from fqvit.detect.float.roialign import roi_align as float_roi_align
from fqvit.ir.fixed import multiplier
from fqvit.runtime.native import instruction_sets

Boxes = NDArray[np.int64]
STRIDE = 4
CELL = 256 * STRIDE
EDGES = st.one_of(
    st.integers(-60 * 256, 120 * 256),
    st.integers(-20, 40).map(lambda i: i * CELL // 2),  # on cell borders and centres
    st.sampled_from([0, 1, -1, 2**21, -(2**21), 2**21 - 1]),
)


def align_params(
    ratio: float = 1.0, zero: int = 100, head_zero: int = 120, last: int = 255, stride: int = STRIDE
) -> AlignParams:
    return AlignParams(stride, zero, Ratio(*multiplier(ratio / 2**22)), head_zero, last)


def some_map(height: int = 23, width: int = 31, channels: int = 5, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels)).astype(np.uint8)


def some_boxes(count: int, reach: int, seed: int = 0) -> Boxes:
    rng = np.random.default_rng(seed)
    low = rng.integers(-reach // 3, reach, (count, 2))
    return np.concatenate([low, low + rng.integers(0, reach, (count, 2))], 1)


PARAMS = (
    align_params(),
    align_params(3.7, 0, 0),
    align_params(0.01, 255, 255, 15),
    align_params(200.0, 7, 3),
    AlignParams(STRIDE, 1, Ratio(0, 62), 9, 255),
)
EXTREME = np.array(
    [
        [0, 0, 0, 0],
        [5, 5, 6, 6],
        [0, 0, 2**21, 2**21],
        [-(2**21), -(2**21), 2**21, 2**21],
        [2**21 - 1, 2**21 - 1, 2**21, 2**21],
        [900, 900, 100, 100],  # x2 < x1
        [0, 0, 2**21, 1],
        [CELL, CELL, 2 * CELL, 2 * CELL],
        [-3 * CELL // 2, -CELL, CELL // 2, 0],
    ],
    np.int64,
)


def slow_weights(low: int, high: int, bins: int, size: int) -> NDArray[np.int64]:
    """Compute the weights sample by sample with fractions, rounded once."""
    weights = [[Fraction(0)] * size for _ in range(bins)]
    length = Fraction(high - low, CELL)
    samples = ceil(length / bins)
    for b in range(bins):
        for i in range(samples):
            position = Fraction(low, CELL) - Fraction(1, 2) + (b + (i + Fraction(1, 2)) / samples) * length / bins
            if -1 <= position <= size:
                position = min(max(position, Fraction(0)), Fraction(size - 1))
                first = int(position)
                weights[b][first] += (1 - (position - first)) / samples
                weights[b][min(first + 1, size - 1)] += (position - first) / samples
    return np.array([[int((w * 2**15 + Fraction(1, 2)) // 1) for w in row] for row in weights])


@settings(max_examples=60, deadline=None)
@given(st.integers(-30 * CELL, 60 * CELL), st.integers(0, 50 * CELL), st.sampled_from([1, 2, 7]), st.integers(1, 20))
def test_weights_are_exact_and_rounded_once(low: int, length: int, bins: int, size: int) -> None:
    assert (axis_weights(low, low + length, CELL, bins, size) == slow_weights(low, low + length, bins, size)).all()


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("side", [1, 7, 14])
def test_compiled_roi_align_equals_numpy(isa: str, side: int) -> None:
    boxes = np.concatenate([EXTREME, some_boxes(60, 100 * 256), some_boxes(40, 12 * 256, 1)])
    for shape in ((23, 31, 5), (1, 1, 1), (3, 40, 33), (50, 2, 16)):
        for params in PARAMS:
            map_ = some_map(*shape)
            expected = roi_align(map_, boxes, side, params)
            for threads in (1, 3):
                found = native_roi_align(threads, isa)(map_, boxes, side, params)
                assert found.dtype == np.uint8 and found.shape == expected.shape and (found == expected).all()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(EDGES, EDGES, EDGES, EDGES), max_size=6), st.sampled_from([1, 4, 64, 1024]), st.integers(0, 99))
def test_compiled_roi_align_equals_numpy_on_any_boxes(boxes: list[tuple[int, ...]], stride: int, seed: int) -> None:
    some, map_, params = np.array(boxes, np.int64).reshape(-1, 4), some_map(9, 12, 3, seed), align_params(stride=stride)
    assert (native_roi_align(1)(map_, some, 7, params) == roi_align(map_, some, 7, params)).all()


@pytest.mark.parametrize("side", [7, 14])
def test_sums_are_close_to_float_roi_align(side: int) -> None:
    boxes = np.concatenate([some_boxes(100, 100 * 256), some_boxes(60, 12 * 256, 1), EXTREME])
    for map_ in (some_map(), np.full((23, 31, 5), 255, np.uint8), np.zeros((23, 31, 5), np.uint8)):
        exact = float_roi_align(map_.astype(np.float32) - 100, boxes / 256, STRIDE, side)
        found = align_sums(map_, boxes, side, align_params(zero=100))
        assert np.abs(found).max() < 2**31
        # Weights are rounded to multiples of 2^-15. Per axis, each cell of a bin adds an error of at most 2^-16 * 155,
        # because the largest |value| is 155.
        # Sums over rows are rounded to multiples of 2^-7, which adds an error of at most 2^-8.
        cells = np.minimum((boxes[:, 2:] - boxes[:, :2]).max(1) // CELL // side + 3, 31)
        bound = 2 * 155 * cells / 2**16 + 2.0**-8 * 1.01 + 1e-4
        assert (np.abs(found / 2**22 - exact).reshape(len(boxes), -1).max(1) <= bound).all()


def test_a_constant_map_gives_its_value_inside_and_0_outside() -> None:
    map_ = np.full((20, 20, 2), 77, np.uint8)
    inside = np.array([[8 * 256, 8 * 256, 40 * 256, 33 * 256]], np.int64)
    assert (roi_align(map_, inside, 7, align_params(zero=0, head_zero=0)) == 77).all()
    assert (roi_align(map_, inside + 2**20, 7, align_params(zero=9, head_zero=33)) == 33).all(), "outside: value 0"


def test_levels_equal_float_levels() -> None:
    rng = np.random.default_rng(0)
    side = np.concatenate([rng.integers(0, 2**21, 500), [0, 1], *([256 * 56 * 2**k + d for d in (-1, 0, 1)] for k in range(5))])
    boxes = np.stack([side * 0, side * 0, side, side], 1).astype(np.int64)
    found = level_of(boxes, [least_area(56.0, k) for k in (1, 2, 3)])
    assert (found == float_level_of(boxes / 256, 56.0, 4)).all() and set(found) == {0, 1, 2, 3}


@pytest.mark.parametrize("align", [roi_align, native_roi_align(1)], ids=["numpy", "native"])
def test_each_box_uses_the_level_for_its_size(align: object) -> None:
    levels, params = [some_map(seed=1), some_map(12, 16, seed=2)], [align_params(), align_params(0.5, 30, stride=8)]
    boxes = np.array([[0, 0, 20, 20], [0, 0, 40, 40], [3, 3, 9, 9]], np.int64) * 256
    rois = multiscale_roi_align(levels, boxes, 7, [(32 * 256) ** 2], params, align)  # type: ignore[arg-type]
    assert (rois[1] == roi_align(levels[1], boxes[1:2], 7, params[1])[0]).all()
    assert (rois[[0, 2]] == roi_align(levels[0], boxes[[0, 2]], 7, params[0])).all()
    assert multiscale_roi_align(levels, boxes[:0], 7, [9], params, align).shape == (0, 7, 7, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"side": 0}, {"side": 65}, {"cell": 255}, {"cell": 2**18 + 1}, {"zero": 256}, {"zero": -1}, {"mult": 2**31},
        {"mult": -1}, {"shift": 0}, {"shift": 63}, {"head_zero": 256}, {"last": 256},
        {"boxes": np.array([[0, 0, 0, 2**24 + 1]])}, {"boxes": np.array([[-(2**62), 0, 0, 0]])},
        {"map": np.zeros((1, 8193, 1), np.uint8)},
        {"map": np.zeros((0, 3, 1), np.uint8)}, {"map": np.zeros((2, 3, 0), np.uint8)},
    ],
)  # fmt: skip
def test_arguments_that_could_overflow_are_rejected(change: dict[str, object]) -> None:
    good: dict[str, object] = {
        "map": some_map(), "boxes": EXTREME, "side": 7, "cell": CELL, "zero": 0, "mult": 1, "shift": 1, "head_zero": 0,
        "last": 255, "threads": 1,
    }  # fmt: skip
    assert _native.roi_align(**good).shape == (len(EXTREME), 7, 7, 5)  # type: ignore[arg-type]
    with pytest.raises(_native.BadProgram):
        _native.roi_align(**good | change)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _native.roi_align(**good | {"boxes": np.zeros((2, 3), np.int64)})  # type: ignore[arg-type]
