"""Tables of exp: the rounded exponential, the polynomials of the paper and of its code, and levels of relative attention."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fqvit.ir.attention import Attend
from fqvit.ir.value import Scope, Value
from fqvit.quant.exptable import ONE_BITS, coarse_table, exp_table, level_table, one_bits, polynomial_table
from fqvit.quant.qparams import level_bounds, relative, relative_encode
from tests.factories import assert_same, few, many

SCALES = st.floats(1e-3, 2.0)


def read(table: np.ndarray, codes: int = 256) -> np.ndarray:
    """The entries for all distances: distances beyond the table read its last entry."""
    return table[np.minimum(np.arange(codes), len(table) - 1)].astype(np.int64)


def log2_error(table: np.ndarray, scale: float) -> float:
    """Return the largest |log2(table) - log2(exp)| over exponentials of at least 2^-15, which decide a 4-bit code."""
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
    assert by_table <= 0.025  # half a unit in an entry of 32, which is 2^20 * 2^-15


@many
@given(SCALES)
def test_the_polynomial_is_within_the_papers_bound(scale: float) -> None:
    """I-BERT's polynomial is within 1.9e-3 of exp on (-ln 2, 0]; rounding down an entry of 32 may add an error of 1/32."""
    assert log2_error(polynomial_table(scale, 256, 197), scale) <= math.log2(1 + 1.9e-3 / 0.5) + math.log2(1 + 1 / 31)


@many
@given(SCALES | st.floats(1e-7, 1e-3), st.integers(1, 1024))
@example(0.0031674016065418096, 197)  # fails with c + 1 instead of c
@example(1.010693265542995e-05, 197)  # fails with a shift that is one bit too large
def test_the_polynomial_matches_the_paper_in_exact_integers(scale: float, tokens: int) -> None:
    shift = max(0, math.ceil(math.log2(2**15 * scale / math.log(2))))
    fine = scale / 2**shift
    ln2, b = math.floor(math.log(2) / fine), math.floor(1.353 / fine)
    c = math.floor(0.344 / (0.3585 * fine * fine))
    one = 2 ** one_bits(tokens)
    for d, entry in enumerate(read(polynomial_table(scale, 256, tokens))):
        z, rest = divmod(d << shift, ln2)
        exact = Fraction(((b - rest) ** 2 + c) * one, (b * b + c) * 2**z)
        assert entry == math.floor(exact), (d, entry)


@many
@given(st.floats(1e-3, 1.6), st.integers(1, 1024))
def test_the_coarse_polynomial_matches_the_papers_code(scale: float, tokens: int) -> None:
    """Compute as the paper's code does, one distance at a time: negative codes, floor(-0.6931 / scale), clipping at n = 30."""
    ln2, b = math.floor(-0.6931 / scale), math.floor(0.96963238 / 0.35815147 / scale)
    c = math.floor(1 / 0.35815147 / scale**2)
    one = 2 ** one_bits(tokens)
    for d, entry in enumerate(read(coarse_table(scale, 256, tokens))):
        x = max(-d, 30 * ln2)
        z = math.floor(Fraction(x, ln2))
        r = x - ln2 * z
        theirs = Fraction((r * (r + b) + c) * 2 ** (30 - z), c * 2**30)
        assert theirs > 0 and 0 <= theirs * one - entry < 1 + Fraction(1, 2**z), (d, entry)


def test_the_error_of_the_coarse_polynomial_grows_with_the_score_scale() -> None:
    found = {scale: round(log2_error(coarse_table(scale, 256, 197), scale), 1) for scale in (0.01, 0.1, 0.2, 0.5)}
    assert found[0.01] <= 0.2 and found[0.1] <= 0.2 and 1.9 <= found[0.2] <= 2.2 and found[0.5] >= 4
    assert all(log2_error(polynomial_table(scale, 256, 197), scale) < 0.1 for scale in found)


@pytest.mark.parametrize("tokens", [1, 2, 49, 197, 577, 1024, 1025, 2048, 2**14, 2**14 + 1, 2**20])
def test_the_sum_of_a_row_is_at_most_2_to_the_30(tokens: int) -> None:
    """The bound leaves room to add half of the divisor. One more bit in exp(0) would exceed the bound."""
    assert tokens * 2 ** one_bits(tokens) <= 2**30
    assert one_bits(tokens) == ONE_BITS or tokens * 2 ** (one_bits(tokens) + 1) > 2**30


@pytest.mark.parametrize("make", [exp_table, polynomial_table, coarse_table])
@pytest.mark.parametrize("scale", [1e-12, 1e-6, 5.0, 1e3, 1e9])
def test_extreme_scales_give_valid_tables(make: object, scale: float) -> None:
    table = make(scale, 256, 197)  # type: ignore[operator]
    assert table[0] == 2**20 and (table >= 0).all()
    assert read(table)[-1] >= 2**20 - 1 if scale < 1e-9 else read(table)[-1] <= 2**20


def test_repeated_last_entries_are_removed() -> None:
    assert exp_table(5.0, 256, 197).tolist() == [2**20, 7065, 48, 0]
    assert len(exp_table(1e-12, 256, 197)) == 1


TOKENS = [49, 197, 577, 2305]
LEVELS = {(bits, tokens): relative(bits, tokens).levels for bits in range(2, 9) for tokens in TOKENS}
BY_LEVELS = pytest.mark.parametrize("bits, tokens", LEVELS)


@BY_LEVELS
def test_levels_include_0_and_row_sums_are_proved_not_to_overflow(bits: int, tokens: int) -> None:
    levels = LEVELS[bits, tokens]
    assert len(levels) == 2**bits and min(levels) == 0 and max(levels) <= 2**15
    if bits <= 4:
        assert all(a > b for a, b in itertools.pairwise(levels)) and levels[-1] == 0
        # Each level is a power of two or a sum of two powers of two.
        assert all(level.bit_count() <= 2 for level in levels)
    else:
        assert levels == tuple(range(2**bits))
    op = Attend(y="y", a="a", v="v", mult=2**29 - 1, shift=62, levels=levels, v_zero=255)
    known = {"row_code": levels.index(max(levels)), "mask_code": levels.index(0)}
    values = {
        "a": Value("u8", (1, tokens, tokens), 0, 2**bits - 1, **known),
        "v": Value("u8", (1, tokens, 64), 0, 255),
    }
    assert all(proof.holds for proof in op.infer(Scope(values, {}, "y"))[1])


@BY_LEVELS
@few
@given(scale=st.floats(1e-5, 5.0), wide=st.booleans(), masked=st.booleans())
def test_level_tables_match_the_codes_of_exact_attention(
    bits: int, tokens: int, scale: float, wide: bool, masked: bool
) -> None:
    """For a row with every distance, the codes equal those of the simulation, except at ties between two levels."""
    levels = LEVELS[bits, tokens]
    codes = 2**12 if wide else 256
    table = level_table(scale, codes, levels, masked)
    assert table.dtype == np.uint8 and (not masked or levels[int(table[-1])] == 0)
    distance = torch.arange(codes, dtype=torch.float64)
    expected = relative_encode(torch.softmax(-scale * distance, -1), levels).numpy()
    share = np.exp(-scale * distance.numpy())
    tie = np.abs(share[:, None] - level_bounds(levels)[1]).min(1) < 1e-12
    assert_same(read(table, codes)[~tie], expected[~tie], f"scale {scale}, distances")
    # The chosen level is the nearest one.
    errors = np.abs(share[:, None] - np.array(levels) / max(levels))
    chosen = errors[np.arange(codes), read(table, codes)]
    assert (chosen <= errors.min(1) + 1e-12).all()


@pytest.mark.parametrize("bits", range(2, 9))
def test_masked_level_tables_end_with_level_0_even_if_no_distance_reaches_it(bits: int) -> None:
    levels = relative(bits, 49).levels
    flat = level_table(1e-9, 256, levels, False)
    assert flat.tolist() == [levels.index(max(levels))]
    masked = level_table(1e-9, 256, levels, True)
    # The last entry is level 0, which no distance reads: the 256 entries before it are for 256 distances.
    assert len(masked) == 257 and levels[int(masked[-1])] == 0 and set(masked[:-1].tolist()) == set(flat.tolist())
    steep = level_table(30.0, 256, levels, True)
    assert steep.tolist() == [levels.index(max(levels)), levels.index(0)]


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("tokens", [1, 2, 50, 4112, 4113, 16383])
def test_row_sums_fit_31_bits_for_rows_of_any_length(bits: int, tokens: int) -> None:
    levels = relative(bits, tokens).levels
    assert len(levels) == 2**bits and 255 * tokens * max(levels) < 2**31
    assert list(levels) == sorted(levels, reverse=bits <= 4)
    assert bits > 4 or tokens > 4112 or len(set(levels)) == 2**bits  # for longer rows, the smallest levels are all 0
