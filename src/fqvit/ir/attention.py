"""Define the integer ops of attention: scores, three softmaxes and attention times V.

The notation is that of ops.py. Arrays are [..., H, M, T] or [..., H, T, D]; in Swin the first axis is W windows. M is the
number of queries: T in self-attention, fewer in attention pooling.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from fqvit.ir.fixed import Array, ilog2_round, requantize, round_divide, round_shift
from fqvit.ir.kit import Kit
from fqvit.ir.ops import Get, Op, check_requantizer, clamp
from fqvit.ir.value import Int, Proof, Scope, Value, magnitude


class MatMul(Op, frozen=True, tag="matmul"):
    """acc[..., m, n] = (sum_k (a[..., m, k] - a_zero) * (b[..., n, k] - b_zero)) + bias[index[m, n], h]

    y = clamp(requantize(acc, mult, shift) + y_zero, 0, 2^bits - 1)

    a: u8 or u16 [..., M, K]   b: u8 or u16 [..., N, K], or [..., K, N] if b_rows   y: u8 or u16 [..., M, N]
    mult: a number, or the name of a constant i32 [H] with one multiplier per head (the axis before m)
    b_rows: for attention times V with uniform attention codes, where b is V
    index: u16 or i32 [M, N], optional. With it, bias: i32 [R, H], Swin's relative position bias of head h in units of the
    accumulator of that head
    """

    a: str
    b: str
    mult: Int | str
    shift: Int
    a_zero: Int = 0
    b_zero: Int = 0
    b_rows: bool = False
    index: str | None = None
    y_zero: Int = 0
    bits: Int = 8
    parts: ClassVar[tuple[str, ...]] = ("bias",)

    def inputs(self) -> tuple[str, ...]:
        return (self.a, self.b)

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        a, b = scope.buffer(self.a, min_rank=2), scope.buffer(self.b, min_rank=2)
        reduce_b, n = b.shape[-2:] if self.b_rows else (b.shape[-1], b.shape[-2])
        scope.check(
            a.shape[:-2] == b.shape[:-2] and a.shape[-1] == reduce_b, f"shapes {list(a.shape)} and {list(b.shape)} do not match"
        )
        shape = (*a.shape[:-1], n)
        mult: Any = self.mult
        if isinstance(self.mult, str):
            scope.check(len(shape) >= 3, "multipliers per head need an axis of heads")
            mult = scope.constant(self.mult, ("i32",), (shape[-3],))
        check_requantizer(scope, mult, self.shift)
        a_side, b_side = scope.zero(self.a_zero, a.channels), scope.zero(self.b_zero, b.channels)
        sides = magnitude(a.lo, a.hi, *a_side) * magnitude(b.lo, b.hi, *b_side)
        bound = reduce_b * sides
        if self.index is not None:
            scope.check(len(shape) >= 3, "a bias needs an axis of heads")
            bias = scope.constant(self.part("bias"), ("i32",), (None, shape[-3]))
            index = scope.constant(self.index, ("u16", "i32"), shape[-2:])
            inside = 0 <= int(index.min()) and int(index.max()) < bias.shape[0]
            scope.check(inside, f"constant {self.index!r} points outside {bias.shape[0]} rows")
            bound += int(np.abs(bias.astype(np.int64)).max())
        return scope.codes(self.bits, shape, self.y_zero), [self.proof("acc", bound, 31)]

    def run(self, kit: Kit, get: Get) -> Array:
        a, b = kit.wide(get(self.a)) - self.a_zero, kit.wide(get(self.b)) - self.b_zero
        if not self.b_rows:
            axes = list(range(len(b.shape)))
            b = kit.permute(b, [*axes[:-2], axes[-1], axes[-2]])
        acc = kit.matmul(a, b)
        if self.index is not None:
            acc = acc + kit.permute(kit.wide(get(self.part("bias")))[kit.wide(get(self.index))], (2, 0, 1))
        mult = self.mult if isinstance(self.mult, int) else kit.wide(get(self.mult))[:, None, None]
        return clamp(kit, requantize(acc, mult, self.shift), self.y_zero, self.bits)


def _by_distance(kit: Kit, get: Get, x: str, table: str, region: str | None, masked: int | None = None) -> Array:
    """Return table[row maximum - x]; distances beyond the table read its last entry.

    Pairs of tokens in different regions do not count for the maximum and get the value `masked` (None: the last entry).
    """
    codes, values = kit.wide(get(x)), kit.wide(get(table))
    last = values.shape[0] - 1
    if region is None:
        return values[(kit.row_max(codes) - codes).clip(0, last)]
    regions = get(region)
    same = (regions[:, :, None] == regions[:, None, :])[:, None]
    top = kit.row_max(kit.where(same, codes, 0))
    return kit.where(same, values[(top - codes).clip(0, last)], values[last] if masked is None else masked)


def _check_rows(scope: Scope, x: Value, region: str | None) -> None:
    """Check the scores that a softmax reads and the regions of their windows."""
    scope.check(x.lo == 0, "scores must be unsigned codes")
    if region is not None:
        scope.check(len(x.shape) == 4, "regions need scores of shape [W, H, T, T]")
        scope.constant(region, ("u8",), (x.shape[0], x.shape[-1]))
        scope.check(x.shape[-1] == x.shape[-2], "regions need square scores")


def _check_sum(scope: Scope, op: Op, x: Value, table_name: str) -> list[Proof]:
    """Check the table of exponentials; prove that the sum over a row fits 31 bits."""
    table = scope.constant(table_name, ("i32",), (None,))
    scope.check(
        int(table.min()) >= 0 and int(table[0]) > 0, "the table of exponentials must be positive at 0 and nowhere negative"
    )
    return [op.proof("sum of exponentials", x.shape[-1] * int(table.max()), 31)]


def _check_product(scope: Scope, a: Value, v: Value) -> None:
    """Check the shapes of attention [..., M, T] and V [..., T, D]."""
    scope.check(
        a.shape[:-2] == v.shape[:-2] and a.shape[-1] == v.shape[-2], f"shapes {list(a.shape)} and {list(v.shape)} do not match"
    )


class LogSoftmax(Op, frozen=True, tag="log_softmax"):
    """Log-Int-Softmax over the last axis (paper algorithm 2): code a means 2^-a.

    e = table[max(x) - x],   S = sum e,   y = clamp(ilog2_round(round(S / e)), 0, 2^bits - 1);   e = 0 gives the last code

    x: u8 or u16 [..., H, M, T]   table: i32 [n], proportional to exp(-s_x * d) for distance d; d >= n reads the last entry
    y: u8 [..., H, M, T], bits in 2..4
    region: u8 [W, T], optional, if M = T. A token attends only to tokens of its own region; all other pairs get e = 0.
    """

    x: str
    bits: Int = 4
    region: str | None = None
    parts: ClassVar[tuple[str, ...]] = ("table",)

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        x = scope.buffer(self.x, min_rank=3)
        scope.check(2 <= self.bits <= 4, f"bits is {self.bits}, expected 2 to 4")
        _check_rows(scope, x, self.region)
        proofs = _check_sum(scope, self, x, self.part("table"))
        last = 2**self.bits - 1
        # Bounds the sum of 2^(last - a) over a row: 2^-a <= 1.5 * e / S for a code that was not clamped; a clamped code adds 1.
        row_sum = 3 * 2 ** (last - 1) + x.shape[-1]
        return Value("u8", x.shape, 0, last, row_sum, self.region is not None), proofs

    def run(self, kit: Kit, get: Get) -> Array:
        e = _by_distance(kit, get, self.x, self.part("table"), self.region, 0)
        total = e.sum(-1)[..., None]
        last = 2**self.bits - 1
        codes = ilog2_round(round_divide(total, e.clip(1, None))).clip(0, last)
        return kit.narrow(kit.where(e > 0, codes, last), "u8")


class Softmax(Op, frozen=True, tag="softmax"):
    """Softmax over the last axis with uniform codes, for the baselines.

    e = table[max(x) - x],   r = round(mult / sum e), one division per row
    y = clamp((e * r + 2^(shift - 1)) >> shift, 0, 2^bits - 1)

    mult = 2^shift / s_y. x, table and region as in LogSoftmax; y: u8 or u16 [..., H, M, T].
    """

    x: str
    mult: Int
    shift: Int
    bits: Int = 8
    region: str | None = None
    parts: ClassVar[tuple[str, ...]] = ("table",)

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        x = scope.buffer(self.x, min_rank=3)
        _check_rows(scope, x, self.region)
        proofs = _check_sum(scope, self, x, self.part("table"))
        scope.check(1 <= self.shift <= 52 and 0 < self.mult < 2**58, "shift must be in 1..52 and mult in 1..2^58 - 1")
        # r <= mult / e + 1 for every e of the row, so e * r <= mult + e.
        largest = int(scope.constants[self.part("table")].max())
        proofs.append(self.proof("y before its shift", self.mult + 2 * largest + (1 << (self.shift - 1)), 63))
        return scope.codes(self.bits, x.shape), proofs

    def run(self, kit: Kit, get: Get) -> Array:
        e = _by_distance(kit, get, self.x, self.part("table"), self.region, 0)
        r = round_divide(e.sum(-1)[..., None] * 0 + self.mult, e.sum(-1)[..., None])
        return clamp(kit, round_shift(e * r, self.shift), 0, self.bits)


class ShiftMatMul(Op, frozen=True, tag="shift_matmul"):
    """acc[..., m, d] = sum_t (v[..., t, d] - v_zero) * 2^(last - a[..., m, t]),   last = 2^a_bits - 1

    y = clamp(requantize(acc, mult, shift) + y_zero, 0, 2^bits - 1)

    Attention times V for log2 codes: shifts instead of multiplications.
    a: u8 [..., H, M, T], codes of LogSoftmax   v: u8 or u16 [..., H, T, D]   y: u8 or u16 [..., H, M, D]
    zero_code: the last code means 0 instead of 2^-last. Required if `a` was computed with regions.
    """

    a: str
    v: str
    mult: Int
    shift: Int
    v_zero: Int = 0
    a_bits: Int = 4
    zero_code: bool = False
    y_zero: Int = 0
    bits: Int = 8

    def inputs(self) -> tuple[str, ...]:
        return (self.a, self.v)

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        a, v = scope.buffer(self.a, ("u8",), 3), scope.buffer(self.v, min_rank=3)
        _check_product(scope, a, v)
        check_requantizer(scope, self.mult, self.shift)
        scope.check(
            2 <= self.a_bits <= 4 and a.hi == 2**self.a_bits - 1,
            f"{self.a!r} holds codes up to {a.hi}, expected {self.a_bits} bits",
        )
        scope.check(self.zero_code or not a.masked, f"{self.a!r} is masked, so its last code must mean 0 (zero_code)")
        # Codes that come directly from LogSoftmax have a small row sum (docs/explanation/numerics.md); other codes may not.
        row_sum = a.row_sum if a.row_sum is not None else a.shape[-1] << a.hi
        bound = magnitude(v.lo, v.hi, *scope.zero(self.v_zero, v.channels)) * row_sum
        return scope.codes(self.bits, (*a.shape[:-1], v.channels), self.y_zero), [self.proof("acc", bound, 31)]

    def run(self, kit: Kit, get: Get) -> Array:
        a = kit.wide(get(self.a))
        last = 2**self.a_bits - 1
        weights = 1 << last - a
        if self.zero_code:
            weights = kit.where(a < last, weights, 0)
        acc = kit.matmul(weights, kit.wide(get(self.v)) - self.v_zero)
        return clamp(kit, requantize(acc, self.mult, self.shift), self.y_zero, self.bits)


class RowCodes(Op, frozen=True, tag="row_codes"):
    """y = table[max(x) - x] over the last axis: the code of each attention weight relative to the largest of its row.

    Needs neither a sum nor a division: Attend, which reads the codes, normalizes the rows.
    x: u8 or u16 [..., H, M, T]   table: u8 [n]; a distance of n or more reads the last entry   y: u8 [..., H, M, T]
    region: u8 [W, T], optional, as in LogSoftmax; pairs of tokens in different regions get the last entry.
    """

    x: str
    region: str | None = None
    parts: ClassVar[tuple[str, ...]] = ("table",)

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        x = scope.buffer(self.x, min_rank=3)
        _check_rows(scope, x, self.region)
        table = scope.constant(self.part("table"), ("u8",), (None,))
        mask_code = None if self.region is None else int(table[-1])
        return Value("u8", x.shape, 0, int(table.max()), row_code=int(table[0]), mask_code=mask_code), []

    def run(self, kit: Kit, get: Get) -> Array:
        return kit.narrow(_by_distance(kit, get, self.x, self.part("table"), self.region), "u8")


class Attend(Op, frozen=True, tag="attend"):
    """Attention times V as a weighted mean: each row is divided by the sum of its own weights.

    w = levels[a],   S[..., m] = sum_t w[..., m, t],   acc[..., m, d] = sum_t w[..., m, t] * (v[..., t, d] - v_zero)
    M[..., m] = round(mult * L / S), L = max(levels): one division per row
    y = clamp(((acc * M + 2^(shift - 1)) >> shift) + y_zero, 0, 2^bits - 1)

    a: u8 [..., H, M, T], codes of RowCodes   v: u8 [..., H, T, D]   y: u8 or u16 [..., H, M, D]
    levels: one weight per code, in 0..2^15, so that its negative fits int16. Empty: the code itself is the weight, L = 255.
    RowCodes puts the largest weight into every row, so S >= L and M <= mult < 2^29.
    """

    a: str
    v: str
    mult: Int
    shift: Int
    levels: tuple[Int, ...] = ()
    v_zero: Int = 0
    y_zero: Int = 0
    bits: Int = 8

    def inputs(self) -> tuple[str, ...]:
        return (self.a, self.v)

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        a, v = scope.buffer(self.a, ("u8",), 3), scope.buffer(self.v, ("u8",), 3)
        _check_product(scope, a, v)
        check_requantizer(scope, self.mult, self.shift, 2**29)
        levels = self.levels or tuple(range(256))
        scope.check(a.hi < len(levels) <= 256, f"{len(levels)} levels for codes up to {a.hi}")
        largest = max(levels)
        scope.check(min(levels) >= 0 and 0 < largest <= 2**15, "levels must be in 0..2^15, and one of them above 0")
        scope.check(
            a.row_code is not None and levels[a.row_code] == largest, f"a row of {self.a!r} may lack the largest weight"
        )
        scope.check(a.mask_code is None or levels[a.mask_code] == 0, f"{self.a!r} is masked by a code whose weight is not 0")
        side = magnitude(v.lo, v.hi, *scope.zero(self.v_zero, v.channels))
        weights = a.shape[-1] * largest
        # |acc| <= side * S and M <= mult * L / S + 1/2.
        product = side * (self.mult * largest + weights)
        proofs = [
            self.proof("acc", side * weights, 31),
            self.proof("M numerator", self.mult * largest + weights, 63),
            self.proof("y before its shift", product + (1 << (self.shift - 1)), 63),
        ]
        return scope.codes(self.bits, (*a.shape[:-1], v.channels), self.y_zero), proofs

    def run(self, kit: Kit, get: Get) -> Array:
        a = kit.wide(get(self.a))
        weights = kit.asarray(np.array(self.levels, np.int64))[a] if self.levels else a
        total = weights.sum(-1)[..., None]
        largest = max(self.levels) if self.levels else 2**8 - 1
        acc = kit.matmul(weights, kit.wide(get(self.v)) - self.v_zero)
        return clamp(
            kit, round_shift(acc * round_divide(total * 0 + self.mult * largest, total), self.shift), self.y_zero, self.bits
        )
