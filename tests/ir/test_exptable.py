"""exp as integers: the table is the rounded exponential, the polynomial the paper's, and the table is the better one."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fqvit.ir.exptable import ONE_BITS, exp_table, one_bits, polynomial_table
from tests.factories import many

SCALES = st.floats(1e-3, 2.0)


def read(table: np.ndarray, codes: int = 256) -> np.ndarray:
    """All entries: distances beyond the table read its last one."""
    return table[np.minimum(np.arange(codes), len(table) - 1)].astype(np.int64)


def log2_error(table: np.ndarray, scale: float) -> float:
    """The largest |log2 table - log2 exp| where the exponential is at least 2^-15 and so decides a 4-bit code."""
    exact = -scale * np.arange(256) / math.log(2)
    kept = exact >= -15
    return float(np.abs(np.log2(np.maximum(read(table)[kept], 1e-9)) - ONE_BITS - exact[kept]).max())


@many
@given(SCALES, st.sampled_from([16, 64, 256]), st.integers(1, 1024))
def test_the_table_is_the_rounded_exponential(scale: float, codes: int, tokens: int) -> None:
    table = exp_table(scale, codes, tokens)
    one = 2 ** one_bits(tokens)
    assert table.dtype == np.int32 and table[0] == one
    for d, entry in enumerate(read(table, codes)):
        assert abs(entry - one * math.exp(-scale * d)) <= 0.5 + 1e-6


@many
@given(SCALES)
def test_the_table_is_at_least_as_accurate_as_the_polynomial(scale: float) -> None:
    by_table, by_polynomial = (log2_error(make(scale, 256, 197), scale) for make in (exp_table, polynomial_table))
    assert by_table <= by_polynomial + 1e-9
    assert by_table <= 0.025  # half a unit of an entry of 32: 2^20 exp at 2^-15


@many
@given(SCALES)
def test_the_polynomial_is_within_the_papers_bound(scale: float) -> None:
    """L(p) is within 1.9e-3 of exp on (-ln 2, 0] (I-BERT); flooring an entry of 32 may cost 1/32 more."""
    assert log2_error(polynomial_table(scale, 256, 197), scale) <= math.log2(1 + 1.9e-3 / 0.5) + math.log2(1 + 1 / 31)


@many
@given(SCALES, st.integers(1, 1024))
def test_the_polynomial_is_the_papers_in_exact_integers(scale: float, tokens: int) -> None:
    lift = max(0, math.ceil(math.log2(2**15 * scale / math.log(2))))
    step = scale / 2**lift
    ln2, b = math.floor(math.log(2) / step), math.floor(1.353 / step)
    c = math.floor(0.344 / (0.3585 * step * step))
    one = 2 ** one_bits(tokens)
    for d, entry in enumerate(read(polynomial_table(scale, 256, tokens))):
        z, left = divmod(d << lift, ln2)
        exact = Fraction(((b - left) ** 2 + c) * one, (b * b + c) * 2**z)
        assert entry == math.floor(exact), (d, entry)


@pytest.mark.parametrize("tokens", [1, 2, 49, 197, 577, 1024, 2**14, 2**20])
def test_a_row_of_ones_fits_31_bits(tokens: int) -> None:
    assert tokens * 2 ** one_bits(tokens) < 2**31
    assert tokens > 1024 or one_bits(tokens) == ONE_BITS


@pytest.mark.parametrize("make", [exp_table, polynomial_table])
@pytest.mark.parametrize("scale", [1e-12, 1e-6, 5.0, 1e3, 1e9])
def test_extreme_scales_give_a_table_too(make: object, scale: float) -> None:
    table = make(scale, 256, 197)  # type: ignore[operator]
    assert table[0] == 2**20 and (table >= 0).all()
    assert read(table)[-1] >= 2**20 - 1 if scale < 1e-9 else read(table)[-1] <= 2**20


def test_tables_end_at_the_first_of_their_last_entries() -> None:
    assert exp_table(5.0, 256, 197).tolist() == [2**20, 7065, 48, 0]
    assert len(exp_table(1e-12, 256, 197)) == 1
