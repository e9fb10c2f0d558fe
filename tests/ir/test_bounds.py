"""Tests of the bounds that each op proves: the largest intermediate results, and the number of bits that must hold them.

A bound that is too small lets a program overflow; one that is too large rejects valid programs. In every case here, one channel
determines the bound, or all channels are equal, so that the worst case is known.

See also: test_proofs.py (inputs that reach the bounds).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fqvit.errors import FqvitError
from fqvit.ir.attention import Attend, LogSoftmax, MatMul, ShiftMatMul, Softmax
from fqvit.ir.ops import Add, LayerNorm, Linear, Lookup, Mean, Term
from fqvit.ir.program import Program
from fqvit.ir.value import Proof, Scope, Value
from tests.factories import many
from tests.ir.test_verify import (
    AFFINE,
    HEADS,
    SCORES,
    SOFTMAX,
    TABLE,
    C,
    T,
    norm,
    plus,
    program_of,
    shifted_table,
    with_linear,
    x_term,
)

BYTE = st.integers(0, 255)
ALPHA = st.integers(0, 15)
SHIFT = st.integers(1, 62)


def proofs_of(op: Any, values: dict[str, Value], constants: dict[str, Any] | None = None) -> dict[str, tuple[int, int]]:
    """Return {proof.what: (bound, bits)}."""
    _, proofs = op.infer(Scope(values, constants or {}, op.y))
    assert all(proof.buffer == op.y for proof in proofs)
    return {proof.what: (proof.bound, proof.bits) for proof in proofs}


def farthest(zero: int, lo: int = 0, hi: int = 255) -> int:
    """Return the largest |x - zero|."""
    return max(abs(x - zero) for x in (lo, hi))


def u8(*shape: int, **known: Any) -> Value:
    return Value("u8", shape, 0, 255, **known)


def one(value: int, dtype: Any = np.uint8) -> Any:
    return np.array([value], dtype)


def test_a_proof_holds_below_its_power_of_two_but_not_at_it() -> None:
    assert Proof("y", "acc", 2**31 - 1, 31).holds and not Proof("y", "acc", 2**31, 31).holds


@many
@given(st.integers(-(2**15), 2**15 - 1), ALPHA, st.integers(1, 16))
def test_lookup_is_bounded_by_an_entry_plus_the_rounding_term_and_a_zero_point(entry: int, alpha: int, bits: int) -> None:
    constants = {"y.table": np.array([entry] + [0] * 255, np.int16), "al": one(alpha)}
    op = Lookup(y="y", x="x", alpha="al", y_zero=(0,) * (alpha + 1), bits=bits)
    assert proofs_of(op, {"x": u8(1)}, constants) == {"y before its clamp": (abs(entry) + 2**alpha + 2**bits, 31)}


@many
@given(
    st.lists(st.integers(-128, 127), min_size=1, max_size=9),
    st.integers(-(2**20), 2**20),
    st.integers(0, 2**31 - 1),
    st.integers(31, 62),
)
def test_linear_is_bounded_by_its_positive_and_negative_weights(w: list[int], bias: int, mult: int, shift: int) -> None:
    high = sum(255 * max(x, 0) for x in w) + max(bias, 0)
    low = sum(255 * min(x, 0) for x in w) + min(bias, 0)
    constants = {"y.w": np.array([w], np.int8), "y.bias": one(bias, np.int32)}
    constants |= {"y.mult": one(mult, np.int32), "y.shift": one(shift)}
    for out in ("acc", "codes", "i32"):
        op = Linear(y="y", x="x", out=out)  # type: ignore[arg-type]
        value, _ = op.infer(Scope({"x": u8(len(w))}, constants, "y"))
        expected = {"acc": (max(high, -low), 31)}
        if out == "acc":
            assert (value.lo, value.hi) == (low, high)
        if out == "i32":
            largest = max(((2 * v * mult + 2**shift) // 2 ** (shift + 1)) * sign for v, sign in ((high, 1), (low, -1)))
            expected["y"] = (largest, 31)
            assert (value.lo, value.hi) == (-largest, largest)
        assert proofs_of(op, {"x": u8(len(w))}, constants) == expected


@many
@given(st.integers(1, 3000), BYTE, ALPHA, *[st.integers(-(2**31) + 1, 2**31 - 1)] * 2, SHIFT, st.integers(16, 24))
def test_layernorm_is_bounded_by_a_row_with_one_outlier(
    channels: int, zero: int, alpha: int, g: int, b: int, shift: int, fraction: int
) -> None:
    """In the notation of LayerNorm, |t| < (sqrt(C) + 1) * 2^fraction for every row, since |C * v - M1| <= sqrt(C * D)."""
    zeros = [0] * (channels - 1)
    constants = {"y.affine": np.array([[g, *zeros], [b, *zeros]], np.int32), "al": np.array([alpha, *zeros], np.uint8)}
    op = LayerNorm(y="y", x="x", epsilon=7, shift=shift, b_shift=9, zero=zero, alpha="al", fraction=fraction)
    v = farthest(zero) * 2**alpha
    root = math.isqrt(channels) + 1
    assert proofs_of(op, {"x": u8(channels)}, constants) == {
        "D": (channels**2 * v**2 + 7, 62),
        "t numerator": (root * 2 ** (31 + fraction) + 2**31, 63),
        "t": (root * 2**fraction, 31),
        "y before its shift": (abs(g) * root * 2**fraction + abs(b) * 2**9 + 2 ** (shift - 1), 63),
    }


@many
@given(BYTE, ALPHA, st.integers(0, 2**30 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**30 - 1), st.integers(1, 47), ALPHA)
def test_add_is_bounded_by_both_terms_plus_the_rounding_term(
    zero: int, alpha: int, m: int, largest: int, n: int, shift: int, y_alpha: int
) -> None:
    terms = (Term(x="a", mult=m, zero=zero, alpha="al"), Term(x="b", mult=n))
    op = Add(y="y", terms=terms, shift=shift, y_alpha="ya")
    values = {"a": u8(1), "b": Value("i32", (1,), -largest, largest)}
    worst = farthest(zero) * 2**alpha * m + largest * n + 2 ** (shift + y_alpha - 1)
    assert proofs_of(op, values, {"al": one(alpha), "ya": one(y_alpha)}) == {"sum": (worst, 63)}
    # The largest entry of each constant counts, in whichever channel it is.
    wide = Add(y="y", terms=(Term(x="a", mult="m", zero="z", alpha="al"), terms[1]), shift=shift, y_alpha="ya")
    constants = {name: np.array([0, x, 0], np.uint8) for name, x in (("al", alpha), ("ya", y_alpha))}
    constants |= {"m": np.array([0, m, 0], np.int32), "z": np.full(3, zero, np.uint8)}
    assert proofs_of(wide, {"a": u8(3), "b": Value("i32", (3,), -largest, largest)}, constants) == {"sum": (worst, 63)}


@many
@given(st.integers(1, 400), st.integers(0, 399), BYTE, ALPHA)
def test_mean_is_bounded_by_the_rows_that_it_adds(tokens: int, skip: int, zero: int, alpha: int) -> None:
    op = Mean(y="y", x="x", mult=1, shift=1, skip=skip, zero=zero, alpha="al")
    if skip >= tokens:
        with pytest.raises(FqvitError, match=f"skip is {skip} for shape"):
            proofs_of(op, {"x": u8(tokens, 1)}, {"al": one(alpha)})
        return
    worst = (tokens - skip) * farthest(zero) * 2**alpha
    assert proofs_of(op, {"x": u8(tokens, 1)}, {"al": one(alpha)}) == {"acc": (worst, 31)}


@many
@given(st.integers(1, 99), BYTE, BYTE, st.booleans(), st.integers(-(2**31) + 1, 2**31 - 1))
def test_matmul_is_bounded_by_its_operands_and_its_bias(inner: int, za: int, zb: int, rows: bool, bias: int) -> None:
    values = {"a": u8(2, 3, inner), "b": u8(2, inner, 5) if rows else u8(2, 5, inner)}
    constants = {"y.bias": np.array([[0, 0], [0, bias], [0, 0], [0, 0]], np.int32), "i": np.full((3, 5), 3, np.uint16)}
    worst = inner * farthest(za) * farthest(zb)
    for index, more in ((None, 0), ("i", abs(bias))):
        op = MatMul(y="y", a="a", b="b", mult=1, shift=1, a_zero=za, b_zero=zb, b_rows=rows, index=index)
        assert proofs_of(op, values, constants) == {"acc": (worst + more, 31)}
        assert op.infer(Scope(values, constants, "y"))[0].shape == (2, 3, 5)


@many
@given(
    st.integers(1, 3000), st.lists(st.integers(0, 2**30), min_size=2, max_size=5), st.integers(1, 2**58 - 1), st.integers(1, 52)
)
def test_softmaxes_are_bounded_by_a_row_of_largest_exponentials(tokens: int, table: list[int], mult: int, shift: int) -> None:
    table = [max(table[0], 1), *table[1:]]
    values, constants = {"x": u8(1, 2, tokens)}, {"y.table": np.array(table, np.int32)}
    total = {"sum of exponentials": (tokens * max(table), 31)}
    for bits in (2, 3, 4):
        op = LogSoftmax(y="y", x="x", bits=bits)
        assert proofs_of(op, values, constants) == total
        value, _ = op.infer(Scope(values, constants, "y"))
        last = 2**bits - 1
        assert (value.lo, value.hi, value.masked, value.row_sum) == (0, last, False, 3 * 2**last // 2 + tokens)
    uniform = Softmax(y="y", x="x", mult=mult, shift=shift)
    # An exponential e is multiplied by r = round(mult / sum), so e * r <= mult + e. The bound adds another e as a margin, and
    # the rounding term of the shift.
    last_product = {"y before its shift": (mult + 2 * max(table) + 2 ** (shift - 1), 63)}
    assert proofs_of(uniform, values, constants) == total | last_product


@many
@given(st.integers(1, 3000), st.integers(2, 4), BYTE, st.none() | st.integers(1, 2**20), st.booleans())
def test_shift_matmul_is_bounded_by_the_row_sum_of_its_codes(
    tokens: int, bits: int, zero: int, row_sum: int | None, zero_code: bool
) -> None:
    last = 2**bits - 1
    values = {"a": Value("u8", (1, 2, tokens), 0, last, row_sum), "v": u8(1, tokens, 3)}
    op = ShiftMatMul(y="y", a="a", v="v", mult=1, shift=1, v_zero=zero, a_bits=bits, zero_code=zero_code)
    worst = farthest(zero) * (tokens * 2**last if row_sum is None else row_sum)
    assert proofs_of(op, values) == {"acc": (worst, 31)}


@many
@given(st.integers(1, 3000), st.integers(1, 2**15), BYTE, st.integers(0, 2**29 - 1), SHIFT)
def test_attend_is_bounded_by_a_row_of_largest_levels(tokens: int, largest: int, zero: int, mult: int, shift: int) -> None:
    values = {"a": Value("u8", (1, 2, tokens), 0, 1, row_code=1), "v": u8(1, tokens, 3)}
    op = Attend(y="y", a="a", v="v", mult=mult, shift=shift, levels=(0, largest), v_zero=zero)
    side, weights = farthest(zero), tokens * largest
    numerator = mult * largest + weights
    assert proofs_of(op, values) == {
        "acc": (side * weights, 31),
        "M numerator": (numerator, 63),
        "y before its shift": (side * numerator + 2 ** (shift - 1), 63),
    }


ACCEPTED: dict[str, Callable[[], Program]] = {
    "shifts 1 and 62, mult 0 and 2^31 - 1": lambda: with_linear(
        shift=np.array([1, 62, 1, 62, 9], np.uint8), mult=np.array([0, 0, 2**31 - 1, 2**31 - 1, 1], np.int32)
    ),
    "a layernorm with shift 1": lambda: program_of([norm(shift=1)], {"y.affine": AFFINE}),
    "a layernorm with shift 62": lambda: program_of([norm(shift=62)], {"y.affine": AFFINE}),
    "a layernorm with b_shift 0": lambda: program_of([norm(b_shift=0)], {"y.affine": AFFINE}),
    "a layernorm with b_shift 32": lambda: program_of([norm(b_shift=32)], {"y.affine": AFFINE}),
    "a layernorm with alpha 15": lambda: program_of([norm(alpha="al")], {"y.affine": AFFINE, "al": np.full(C, 15, np.uint8)}),
    "a sum with shift 1": lambda: program_of([plus(x_term(), x_term(), shift=1)], {}),
    "a sum whose shift plus y_alpha is 62": lambda: program_of(
        [plus(x_term(), x_term(), shift=59, y_alpha="al")], {"al": np.full(C, 3, np.uint8)}
    ),
    "a sum with mult 0 and 2^30 - 1": lambda: program_of([plus(x_term(mult=0), x_term(mult=2**30 - 1))], {}),
    "a mean of the last row": lambda: program_of([Mean(y="y", x="x", mult=0, shift=62, skip=T - 1)], {}, "x"),
    "a shifted table with 1 bit": lambda: shifted_table(bits=1, y_zero=(0, 1, 0)),
    "a shifted table with 16 bits": lambda: shifted_table(bits=16, y_zero=(0, 2**16 - 1, 0)),
    "softmaxes with the smallest and largest mult and shift": lambda: program_of(
        [
            HEADS,
            SCORES,
            Softmax(y="a", x="s", mult=1, shift=52),
            Softmax(y="b", x="s", mult=2**58 - 1, shift=1, bits=16),
        ],
        {"a.table": TABLE, "b.table": TABLE},
        "x",
    ),
    "regions of one token each": lambda: program_of(
        [HEADS, SCORES, SOFTMAX], {"a.table": TABLE, "region": np.array([[0, 255], [1, 0]], np.uint8)}, "x"
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_verify_accepts_the_limits_of_every_range(case: str) -> None:
    ACCEPTED[case]().verify()
