"""Tests of the fixed-point primitives against exact fractions, on numpy and torch."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fqvit.ir import fixed
from tests.factories import few, many

ACC, MULT = 2**31 - 1, 2**31 - 1
LIBRARIES: dict[str, Any] = {
    "numpy": lambda xs: np.array(xs, np.int64),
    "torch": lambda xs: torch.tensor(xs, dtype=torch.int64),
}
both = pytest.mark.parametrize("library", LIBRARIES)


def floor_half(x: Fraction) -> int:
    return math.floor(x + Fraction(1, 2))


@both
@many
@given(
    acc=st.integers(-ACC, ACC) | st.sampled_from([0, 1, -1, ACC, -ACC]),
    mult=st.integers(0, MULT) | st.sampled_from([0, 1, 2**30, MULT]),
    shift=st.integers(1, 62) | st.sampled_from([1, 62]),
)
def test_requantize_rounds_once_and_ties_go_up(library: str, acc: int, mult: int, shift: int) -> None:
    array = LIBRARIES[library]
    expected = floor_half(Fraction(acc * mult, 2**shift))
    assert int(fixed.requantize(array([acc]), mult, shift)[0]) == expected
    assert int(fixed.requantize(array([acc]), array([mult]), array([shift]))[0]) == expected


@both
@pytest.mark.parametrize("acc, expected", [(-5, -2), (-3, -1), (-1, 0), (0, 0), (1, 1), (3, 2), (5, 3)])
def test_halves_of_either_sign_are_rounded_up(library: str, acc: int, expected: int) -> None:
    assert int(fixed.requantize(LIBRARIES[library]([acc]), 1, 1)[0]) == expected
    assert int(fixed.requantize(LIBRARIES[library]([acc]), 2**30, 31)[0]) == expected


@both
def test_the_largest_product_plus_the_rounding_term_fits_in_int64(library: str) -> None:
    for acc in (ACC, -ACC):
        for shift in (1, 62):
            got = int(fixed.requantize(LIBRARIES[library]([acc]), MULT, shift)[0])
            assert got == floor_half(Fraction(acc * MULT, 2**shift))


@both
def test_every_channel_may_have_its_own_shift(library: str) -> None:
    array = LIBRARIES[library]
    got = fixed.requantize(array([[7, -7, 1000]]), array([1, 3, 5]), array([1, 2, 62]))
    assert got.tolist() == [[4, -5, 0]]


@many
@given(st.floats(2.0**-32, 2.0**30 - 1))
def test_a_multiplier_is_accurate_to_31_bits(ratio: float) -> None:
    mult, shift = fixed.multiplier(ratio)
    assert 1 <= shift <= 62 and 2**30 <= mult < 2**31
    assert abs(Fraction(mult, 2**shift) / Fraction(ratio) - 1) <= Fraction(1, 2**31)


@many
@given(st.floats(2.0**-32, 2.0**30 - 1) | st.sampled_from([math.nextafter(2.0**e, 0) for e in range(-31, 30)]))
def test_no_other_multiplier_is_nearer(ratio: float) -> None:
    """The error is at most half a unit in the last place, even if the mantissa rounds up to 2."""
    mult, shift = fixed.multiplier(ratio)
    finest = min(31 - math.frexp(ratio)[1], 62)
    assert abs(Fraction(mult, 2**shift) - Fraction(ratio)) <= Fraction(1, 2 ** (finest + 1))


@pytest.mark.parametrize("ratio", [2.0**e for e in range(-32, 30)])
def test_powers_of_two_are_exact_multipliers(ratio: float) -> None:
    mult, shift = fixed.multiplier(ratio)
    assert Fraction(mult, 2**shift) == Fraction(ratio) and 2**30 <= mult < 2**31


@pytest.mark.parametrize("ratio", [math.nextafter(2.0**e, 0) for e in (-31, -5, 0, 1, 29)])
def test_a_mantissa_that_rounds_up_to_two_still_fits_31_bits(ratio: float) -> None:
    mult, shift = fixed.multiplier(ratio)
    assert mult < 2**31 and 1 <= shift <= 62
    assert abs(Fraction(mult, 2**shift) / Fraction(ratio) - 1) <= Fraction(1, 2**31)


@pytest.mark.parametrize("ratio", [math.nextafter(2.0**30, 0), 2.0**30 - 0.25, 2.0**30 - 0.5])
def test_a_ratio_just_below_the_limit_is_rejected_or_fits_31_bits(ratio: float) -> None:
    try:
        mult, shift = fixed.multiplier(ratio)
    except ValueError:
        return
    assert mult < 2**31 and 1 <= shift <= 62 and abs(Fraction(mult, 2**shift) / Fraction(ratio) - 1) <= Fraction(1, 2**31)


@pytest.mark.parametrize("ratio", [0.0, 5e-324, 2.0**-1000, 2.0**-40, 2.0**-33])
def test_a_ratio_too_small_for_shift_62_scales_everything_to_0(ratio: float) -> None:
    mult, shift = fixed.multiplier(ratio)
    assert (mult, shift) == (0, 62)
    for acc in (ACC, -ACC):
        assert int(fixed.requantize(np.array([acc]), mult, shift)[0]) == 0 == round(acc * ratio)


@pytest.mark.parametrize("ratio", [2.0**30, 2.0**31, 1e300, math.inf, -1.0, -5e-324, math.nan])
def test_a_ratio_that_no_multiplier_can_represent_is_rejected(ratio: float) -> None:
    with pytest.raises(ValueError, match="outside"):
        fixed.multiplier(ratio)


def log2_of(x: int) -> int:
    return x.bit_length() - 1


@both
def test_ilog2_is_the_index_of_the_most_significant_bit(library: str) -> None:
    small = list(range(1, 4097))
    edges = sorted({max(1, 2**e + d) for e in range(63) for d in (-1, 0, 1) if 2**e + d < 2**63})
    for xs in (small, edges):
        assert fixed.ilog2(LIBRARIES[library](xs)).tolist() == [log2_of(x) for x in xs]


def slow_ilog2_round(x: int) -> int:
    """Return floor(log2(x)), plus 1 if the mantissa of x is at least 1.5."""
    top = log2_of(x)
    return top + (2 * x >= 3 * 2**top)


@both
def test_ilog2_round_rounds_up_from_mantissa_1_5(library: str) -> None:
    small = list(range(1, 2**16 + 1))  # more than 4-bit codes need
    edges = sorted({max(1, 3 * 2**e // 2 + d) for e in range(61) for d in (-1, 0, 1)})
    for xs in (small, edges):
        assert fixed.ilog2_round(LIBRARIES[library](xs)).tolist() == [slow_ilog2_round(x) for x in xs]


@both
def test_ilog2_round_matches_the_papers_example_of_find_first_one(library: str) -> None:
    assert fixed.ilog2_round(LIBRARIES[library]([3500, 1, 2, 3])).tolist() == [12, 0, 1, 2]


@both
def test_isqrt_is_exact_for_small_numbers_and_near_powers_of_two_and_squares(library: str) -> None:
    xs = set(range(2**16)) | {2**e + d for e in range(62) for d in range(-3, 4) if 0 <= 2**e + d < 2**62}
    xs |= {r * r + d for e in range(31) for r in range(max(2**e - 3, 1), 2**e + 4) for d in (-1, 0, 1) if r * r + d < 2**62}
    ordered = sorted(xs)
    assert fixed.isqrt(LIBRARIES[library](ordered)).tolist() == [math.isqrt(x) for x in ordered]


@both
def test_round_divide_is_exact_for_every_small_pair(library: str) -> None:
    pairs = [(n, d) for n in range(-300, 301) for d in range(1, 130)]
    found = fixed.round_divide(*(LIBRARIES[library](side) for side in zip(*pairs, strict=True))).tolist()
    assert found == [(2 * n + d) // (2 * d) for n, d in pairs]


@both
def test_round_shift_is_exact_for_every_small_number(library: str) -> None:
    for shift in range(1, 12):
        xs = list(range(-5000, 5001))
        assert fixed.round_shift(LIBRARIES[library](xs), shift).tolist() == [(2 * x + 2**shift) // 2 ** (shift + 1) for x in xs]


@both
@few
@given(root=st.integers(1, 2**31 - 1) | st.sampled_from([1, 2, 2**30, 2**31 - 1]), x=st.integers(0, 2**62 - 1))
def test_isqrt_is_the_floor_of_the_root(library: str, root: int, x: int) -> None:
    xs = [x, root * root - 1, root * root, min(root * root + 1, 2**62 - 1), 2**62 - 1, 0, 1]
    assert fixed.isqrt(LIBRARIES[library](xs)).tolist() == [math.isqrt(x) for x in xs]


@both
@few
@given(numerator=st.integers(-(2**62), 2**62), denominator=st.integers(1, 2**31) | st.sampled_from([1, 2, 3, 2**31]))
def test_round_divide_rounds_once_and_ties_go_up(library: str, numerator: int, denominator: int) -> None:
    array = LIBRARIES[library]
    tie = denominator * 3 + denominator // 2 if denominator % 2 == 0 else denominator
    for n in (numerator, tie, -tie, denominator - 1, -1, 0):
        expected = floor_half(Fraction(n, denominator))
        assert int(fixed.round_divide(array([n]), array([denominator]))[0]) == expected
