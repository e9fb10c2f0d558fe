"""Define the integer ops multiply, rotary, depthwise and max, which need no matrix product.

The notation is that of ops.py.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from fqvit.ir.fixed import Array, requantize
from fqvit.ir.kit import Kit
from fqvit.ir.ops import Get, Op, Zero, check_requantizer, clamp, zero_point
from fqvit.ir.value import Int, Proof, Scope, Value, magnitude


class Multiply(Op, frozen=True, tag="multiply"):
    """y = clamp(requantize((a - a_zero) * (b - b_zero), mult, shift) + y_zero, 0, 2^bits - 1)

    a: u8 or u16 [..., C]   b: u8 or u16, the shape of a or its last axes: b [C] is a gate per channel   y: u8 or u16 [..., C]
    |product| < 2^31 is proved from the ranges of a and b.
    """

    a: str
    b: str
    mult: Int
    shift: Int
    a_zero: Int = 0
    b_zero: Int = 0
    y_zero: Int = 0
    bits: Int = 8

    def inputs(self) -> tuple[str, ...]:
        return (self.a, self.b)

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        a, b = scope.buffer(self.a), scope.buffer(self.b)
        scope.check(
            a.shape[max(len(a.shape) - len(b.shape), 0) :] == b.shape,
            f"{self.b!r} has shape {list(b.shape)}, expected {list(a.shape)} or its last axes",
        )
        check_requantizer(scope, self.mult, self.shift)
        zeros = scope.zero(self.a_zero, a.channels), scope.zero(self.b_zero, b.channels)
        largest = magnitude(a.lo, a.hi, *zeros[0]) * magnitude(b.lo, b.hi, *zeros[1])
        return scope.codes(self.bits, a.shape, self.y_zero), [self.proof("product", largest, 31)]

    def run(self, kit: Kit, get: Get) -> Array:
        a, b = kit.wide(get(self.a)) - self.a_zero, kit.wide(get(self.b)) - self.b_zero
        b = b.reshape(b.shape[0], *(1,) * (len(a.shape) - len(b.shape)), *b.shape[1:])
        return clamp(kit, requantize(a * b, self.mult, self.shift), self.y_zero, self.bits)


class Rotary(Op, frozen=True, tag="rotary"):
    """acc[..., t, c] = (x[..., t, c] - zero) * table[0, t, p] + (x[..., t, c - p + partner[p]] - zero) * table[1, t, p]

    p = c mod P   y = clamp(requantize(acc, mult, shift) + y_zero, 0, 2^bits - 1)

    x: u8 or u16 [..., T, C]   table: i16 [2, T, P], P divides C   partner: i32 or u16 [P], each below P
    y: u8 or u16, the shape of x
    Rotary position embedding: the table holds cosines, and sines with their signs, with 14 fraction bits (fewer if
    an entry exceeds 1). mult / 2^shift includes this unit.
    |acc| < 2^31 is proved from the actual table.
    """

    x: str
    partner: str
    mult: Int
    shift: Int
    zero: Int = 0
    y_zero: Int = 0
    bits: Int = 8
    parts: ClassVar[tuple[str, ...]] = ("table",)

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        x = scope.buffer(self.x, min_rank=2)
        table = scope.constant(self.part("table"), ("i16",), (2, x.shape[-2], None)).astype(np.int64)
        period = table.shape[-1]
        scope.check(x.channels % period == 0, f"table of {period} columns does not divide {x.channels} channels")
        partner = scope.constant(self.partner, ("i32", "u16"), (period,))
        inside = 0 <= int(partner.min()) and int(partner.max()) < period
        scope.check(inside, f"constant {self.partner!r} points outside {period} channels")
        check_requantizer(scope, self.mult, self.shift)
        largest = magnitude(x.lo, x.hi, *scope.zero(self.zero, x.channels)) * int(np.abs(table).sum(0).max())
        return scope.codes(self.bits, x.shape, self.y_zero), [self.proof("acc", largest, 31)]

    def run(self, kit: Kit, get: Get) -> Array:
        x, table = kit.wide(get(self.x)) - self.zero, kit.wide(get(self.part("table")))
        parts = x.reshape(*x.shape[:-1], x.shape[-1] // table.shape[-1], table.shape[-1])
        cosine, sine = table[0][:, None], table[1][:, None]  # [T, 1, P]
        acc = parts * cosine + parts[..., kit.wide(get(self.partner))] * sine
        return clamp(kit, requantize(acc.reshape(x.shape), self.mult, self.shift), self.y_zero, self.bits)


class Depthwise(Op, frozen=True, tag="depthwise"):
    """acc[i..., c] = (sum_k rows[index[i..., k], c] * w[k, c]) + bias[c], where rows is x with its leading axes flattened

    y = clamp(requantize(acc, mult[c], shift[c]) + y_zero[c], 0, 2^bits - 1)

    x: u8 or u16 [..., C]   index: i32 [..., K], each -1 or a row number   w: i8 [K, C]   bias: i32 [C]
    mult: i32 or u16 [C]   shift: u8 [C]   y: u8 or u16 [*index.shape[:-1], C]
    Index -1 gives the row `fill`, the zero point of x, so that padding has the value 0.
    The zero point of x is folded into the bias as in Linear. |acc| < 2^31 is proved from the actual weights of each channel.
    Strides, dilations and padding are in the index; K = 1 is an affine map per channel.
    """

    x: str
    index: str
    fill: Zero = 0
    y_zero: Zero = 0
    bits: Int = 8
    parts: ClassVar[tuple[str, ...]] = ("w", "bias", "mult", "shift")

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        x = scope.buffer(self.x, min_rank=2)
        channels, rows = x.channels, math.prod(x.shape[:-1])
        w = scope.constant(self.part("w"), ("i8",), (None, channels))
        if self.index not in scope.constants:
            scope.fail(f"constant {self.index!r} is missing")
        axes = max(scope.constants[self.index].ndim, 1)
        index = scope.constant(self.index, ("i32",), (*(None,) * (axes - 1), w.shape[0]))
        scope.check(int(index.min()) >= -1 and int(index.max()) < rows, f"constant {self.index!r} points outside {rows} rows")
        lowest, highest = scope.zero(self.fill, channels)
        scope.check(x.lo <= lowest and highest <= x.hi, f"fill is outside {x.lo}..{x.hi}")
        bias = scope.constant(self.part("bias"), ("i32",), (channels,)).astype(np.int64)
        mult = scope.constant(self.part("mult"), ("i32", "u16"), (channels,)).astype(np.int64)
        shift = scope.constant(self.part("shift"), ("u8",), (channels,)).astype(np.int64)
        check_requantizer(scope, mult, shift)
        # As in Linear: no int64 copy of w is made, and the bound also holds for partial sums in any order.
        total, size = (np.einsum("kc->c", part, dtype=np.int64) for part in (w, np.abs(w).view(np.uint8)))
        hi = (size + total) // 2 * x.hi + np.maximum(bias, 0)
        lo = (total - size) // 2 * x.hi + np.minimum(bias, 0)
        bound = int(max(hi.max(), -lo.min()))
        return scope.codes(self.bits, (*index.shape[:-1], channels), self.y_zero), [self.proof("acc", bound, 31)]

    def run(self, kit: Kit, get: Get) -> Array:
        x, index, w = get(self.x), kit.wide(get(self.index)), kit.wide(get(self.part("w")))
        rows = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
        fill = zero_point(kit, get, self.fill, x.shape[-1])
        acc = kit.wide(get(self.part("bias")))
        for k in range(w.shape[0]):
            from_row = index[..., k]
            # Index -1 must not wrap around to the last row.
            taken = kit.wide(rows[:, from_row.clip(0, None)])
            acc = acc + kit.where((from_row >= 0)[..., None], taken, fill) * w[k]
        acc = requantize(acc, kit.wide(get(self.part("mult"))), kit.wide(get(self.part("shift"))))
        return clamp(kit, acc, zero_point(kit, get, self.y_zero, acc.shape[-1]), self.bits)


class Max(Op, frozen=True, tag="max"):
    """y[..., c] = max_t x[..., t, c]

    x: u8 or u16 [..., T, C]   y: dtype of x, [..., C]
    Codes do not change, so y has the scale and zero point of x.
    """

    x: str

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        x = scope.buffer(self.x, min_rank=2)
        return Value(x.dtype, (*x.shape[:-2], x.channels), x.lo, x.hi, masked=x.masked), []

    def run(self, kit: Kit, get: Get) -> Array:
        x = get(self.x)
        last = len(x.shape) - 1
        return kit.row_max(kit.permute(x, (*range(last - 1), last, last - 1)))[..., 0]
