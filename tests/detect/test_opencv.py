"""Test that resizing is bit-identical to OpenCV.

The results are compared with stored pixels, with the installed cv2, and with weights computed in exact arithmetic.
"""

from __future__ import annotations

import json
import platform
from fractions import Fraction
from math import floor, log2
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fqvit.detect import images
from fqvit.detect.opencv import axis_weights, resize
from tests.factories import assert_same

from .opencv_values import LARGE, SMALL, VALUES, digest, image

CASES = json.loads(VALUES.read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "{}x{} to {}x{}".format(*case["old"], *case["new"]))
def test_resizing_gives_the_pixels_that_opencv_computed(case: dict[str, Any]) -> None:
    found = resize(image(*case["old"]), *case["new"])
    assert found.dtype == np.uint8 and found.shape == (*case["new"], 3)
    if "pixels" in case:
        assert_same(found.ravel(), np.array(case["pixels"], np.uint8), "computed and stored")
    else:
        assert digest(found) == case["sha256"]


def test_the_stored_pixels_cover_every_case() -> None:
    assert [(*case["old"], *case["new"]) for case in CASES] == [*SMALL, *LARGE]


def contents(rng: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    """Return noise, black and white pixels, one colour, bright noise or a gradient."""
    shape = (height, width, 3)
    y, x, _ = np.ogrid[:height, :width, :3]
    kinds = (
        rng.integers(0, 256, shape, np.uint8),
        rng.choice(np.array([0, 255], np.uint8), shape),
        np.full(shape, rng.integers(256), np.uint8),
        rng.integers(248, 256, shape, np.uint8),
        np.broadcast_to((x * 3 + y * 2) % 256, shape).astype(np.uint8),
    )
    return kinds[rng.integers(len(kinds))]


def sizes(rng: np.random.Generator, number: int) -> tuple[int, int, int, int]:
    """Return an old and a new size: arbitrary, an integer ratio, exactly 2 : 1, one row or column, or one side unchanged."""
    h, w, height, width = rng.integers(1, 12 if number % 3 else 150, 4).tolist()
    by_y, by_x = rng.integers(1, 6, 2).tolist()
    return (
        (h, w, height, width),
        (h, w, h * by_y, w * by_x),
        (height * by_y, width * by_x, height, width),
        (2 * height, 2 * width, height, width),
        (1, w, height, width),
        (h, 1, height, width),
        (h, w, 1, width),
        (h, w, height, 1),
        (h, w, h, width),
        (h, w, height, w),
        (h, w, h, w),
    )[number % 11]


@pytest.fixture(scope="module")
def cv2() -> ModuleType:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the bits are those of OpenCV on x86-64; other builds may fuse multiplications and additions")
    module: ModuleType = pytest.importorskip("cv2")
    return module


def assert_equals_opencv(cv2: ModuleType, pixels: NDArray[np.uint8], height: int, width: int) -> None:
    expected = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_LINEAR)
    assert_same(resize(pixels, height, width), expected, f"{pixels.shape[:2]} to {height} x {width}: fqvit and OpenCV")


def test_resizing_equals_the_installed_opencv(cv2: ModuleType) -> None:
    rng = np.random.default_rng(0)
    for number in range(660):
        h, w, height, width = sizes(rng, number)
        assert_equals_opencv(cv2, contents(rng, h, w), height, width)
    for h, w, height, width in LARGE:
        assert_equals_opencv(cv2, contents(rng, h, w), height, width)


@pytest.mark.parametrize("size", [(427, 640), (500, 333), (1200, 1600), (37, 2294), (1, 4000), (2047, 1023)])
def test_resizing_for_a_detector_equals_the_installed_opencv(cv2: ModuleType, size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8)
    assert_equals_opencv(cv2, pixels, *images.resized_size(*size, 800, 1333))


def test_opencv_without_optimizations_gives_the_same_pixels(cv2: ModuleType) -> None:
    before = cv2.useOptimized()
    cv2.setUseOptimized(False)
    try:
        for size in LARGE[:2]:
            assert_equals_opencv(cv2, image(*size[:2]), *size[2:])
    finally:
        cv2.setUseOptimized(before)


def nearest(x: Fraction, bits: int) -> Fraction:
    """Round to `bits` significant bits, ties to even, as in IEEE 754 without overflow or underflow."""
    if x == 0:
        return x
    exponent = floor(log2(abs(x)))  # log2 of a float may be off by one near powers of two
    exponent += (abs(x) >= Fraction(2) ** (exponent + 1)) - (abs(x) < Fraction(2) ** exponent)
    unit = Fraction(2) ** (exponent - bits + 1)
    return round(x / unit) * unit


def exact_axis(old: int, new: int) -> list[tuple[int, int, int]]:
    """Return (first, before, after) as in fqvit.detect.opencv, in rational arithmetic with every rounding written out."""
    half, scale, made = Fraction(1, 2), nearest(1 / nearest(Fraction(new, old), 53), 53), []
    for i in range(new):
        at = nearest(nearest(nearest((i + half) * scale, 53) - half, 53), 24)
        first = floor(at)
        share = nearest(at - first, 24)
        made.append((first, round(2048 * nearest(1 - share, 24)), round(2048 * share)))
    return made


@pytest.mark.parametrize(
    ("old", "new"), [(427, 800), (640, 1067), (4000, 37), (3, 1000), (1000, 3), (9999, 1024), (6000, 128), (1, 5463)]
)
def test_weights_follow_from_ieee_754_rounding_only(old: int, new: int) -> None:
    assert list(zip(*(part.tolist() for part in axis_weights(old, new)), strict=True)) == exact_axis(old, new)


def test_weights_sum_to_2048_up_to_a_side_of_5461_and_to_nearly_2048_above() -> None:
    rng, seen = np.random.default_rng(2), set()
    for old, new in [*rng.integers(1, 8193, (400, 2)).tolist(), *((old, new) for old in (1, 2) for new in range(5300, 5600))]:
        _, before, after = axis_weights(old, new)
        assert new > 5461 or (before + after == 2048).all()
        seen.update((before + after).tolist())
        assert before.min() >= 0 and after.min() >= 0
    assert seen == {2047, 2048, 2049}


def test_pixels_are_close_to_real_interpolation_with_the_same_weights() -> None:
    pixels = image(60, 45)
    y, above, below = axis_weights(60, 133)
    x, left, right = axis_weights(45, 31)
    wide = np.pad(pixels, ((1, 1), (1, 1), (0, 0)), "edge")
    rows = wide[y + 1] * (above[:, None, None] / 2048) + wide[y + 2] * (below[:, None, None] / 2048)
    real = rows[:, x + 1] * (left[:, None] / 2048) + rows[:, x + 2] * (right[:, None] / 2048)
    error = resize(pixels, 133, 31) - real
    # Row sums are truncated to units of 2^-7, then two products to units of 1/4. Their sum is rounded to an integer.
    assert -(3 + 1 / 32) / 4 < error.min() < -0.7 and 0.4 < error.max() <= 0.5


def test_one_colour_stays_one_colour() -> None:
    for value in range(256):
        assert (resize(np.full((3, 5, 3), value, np.uint8), 17, 4) == value).all()


def test_the_resize_rules_differ_by_at_most_one() -> None:
    pixels = image(75, 100)
    new, old = (resizer(pixels, 160, 213).astype(int) for resizer in (images.RESIZERS["opencv"], images.RESIZERS["rounded"]))
    assert abs(new - old).max() == 1 and 0.05 < (new < old).mean() < 0.2 and (new > old).mean() < 0.01
