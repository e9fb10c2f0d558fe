"""Tests of lowering/encode.py: real numbers become the nearest fixed-point integers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from fqvit.errors import FqvitError
from fqvit.ir.fixed import multiplier
from fqvit.lowering.encode import _shortened, encode_affine, encode_ratio, powers, quotient_fraction, shared_shift, to_int32
from fqvit.quant.qparams import QParams

RATIOS = st.floats(2.0**-30, 2.0**29)
# Around powers of two, where rounding to 16 bits can carry into the next power, and where the shift becomes small.
EDGES = [
    2.0**e * f for e in (-20, -1, 0, 13, 14, 15, 16, 29) for f in (1 - 2.0**-31, 1 - 2.0**-17, 1 - 2.0**-18, 1.0, 1 + 2.0**-16)
]


def check_short(ratio: float, mult: int, shift: int) -> None:
    """Check that mult is the nearest 16-bit multiplier, or the 31-bit one if a 16-bit one would need a shift below 1."""
    assert 1 <= shift <= 62
    if ratio >= 2.0**15:
        assert (mult, shift) == multiplier(ratio)
    else:
        assert 2**15 <= mult < 2**16
        half = 2.0**-shift / 2
        greatest = (mult, shift) == (2**16 - 1, 1)
        assert abs(mult / 2.0**shift - ratio) <= (2 if greatest else 1) * half * (1 + 2.0**-14)


@given(RATIOS)
def test_short_multipliers_are_the_nearest_16_bit_numbers(ratio: float) -> None:
    check_short(ratio, *_shortened(*multiplier(ratio)))


@pytest.mark.parametrize("ratio", EDGES)
def test_short_multipliers_near_powers_of_two_have_a_valid_shift(ratio: float) -> None:
    check_short(ratio, *_shortened(*multiplier(ratio)))


def test_the_short_multiplier_of_a_tiny_ratio_is_0() -> None:
    assert _shortened(*multiplier(2.0**-40)) == (0, 62)


def test_multipliers_have_31_or_16_bits() -> None:
    assert encode_ratio("y", 0.3, short=False) == multiplier(0.3)
    assert encode_ratio("y", 0.3, short=True) == _shortened(*multiplier(0.3))


@pytest.mark.parametrize("ratio", [2.0**30, float("nan"), float("inf"), -1.0])
def test_ratios_that_no_multiplier_can_represent_are_rejected(ratio: float) -> None:
    with pytest.raises(FqvitError, match="^here: the ratio of its scales is .* no multiplier can represent"):
        encode_ratio("here", ratio, short=False)


@given(st.lists(RATIOS.map(lambda r: r / 2), min_size=1, max_size=5), st.booleans())
def test_terms_of_a_sum_share_the_largest_shift_that_fits(ratios: list[float], short: bool) -> None:
    room, largest = 15 if short else 29, max(ratios)
    if largest >= 2.0 ** (room - 1):
        with pytest.raises(FqvitError, match="^sum: the ratio of its scales is"):
            shared_shift("sum", [np.array(ratios)], short)
        return
    # The largest of all ratios, over both terms, determines the shift.
    mults, shift = shared_shift("sum", [np.array(ratios), np.array(ratios[::-1][:1])], short)
    exact = [r * 2.0**shift for r in (*ratios, ratios[-1])]
    assert [m for mult in mults for m in mult.tolist()] == [int(np.floor(x + 0.5)) for x in exact]
    assert 1 <= shift <= 47 and max(exact) <= 2.0**room
    assert shift == 47 or max(exact) >= 2.0 ** (room - 1)


@pytest.mark.parametrize("short, room", [(False, 29), (True, 15)])
def test_a_shared_shift_is_between_1_and_47(short: bool, room: int) -> None:
    below = np.nextafter(2.0 ** (room - 1), 0)
    assert shared_shift("sum", [np.array([below])], short) == ([np.array([2**room])], 1)
    with pytest.raises(FqvitError, match="no multiplier can represent"):
        shared_shift("sum", [np.array([2.0 ** (room - 1)])], short)
    assert shared_shift("sum", [np.array([2.0**-60])], short)[1] == 47
    assert shared_shift("sum", [np.array([2.0 ** (room - 47)])], short)[1] == 46


@pytest.mark.parametrize(
    "gain, offset, g_fraction, b_fraction",
    [
        ([1.0, -0.3], [0.7, -1.0], 21, 20),
        ([0.3, -1.0], [-1023.0, 3.0], 21, 20),  # b_fraction = 30 - 10, because 1023 < 2^10
        ([0.3, -3.0], [1024.3, 3.0], 20, 19),
        ([2.0**22, 1.0], [-(2.0**20), 0.3], 0, 9),
        ([2.0**25, 1.0], [-(2.0**25), 0.3], 0, 4),
        ([2.0**-9, 2.0**-12], [0.0, 0.0], 28, 20),
        ([2.0**-6, 2.0**-12], [0.0, 1.0], 27, 20),
        ([0.0, 0.0], [3.0, 0.3], 21, 20),
    ],
)
def test_encode_affine_rounds_to_the_nearest_integers(
    gain: list[float], offset: list[float], g_fraction: int, b_fraction: int
) -> None:
    both, shift, b_shift = encode_affine("norm", np.array(gain), np.array(offset), 24)
    assert (shift - 24, shift - b_shift) == (g_fraction, b_fraction)
    assert both.dtype == np.int32 and both.shape == (2, 2)
    assert both[0].tolist() == [int(np.floor(x * 2**g_fraction + 0.5)) for x in gain]
    assert both[1].tolist() == [int(np.floor(x * 2**b_fraction + 0.5)) for x in offset]


def test_values_that_do_not_fit_32_bits_are_rejected() -> None:
    ends = np.array([2**31 - 1, 1 - 2**31])
    assert to_int32("y", "bias", ends).tolist() == ends.tolist()
    for wrong in (2**31, -(2**31)):
        with pytest.raises(FqvitError, match="^y: bias does not fit 32 bits"):
            to_int32("y", "bias", np.array([0, wrong]))
    with pytest.raises(FqvitError, match="^norm: gamma or beta does not fit 32 bits"):
        encode_affine("norm", np.array([2.0**31]), np.array([1.0]), 24)


@pytest.mark.parametrize(("channels", "fraction"), [(1, 24), (16128, 24), (16129, 23), (65024, 23), (65025, 22), (2**20, 20)])
def test_long_rows_of_a_norm_have_fewer_fraction_bits(channels: int, fraction: int) -> None:
    """The fraction is the largest number up to 24 with (isqrt(C) + 1) * 2^fraction < 2^31.

    The left side is a bound on the quotients of a row of C channels.
    """
    root = math.isqrt(channels) + 1
    assert quotient_fraction(channels) == fraction
    assert root << fraction < 2**31 and (fraction == 24 or root << fraction + 1 >= 2**31)
    both, shift, b_shift = encode_affine("norm", np.array([0.5]), np.array([3.0]), fraction)
    assert both[0, 0] / 2.0 ** (shift - fraction) == 0.5 and both[1, 0] / 2.0 ** (shift - b_shift) == 3.0


def test_powers_splits_scales_into_the_finest_one_and_powers_of_two() -> None:
    finest, alpha, zeros = powers(QParams(8, np.array([0.3, 1.2, 0.3, 2.4]), np.array([5, 9, 5, 11])))
    assert (finest, alpha.tolist(), zeros) == (0.3, [0, 2, 0, 3], (5, 0, 9, 11))
    assert alpha.dtype == np.uint8
    assert powers(QParams(8, np.array([0.3] * 4), np.array([5] * 4))) == (0.3, pytest.approx(np.zeros(4)), (5,))
