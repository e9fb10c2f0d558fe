"""Test that masks pasted in integer arithmetic equal those pasted in float, except for pixels close to the threshold."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fqvit.detect.fixed.masks import paste
from fqvit.detect.float.masks import _axis as float_axis
from fqvit.detect.float.masks import paste as float_paste

HEIGHT, WIDTH = 30, 40


def random_probabilities(seed: int = 0, side: int = 28) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 2**15 + 1, (side, side)).astype(np.int32)


def values(probabilities: NDArray[np.int32], box: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the values that float pasting compares with the threshold, for all pixels."""
    x1, y1, x2, y2 = (box / 256).tolist()
    rows, columns = float_axis(y1, y2, 0, HEIGHT, len(probabilities)), float_axis(x1, x2, 0, WIDTH, len(probabilities))
    return np.asarray(rows @ (probabilities / 2**15) @ columns.T)


def assert_equal_away_from_threshold(box: NDArray[np.int64], threshold: float, probabilities: NDArray[np.int32]) -> None:
    found = paste(probabilities, box, HEIGHT, WIDTH, math.ceil(threshold * 2**30))
    exact = float_paste(probabilities / 2**15, box / 256, HEIGHT, WIDTH, threshold)
    # Positions in the mask are off by at most 2^-16 per axis, and interpolated rows are rounded to multiples of 2^-15.
    sure = np.abs(values(probabilities, box) - threshold) > 2.0**-14
    assert found.shape == exact.shape and (found == exact)[sure].all()


@settings(max_examples=150)
@given(
    st.tuples(st.integers(-20 * 256, 50 * 256), st.integers(-20 * 256, 50 * 256)),
    st.tuples(st.integers(0, 60 * 256), st.integers(0, 60 * 256)),
    st.sampled_from([0.25, 0.5, 0.7]),
    st.sampled_from([2, 28]),
)
def test_masks_equal_float_masks_away_from_the_threshold(
    low: tuple[int, int], sides: tuple[int, int], threshold: float, side: int
) -> None:
    box = np.array([*low, low[0] + sides[0], low[1] + sides[1]], np.int64)
    assert_equal_away_from_threshold(box, threshold, random_probabilities(side=side))


def test_masks_of_extreme_boxes_equal_float_masks() -> None:
    whole = [0, 0, 40 * 256, 30 * 256]
    for box in (whole, [5, 5, 6, 6], [2560] * 4, [-(2**21), -(2**21), 2**21, 2**21], [2**30] * 4):
        assert_equal_away_from_threshold(np.array(box, np.int64), 0.5, random_probabilities(1))


def test_probability_one_fills_the_box_and_probability_zero_fills_nothing() -> None:
    box = np.array([4 * 256, 3 * 256, 20 * 256, 10 * 256], np.int64)
    ones = np.full((28, 28), 2**15, np.int32)
    mask = paste(ones, box, HEIGHT, WIDTH, 2**29)
    expected = np.zeros((HEIGHT, WIDTH), bool)
    expected[3:10, 4:20] = True
    assert (mask == expected).all()
    assert not paste(ones * 0, box, HEIGHT, WIDTH, 1).any()
    assert paste(ones, box, HEIGHT, WIDTH, 2**30)[5, 8], "a probability of 1 reaches a threshold of 1"
