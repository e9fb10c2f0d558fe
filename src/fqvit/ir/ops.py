"""The integer ops: each one ONCE, with its fields, its formula, what it proves, and its reference meaning.

An op reads named buffers, writes the buffer `y`, and owns the constants `<y>.<part>` listed in `parts`, as far as its
fields ask for them; constants that several ops share are named in fields. Shapes leave out the leading batch axis.
Letters: T tokens, C channels, H heads, D head width, K reduction, O outputs. No field is a float and no kernel divides by
a float scale.

`infer` runs once, before anything else, and refuses an op that could overflow; `run` therefore checks nothing.
Neighbours: attention.py (softmax, attention times V), fixed.py (primitives), nibbles.py (packed weights), lower.py
(makes ops from a float model).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from fqvit.ir.fixed import MAX_SHIFT, Array, ilog2, isqrt, requantize, round_divide, round_shift
from fqvit.ir.kit import Kit
from fqvit.ir.nibbles import packed_weights
from fqvit.ir.value import Constant, Proof, Scope, Value, magnitude

Get = Callable[[str], Array]
# One zero point for all channels, one for each of several equal groups of channels, or the name of a u8 or u16 [C] constant.
Zero = int | tuple[int, ...] | str
CODES = ("u8", "u16")
Q24 = 24  # fraction bits of LayerNorm's quotient


class Op(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", forbid_unknown_fields=True, omit_defaults=True):
    """Base of all ops. `y` names the output buffer."""

    y: str
    parts: ClassVar[tuple[str, ...]] = ()

    def inputs(self) -> tuple[str, ...]:
        """Buffers (or constants used as such) that the op reads."""
        return (self.x,)  # type: ignore[attr-defined]

    def part(self, name: str) -> str:
        return f"{self.y}.{name}"

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        raise NotImplementedError

    def run(self, kit: Kit, get: Get) -> Array:
        raise NotImplementedError

    def proof(self, what: str, bound: int, bits: int) -> Proof:
        return Proof(self.y, what, bound, bits)


def lifted(kit: Kit, get: Get, x: str, zero: Zero, alpha: str | None) -> Array:
    """(x - zero) * 2^alpha: codes with one scale for all channels again (paper eq. 11)."""
    value = kit.wide(get(x))
    value = value - zero_point(kit, get, zero, value.shape[-1])
    return value if alpha is None else value * (1 << kit.wide(get(alpha)))


def zero_point(kit: Kit, get: Get, zero: Zero, channels: int) -> Array | int:
    if isinstance(zero, tuple):
        return kit.asarray(np.repeat(np.array(zero, np.int64), channels // len(zero)))
    return kit.wide(get(zero)) if isinstance(zero, str) else zero


def clamp(kit: Kit, value: Array, zero: Array | int, bits: int) -> Array:
    return kit.narrow((value + zero).clip(0, 2**bits - 1), "u8" if bits <= 8 else "u16")


def check_requantizer(scope: Scope, mult: Any, shift: Any, largest: int = 2**31) -> None:
    scope.check(bool(np.all(np.asarray(mult) >= 0)) and int(np.max(mult)) < largest, f"mult must be in 0..{largest - 1}")
    scope.check(1 <= int(np.min(shift)) and int(np.max(shift)) <= MAX_SHIFT, f"shift must be in 1..{MAX_SHIFT}")


class Lookup(Op, frozen=True, tag="lookup"):
    """y = table[x], or with alpha: y = clamp((table[x] + 2^alpha[c]) >> (alpha[c] + 1) + y_zero[alpha[c]], 0, 2^bits - 1)

    x: u8 or u16 [..., C]   table: u8 or u16 [2^bits of x]; with alpha i16 or i32: twice the value in steps of alpha 0, floored,
    so that the shift rounds the value itself, once.   alpha: u8 [C]   y_zero: one zero point for each alpha
    """

    x: str
    alpha: str | None = None
    y_zero: tuple[int, ...] = ()
    bits: int = 8
    parts: ClassVar[tuple[str, ...]] = ("table",)

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        x = scope.buffer(self.x)
        if self.alpha is None:
            table = scope.constant(self.part("table"), CODES, (x.hi + 1,))
            dtype = "u8" if table.dtype == np.uint8 else "u16"
            return Value(dtype, x.shape, int(table.min()), int(table.max())), []
        table = scope.constant(self.part("table"), ("i16", "i32"), (x.hi + 1,)).astype(np.int64)
        alpha = scope.alpha(self.alpha, x.channels)
        scope.check(len(self.y_zero) == alpha + 1, f"{len(self.y_zero)} zero points for shifts up to {alpha}")
        scope.check(1 <= self.bits <= 16, f"bits is {self.bits}, expected 1 to 16")
        ends = 0 <= min(self.y_zero) and max(self.y_zero) < 1 << self.bits
        scope.check(ends, f"y_zero is outside 0..{(1 << self.bits) - 1}")
        largest = int(np.abs(table).max()) + (1 << alpha) + (1 << self.bits)
        return scope.codes(self.bits, x.shape), [self.proof("y before its clamp", largest, 31)]

    def run(self, kit: Kit, get: Get) -> Array:
        table, x = get(self.part("table")), kit.wide(get(self.x))
        if self.alpha is None:
            return table[x]
        alpha = kit.wide(get(self.alpha))
        zero = kit.asarray(np.array(self.y_zero, np.int64))[alpha]
        return clamp(kit, round_shift(kit.wide(table[x]), alpha + 1), zero, self.bits)


class Linear(Op, frozen=True, tag="linear"):
    """acc[..., o] = sum_k x[..., k] w[o, k] + bias[o]

    out "codes": y = clamp(requantize(acc, mult[o], shift[o]) + y_zero, 0, 2^bits - 1)
    out "acc":   y = acc (no mult, no shift)          out "i32": y = requantize(acc, mult[o], shift[o])

    x: u8 or u16 [..., K]   w: i8 [O, K]   bias: i32 [O]   mult: i32 or u16 [O]   shift: u8 [O]
    The input's zero point is inside the bias: bias = b / (s_x s_w) - sum_k x_zero w[o, k], exactly.

    group > 0: w is stored in 4 bits, w[o, k] = code[o, k] 2^exponent[o, k // group], exponents 0..4, two a byte:
    w: u8 [O, ceil(K / 2)]   exponent: u8 [O, ceil(G / 2)], G = ceil(K / group). Program.unpacked undoes that before run.
    weights_of: an earlier Linear whose w and exponent are this one's as well: a layer that runs on several maps.
    """

    x: str
    out: Literal["codes", "acc", "i32"] = "codes"
    y_zero: Zero = 0
    bits: int = 8
    group: int = 0
    weights_of: str | None = None
    parts: ClassVar[tuple[str, ...]] = ("w", "exponent", "bias", "mult", "shift")

    def part(self, name: str) -> str:
        return f"{self.weights_of}.{name}" if self.weights_of is not None and name in ("w", "exponent") else super().part(name)

    def weights(self, scope: Scope) -> Constant:
        """w as i8 [O, K], however it is stored."""
        inputs = scope.buffer(self.x).channels
        if self.group == 0:
            return scope.constant(self.part("w"), ("i8",), (None, inputs))
        return packed_weights(scope, self.part("w"), self.part("exponent"), inputs, self.group)

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        x = scope.buffer(self.x)
        w = self.weights(scope)
        outputs = w.shape[0]
        bias = scope.constant(self.part("bias"), ("i32",), (outputs,)).astype(np.int64)
        # einsum because sum() first widens all of w; |-128| is 128 once its byte is read as unsigned.
        total, size = (np.einsum("ok->o", part, dtype=np.int64) for part in (w, np.abs(w).view(np.uint8)))
        ups, downs = (size + total) // 2 * x.hi, (total - size) // 2 * x.hi
        lo, hi = downs + np.minimum(bias, 0), ups + np.maximum(bias, 0)  # holds for partial sums in any order, too
        bound = int(max(hi.max(), -lo.min()))
        proofs = [self.proof("acc", bound, 31)]
        shape = (*x.shape[:-1], outputs)
        if self.out == "acc":
            return Value("i32", shape, int(lo.min()), int(hi.max())), proofs
        mult = scope.constant(self.part("mult"), ("i32", "u16"), (outputs,)).astype(np.int64)
        shift = scope.constant(self.part("shift"), ("u8",), (outputs,)).astype(np.int64)
        check_requantizer(scope, mult, shift)
        if self.out == "i32":
            largest = int(max(requantize(hi, mult, shift).max(), -requantize(lo, mult, shift).min()))
            return Value("i32", shape, -largest, largest), [*proofs, self.proof("y", largest, 31)]
        return scope.codes(self.bits, shape, self.y_zero), proofs

    def run(self, kit: Kit, get: Get) -> Array:
        assert self.group == 0, "packed weights do not run: Program.unpacked"
        w = get(self.part("w"))
        acc = kit.matmul(get(self.x), kit.permute(w, (1, 0))) + kit.wide(get(self.part("bias")))
        if self.out == "acc":
            return kit.narrow(acc, "i32")
        acc = requantize(acc, kit.wide(get(self.part("mult"))), kit.wide(get(self.part("shift"))))
        if self.out == "i32":
            return kit.narrow(acc, "i32")
        return clamp(kit, acc, zero_point(kit, get, self.y_zero, acc.shape[-1]), self.bits)


class LayerNorm(Op, frozen=True, tag="layernorm"):
    """y = clamp((t g[c] + b[c] 2^b_shift + half) >> shift, 0, 2^bits - 1), over the last axis

    v = (x - zero) 2^alpha[c],  M1 = sum v,  M2 = sum v^2,  D = C M2 - M1^2 + epsilon,
    d = isqrt(D 4^j) with the largest j that keeps D 4^j < 2^62,  t = round((C v - M1) 2^(24 + j) / d).
    The input's scale cancels; g = gamma / s_y and b = beta / s_y + y_zero in fixed point, s_y of the channel.

    x: u8 or u16 [..., C]   alpha: u8 [C]   affine: i32 [2, C], g and b
    """

    x: str
    epsilon: int
    shift: int
    b_shift: int
    zero: Zero = 0
    alpha: str | None = None
    bits: int = 8
    parts: ClassVar[tuple[str, ...]] = ("affine",)

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        x = scope.buffer(self.x)
        channels = x.channels
        g, b = scope.constant(self.part("affine"), ("i32",), (2, channels)).astype(np.int64)
        scope.check(self.epsilon >= 1, "epsilon must be at least 1")
        scope.check(1 <= self.shift <= MAX_SHIFT and 0 <= self.b_shift <= 32, "shift must be in 1..62 and b_shift in 0..32")
        v = magnitude(x.lo, x.hi, *scope.zero(self.zero, channels)) << scope.alpha(self.alpha, channels)
        t = (math.isqrt(channels) + 1) << Q24
        largest = int(np.abs(g).max()) * t + (int(np.abs(b).max()) << self.b_shift) + (1 << (self.shift - 1))
        proofs = [
            self.proof("D", channels * channels * v * v + self.epsilon, 62),
            self.proof("t numerator", ((math.isqrt(channels) + 1) << (31 + Q24)) + 2**31, 63),
            self.proof("t", t, 31),
            self.proof("y before its shift", largest, 63),
        ]
        return scope.codes(self.bits, x.shape), proofs

    def run(self, kit: Kit, get: Get) -> Array:
        v = lifted(kit, get, self.x, self.zero, self.alpha)
        channels = v.shape[-1]
        m1 = v.sum(-1)[..., None]
        m2 = (v * v).sum(-1)[..., None]
        d = channels * m2 - m1 * m1 + self.epsilon
        j = (61 - ilog2(d)) >> 1
        root = isqrt(d << 2 * j)
        t = round_divide((channels * v - m1) * (1 << Q24 + j), root)
        affine = kit.wide(get(self.part("affine")))
        y = t * affine[0] + affine[1] * (1 << self.b_shift)
        return clamp(kit, round_shift(y, self.shift), 0, self.bits)


class Term(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One operand of Add: (x - zero) 2^alpha[c] mult[c]; mult is one number or an i32 [C] constant."""

    x: str
    mult: int | str
    zero: Zero = 0
    alpha: str | None = None


class Add(Op, frozen=True, tag="add"):
    """y = clamp((sum of terms + half) >> (shift + y_alpha[c]) + y_zero, 0, 2^bits - 1): one requantization

    A term is a buffer of codes (with zero and alpha), an i32 accumulator, or a constant that broadcasts.
    Multipliers are below 2^30, so that two products and the half fit 63 bits.
    """

    terms: tuple[Term, Term]
    shift: int
    y_zero: Zero = 0
    y_alpha: str | None = None
    bits: int = 8

    def inputs(self) -> tuple[str, ...]:
        return tuple(term.x for term in self.terms)

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        values = [scope.either(term.x, ("u8", "u16", "i16", "i32")) for term in self.terms]
        shapes = [value.shape for value, term in zip(values, self.terms, strict=True) if term.x in scope.buffers]
        scope.check(len(shapes) > 0, "adds constants only")
        shape = shapes[0]
        for term, value in zip(self.terms, values, strict=True):
            # A constant may lack leading axes; a buffer may not, since its first one is the batch.
            own = shape if term.x in scope.buffers else shape[max(len(shape) - len(value.shape), 0) :]
            scope.check(value.shape == own, f"{term.x!r} has shape {list(value.shape)}, the sum {list(shape)}")
        channels, total = shape[-1], 0
        for term, value in zip(self.terms, values, strict=True):
            mult = term.mult if isinstance(term.mult, int) else scope.constant(term.mult, ("i32",), (channels,))
            check_requantizer(scope, mult, 1, 2**30)
            largest = magnitude(value.lo, value.hi, *scope.zero(term.zero, channels)) << scope.alpha(term.alpha, channels)
            total += largest * int(np.max(mult))
        last_shift = self.shift + scope.alpha(self.y_alpha, channels)
        scope.check(1 <= self.shift and last_shift <= MAX_SHIFT, f"shift must be in 1..{MAX_SHIFT}")
        return scope.codes(self.bits, shape, self.y_zero), [self.proof("sum", total + (1 << (last_shift - 1)), 63)]

    def run(self, kit: Kit, get: Get) -> Array:
        total: Array = 0
        for term in self.terms:
            mult = term.mult if isinstance(term.mult, int) else kit.wide(get(term.mult))
            total = total + lifted(kit, get, term.x, term.zero, term.alpha) * mult
        shift = self.shift if self.y_alpha is None else kit.wide(get(self.y_alpha)) + self.shift
        return clamp(kit, round_shift(total, shift), zero_point(kit, get, self.y_zero, total.shape[-1]), self.bits)


class Mean(Op, frozen=True, tag="mean"):
    """y = clamp(requantize(sum over rows t >= skip of (x - zero) 2^alpha[c], mult, shift) + y_zero, 0, 2^bits - 1)

    x: u8 or u16 [T, C]   y: [C]; 1 / (T - skip) is inside mult / 2^shift.
    """

    x: str
    mult: int
    shift: int
    skip: int = 0
    zero: Zero = 0
    alpha: str | None = None
    y_zero: int = 0
    bits: int = 8

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        x = scope.buffer(self.x, min_rank=2)
        scope.check(len(x.shape) == 2 and 0 <= self.skip < x.shape[0], f"shape {list(x.shape)} has no row from {self.skip} on")
        check_requantizer(scope, self.mult, self.shift)
        largest = magnitude(x.lo, x.hi, *scope.zero(self.zero, x.channels)) << scope.alpha(self.alpha, x.channels)
        return scope.codes(self.bits, (x.channels,), self.y_zero), [self.proof("acc", largest * (x.shape[0] - self.skip), 31)]

    def run(self, kit: Kit, get: Get) -> Array:
        acc = lifted(kit, get, self.x, self.zero, self.alpha)[:, self.skip :].sum(1)
        return clamp(kit, requantize(acc, self.mult, self.shift), self.y_zero, self.bits)
