"""Tests of ir/value.py: bounds against exhaustive search, and checks of constants, zero points and codes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from fqvit.errors import FqvitError
from fqvit.ir.value import MAX_AXES, MAX_CHANNELS, MAX_ELEMENTS, Scope, Value, magnitude

SMALL = range(-4, 5)


def scope(**constants: Any) -> Scope:
    return Scope({"x": Value("u8", (4,), 0, 255)}, {name: np.array(*made) for name, made in constants.items()}, "op")


def test_magnitude_is_the_largest_distance_over_all_pairs() -> None:
    pairs = [(lo, hi) for lo, hi in itertools.product(SMALL, SMALL) if lo <= hi]
    for (lo, hi), (first, last) in itertools.product(pairs, pairs):
        tried = max(abs(x - zero) for x in range(lo, hi + 1) for zero in range(first, last + 1))
        assert magnitude(lo, hi, first, last) == tried
    assert [magnitude(lo, hi) for lo, hi in ((-3, 7), (-9, 7), (2, 7))] == [7, 9, 7]  # zero point 0


def test_limits_are_those_of_the_format() -> None:
    """Readers in other languages rely on docs/reference/format.md."""
    assert (MAX_ELEMENTS, MAX_AXES, MAX_CHANNELS) == (2**28, 8, 2**20)


@pytest.mark.parametrize("dtype, name", [(np.uint8, "u8"), (np.int16, "i16"), (np.int32, "i32")])
def test_a_constant_operand_has_its_actual_bounds(dtype: Any, name: str) -> None:
    found = scope(c=([[9, 3], [100, 7]], dtype)).either("c", ("u8", "i16", "i32"))
    assert found == Value(name, (2, 2), 3, 100)


@pytest.mark.parametrize("made", [([1.0], np.float32), ([1], np.int64), ([1], np.uint16), ([True], bool), ([], np.uint8)])
def test_a_constant_operand_of_another_dtype_or_without_elements_is_rejected(made: Any) -> None:
    with pytest.raises(FqvitError, match="op: constant 'c' is .*, expected u8 or i32"):
        scope(c=made).either("c", ("u8", "i32"))


def test_zero_returns_the_lowest_and_highest_zero_point() -> None:
    assert scope().zero(7, 4) == (7, 7)
    assert scope().zero((9, 200), 4) == scope().zero((200, 9), 4) == (9, 200)
    assert scope(z=([5, 3, 250, 9], np.uint8)).zero("z", 4) == (3, 250)
    assert scope().zero((0, 65535), 4) == (0, 65535)


@pytest.mark.parametrize("zero", [-1, 65536, (-1, 3), (3, -1), (65536, 3), (3, 65536)])
def test_a_zero_point_that_is_not_a_code_is_rejected(zero: Any) -> None:
    with pytest.raises(FqvitError, match="op: zero point outside 0..65535"):
        scope().zero(zero, 4)


@pytest.mark.parametrize("bits, dtype", [(1, "u8"), (8, "u8"), (9, "u16"), (16, "u16")])
def test_codes_are_u8_up_to_8_bits_and_u16_above(bits: int, dtype: str) -> None:
    assert scope().codes(bits, (4,), 2**bits - 1) == Value(dtype, (4,), 0, 2**bits - 1)
    with pytest.raises(FqvitError, match=f"op: y_zero is outside 0..{2**bits - 1}" if bits < 16 else "zero point outside"):
        scope().codes(bits, (4,), (0, 2**bits))
