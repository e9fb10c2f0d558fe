"""Tests of integer boxes: decoding within 1/128 pixel of real arithmetic, anchors, non-maximum suppression, rescaling."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fqvit.detect.boxes import LARGEST_LOG_RATIO
from fqvit.detect.fixed.boxes import anchors, decode, iou_above, rescaled, scaled
from fqvit.detect.fixed.constants import LOG_FRACTION, OFFSET_FRACTION, DeltaRatios, Ratio, anchor_halves
from fqvit.detect.fixed.exp import power_of_two
from fqvit.detect.float.anchors import anchors as float_anchors
from fqvit.detect.float.boxes import decode as float_decode
from fqvit.detect.float.boxes import iou_above as float_iou_above
from fqvit.detect.nms import grouped_nms, nms
from fqvit.detect.settings import DetectSettings
from fqvit.ir.fixed import multiplier, requantize, round_shift

LIMIT = round(LARGEST_LOG_RATIO / math.log(2) * 2**LOG_FRACTION)
BOUND = 1 / 128  # in pixels
STDS = (0.1, 0.1, 0.2, 0.2)
SIDES = st.integers(1, 8192)
DELTAS = st.integers(-400, 400) | st.integers(-(2**31), 2**31 - 1) | st.sampled_from([-(2**31), 2**31 - 1, 0])


def ratios_of(scale: float, stds: tuple[float, ...] = STDS) -> DeltaRatios:
    units = (2**OFFSET_FRACTION, 2**OFFSET_FRACTION, 2**LOG_FRACTION / math.log(2), 2**LOG_FRACTION / math.log(2))
    x, y, width, height = (Ratio(*multiplier(scale * std * unit)) for std, unit in zip(stds, units, strict=True))
    return x, y, width, height


def error(boxes: NDArray[np.int64], deltas: NDArray[np.int32], scale: float, size: tuple[int, int]) -> float:
    """Return the largest difference from float decoding, in pixels."""
    found = decode(boxes, deltas, ratios_of(scale), LIMIT, size)
    assert found.dtype == np.int64
    exact = float_decode(boxes / 256, deltas * scale, STDS, *size)
    return float(np.abs(found / 256 - exact).max())


@settings(max_examples=400)
@given(st.tuples(SIDES, SIDES), st.data(), st.floats(1e-6, 20.0))
def test_decoding_is_within_the_bound_of_real_arithmetic(size: tuple[int, int], data: st.DataObject, scale: float) -> None:
    edges = [data.draw(st.integers(0, 256 * side)) for side in (size[1], size[0], size[1], size[0])]
    box = np.array([min(edges[::2]), min(edges[1::2]), max(edges[::2]), max(edges[1::2])], np.int64)
    deltas = np.array([data.draw(DELTAS) for _ in range(4)], np.int32)
    assert error(box, deltas, scale, size) <= BOUND


def test_decoding_large_boxes_is_within_the_bound_at_the_image_border() -> None:
    """Test the largest errors: boxes of up to 8192 pixels, enlarged up to 62.5 times, with one edge inside the image."""
    rng = np.random.default_rng(0)
    count, scale = 200_000, 2.0**-14
    side = rng.integers(7000 * 256, 8192 * 256 + 1, (count, 1)) >> rng.integers(0, 12, (count, 1))
    low = (rng.random((count, 1)) * (2**21 - side)).astype(np.int64)
    box = np.concatenate([low, low, low + side, low + side], 1)
    log = rng.uniform(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO, (count, 1)) + rng.choice([0, 99], (count, 1))
    grown = np.exp(np.minimum(log, LARGEST_LOG_RATIO))
    # Choose offsets that put one edge at `wanted`: centre + offset * side -+ grown * side / 2 = wanted
    wanted = rng.random((count, 1)) * 2**21
    offset = (wanted - low) / side - 0.5 + rng.choice([-1, 1], (count, 1)) * grown / 2
    deltas = np.concatenate([offset / 0.1, offset / 0.1, log / 0.2, log / 0.2], 1) / scale
    assert np.abs(deltas).max() < 2**31
    largest = error(box, np.rint(deltas).astype(np.int32), scale, (8192, 8192))
    assert 1 / 1024 < largest <= BOUND  # largest = 0.0028


def test_decoding_anchors_outside_the_image_is_within_the_bound() -> None:
    start = anchors((4, 5), 64, ((181 * 256, 90 * 256), (3, 2**21)))
    deltas = np.random.default_rng(1).integers(-300, 300, start.shape).astype(np.int32)
    assert error(start, deltas, 0.05, (250, 300)) <= BOUND


RATIOS = st.builds(Ratio, st.sampled_from([0, 1, 2**30, 2**31 - 1]), st.integers(1, 62))


def long_decode(low: int, high: int, dx: int, dw: int, ratios: tuple[Ratio, Ratio], limit: int) -> tuple[int, int]:
    """Decode one axis with Python integers, which do not overflow, and without the limit on offsets."""
    offset, log = (requantize(code, ratio.mult, ratio.shift) for code, ratio in zip((dx, dw), ratios, strict=True))
    mantissa, exponent = (int(x) for x in power_of_two(np.array(min(max(log, -limit), limit), np.int64)))
    half = round_shift((high - low) * mantissa, 23 - exponent)
    centre = (low + high) * 128 + round_shift(offset * (high - low), 16)
    first, last = (min(max(round_shift(edge, 8), 0), 2**21) for edge in (centre - half, centre + half))
    return first, last


@settings(max_examples=300)
@given(st.tuples(RATIOS, RATIOS), st.sampled_from([0, LIMIT, 8 << LOG_FRACTION]), st.data())
def test_decoding_does_not_overflow_for_any_ratio(ratios: tuple[Ratio, Ratio], limit: int, data: st.DataObject) -> None:
    edges = st.sampled_from([0, 1, 2**21]) | st.integers(-(2**21), 2**22)
    low, high = sorted((data.draw(edges), data.draw(edges)))
    dx, dw = data.draw(DELTAS), data.draw(DELTAS)
    box, delta = np.array([low, low, high, high], np.int64), np.array([dx, dx, dw, dw], np.int32)
    found = decode(box, delta, (ratios[0], ratios[0], ratios[1], ratios[1]), limit, (8192, 8192)).tolist()
    assert tuple(found[::2]) == tuple(found[1::2]) == long_decode(low, high, dx, dw, ratios, limit)


def test_anchors_equal_float_anchors_up_to_rounding() -> None:
    s = DetectSettings()
    for stride in s.strides:
        exact = float_anchors((3, 5), stride, s.anchor_scale, s.anchor_ratios)
        assert np.abs(anchors((3, 5), stride, anchor_halves(stride, s)) / 256 - exact).max() <= 1 / 512


def some_boxes(count: int, seed: int = 0) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 250 * 256, (count, 2))
    return np.concatenate([start, start + rng.integers(0, 120 * 256, (count, 2))], 1)


@pytest.mark.parametrize("iou", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_nms_equals_float_nms(iou: float) -> None:
    boxes, scores = some_boxes(700), np.random.default_rng(1).integers(0, 50, 700)
    assert (
        nms(boxes, scores, iou_above(round(iou * 2**16))).tolist()
        == nms(boxes / 256, scores.astype(np.float64), float_iou_above(iou)).tolist()
    )
    groups = np.arange(700) % 4
    kept = grouped_nms(boxes, scores, groups, iou_above(round(iou * 2**16)))
    assert kept.tolist() == grouped_nms(boxes / 256, scores.astype(np.float64), groups, float_iou_above(iou)).tolist()


def test_iou_of_the_largest_boxes_does_not_overflow() -> None:
    whole = np.array([[0, 0, 2**21, 2**21]], np.int64)
    almost = whole - [[0, 0, 0, 1]]
    assert iou_above(2**16 - 1)(whole, almost)[0, 0] and not iou_above(2**16)(whole, almost)[0, 0]
    assert not iou_above(0)(whole, whole[:, [2, 3, 2, 3]])[0, 0], "a box without area overlaps nothing"


def test_rescaled_boxes_are_rounded() -> None:
    boxes = np.array([[0, 0, 1200 * 256, 800 * 256], [1, 3, 255, 2**17]], np.int64)
    found = rescaled(boxes, (800, 1200), (200, 301))
    assert found[0].tolist() == [0, 0, 301 * 256, 200 * 256]
    assert np.abs(found - boxes * np.array([301 / 1200, 1 / 4] * 2)).max() <= 0.5


def test_scaling_accepts_the_largest_codes() -> None:
    codes = np.array([-(2**31), 2**31 - 1, 0], np.int32)
    largest = Ratio(2**31 - 1, 1)
    assert scaled(codes, largest).tolist() == [(int(c) * (2**31 - 1) + 1) >> 1 for c in codes]
    box = np.array([[0, 0, 2**21, 1]] * 3, np.int64)
    every = np.stack([codes] * 4, 1)
    found = decode(box, every, (largest,) * 4, 8 << LOG_FRACTION, (8192, 8192))
    assert (found >= 0).all() and (found <= 2**21).all() and (found[0, ::2] == 0).all() and (found[1, ::2] == 2**21).all()
