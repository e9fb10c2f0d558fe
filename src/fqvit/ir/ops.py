"""Define the integer ops lookup, linear, layernorm, add and mean.

Each op is defined once: its fields (the JSON of the file), its formula (the docstring), its overflow proofs (`infer`) and its
reference implementation (`run`). Every other implementation matches it bit for bit.

An op reads named buffers, writes the buffer `y`, and owns the constants `<y>.<part>` listed in `parts`; it has only the parts
that its fields require. Constants shared by several ops are named in fields. No field is a float.

`infer` runs once, when a program is verified, and rejects an op that could overflow; `run` therefore checks nothing.

Notation: shapes omit the batch axis. N images, T tokens, C channels, H heads, D head width, K reduction, O outputs.
    requantize(acc, mult, shift) = floor(acc * mult / 2^shift + 1/2)      clamp(v, a, b) = min(max(v, a), b)
Outputs of clamp(..., 0, 2^bits - 1) are u8 if bits <= 8, otherwise u16.

See also: attention.py, elementwise.py and moves.py (the other ops), fixed.py (primitives), packing.py (packed weights).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from fqvit.ir.fixed import MAX_SHIFT, Array, ilog2, isqrt, requantize, round_divide, round_shift
from fqvit.ir.kit import Kit
from fqvit.ir.packing import GROUP_WIDTH, packed_weights
from fqvit.ir.value import Constant, Int, Proof, Scope, Value, magnitude

Get = Callable[[str], Array]  # returns the buffer or constant of that name
# One zero point for all channels, one per group of channels (groups have equal sizes), or the name of a u8 or u16 [C] constant.
Zero = Int | tuple[Int, ...] | str
CODES = ("u8", "u16")
MIN_FRACTION, MAX_FRACTION = 16, 24  # fraction bits of LayerNorm's quotient


class Op(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", forbid_unknown_fields=True, omit_defaults=True):
    """Base class of all ops. `y` names the output buffer."""

    y: str
    parts: ClassVar[tuple[str, ...]] = ()

    def inputs(self) -> tuple[str, ...]:
        """Return the names of the buffers that the op reads, including constants used as operands."""
        return (self.x,)  # type: ignore[attr-defined]

    def part(self, name: str) -> str:
        """Return the full name of one of the op's own constants."""
        return f"{self.y}.{name}"

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        """Check the op; return dtype, shape and bounds of `y`, and the proofs that no intermediate result overflows."""
        raise NotImplementedError

    def run(self, kit: Kit, get: Get) -> Array:
        """Compute `y` for a batch: arrays have a leading axis N that the shapes in docstrings omit."""
        raise NotImplementedError

    def proof(self, what: str, bound: int, bits: int) -> Proof:
        return Proof(self.y, what, bound, bits)


def lifted(kit: Kit, get: Get, x: str, zero: Zero, alpha: str | None) -> Array:
    """Return (x - zero) * 2^alpha[c] as int64: integers with one scale for all channels (paper eq. 11)."""
    value = kit.wide(get(x))
    value = value - zero_point(kit, get, zero, value.shape[-1])
    return value if alpha is None else value * (1 << kit.wide(get(alpha)))


def zero_point(kit: Kit, get: Get, zero: Zero, channels: int) -> Array | int:
    """Return a zero point as one number or as int64 [C]."""
    if isinstance(zero, tuple):
        return kit.asarray(np.repeat(np.array(zero, np.int64), channels // len(zero)))
    return kit.wide(get(zero)) if isinstance(zero, str) else zero


def clamp(kit: Kit, value: Array, zero: Array | int, bits: int) -> Array:
    """Return clamp(value + zero, 0, 2^bits - 1) as u8, or as u16 if bits > 8."""
    return kit.narrow((value + zero).clip(0, 2**bits - 1), "u8" if bits <= 8 else "u16")


def check_requantizer(scope: Scope, mult: Any, shift: Any, largest: int = 2**31) -> None:
    """Reject a multiplier outside 0..largest - 1 or a shift outside 1..62."""
    scope.check(bool(np.all(np.asarray(mult) >= 0)) and int(np.max(mult)) < largest, f"mult must be in 0..{largest - 1}")
    scope.check(1 <= int(np.min(shift)) and int(np.max(shift)) <= MAX_SHIFT, f"shift must be in 1..{MAX_SHIFT}")


class Lookup(Op, frozen=True, tag="lookup"):
    """y = table[x]

    With alpha:   y = clamp(((table[x] + 2^alpha[c]) >> (alpha[c] + 1)) + y_zero[alpha[c]], 0, 2^bits - 1)

    x: u8 or u16 [..., C], codes up to n - 1   table: u8 or u16 [n]   y: dtype of table, [..., C]
    With alpha:   table: i16 or i32 [n]   alpha: u8 [C]   y_zero: one zero point per value of alpha   y: u8 or u16 [..., C]
    The scale of channel c is then s * 2^alpha[c], and the table holds floor(2 * f / s), where f is the function value, so that
    the shift rounds f / (s * 2^alpha[c]) exactly once.
    """

    x: str
    alpha: str | None = None
    y_zero: tuple[Int, ...] = ()
    bits: Int = 8
    parts: ClassVar[tuple[str, ...]] = ("table",)

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        x = scope.buffer(self.x)
        if self.alpha is None:
            table = scope.constant(self.part("table"), CODES, (x.hi + 1,))
            dtype = "u8" if table.dtype == np.uint8 else "u16"
            return Value(dtype, x.shape, int(table.min()), int(table.max())), []
        table = scope.constant(self.part("table"), ("i16", "i32"), (x.hi + 1,)).astype(np.int64)
        alpha = scope.alpha(self.alpha, x.channels)
        scope.check(
            len(self.y_zero) == alpha + 1, f"{len(self.y_zero)} zero points, expected {alpha + 1}: one per value of alpha"
        )
        scope.check(1 <= self.bits <= 16, f"bits is {self.bits}, expected 1 to 16")
        are_codes = 0 <= min(self.y_zero) and max(self.y_zero) < 1 << self.bits
        scope.check(are_codes, f"y_zero is outside 0..{(1 << self.bits) - 1}")
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
    """acc[..., o] = (sum_k x[..., k] * w[o, k]) + bias[o]

    out "codes": y = clamp(requantize(acc, mult[o], shift[o]) + y_zero[o], 0, 2^bits - 1)   u8 or u16
    out "acc":   y = acc                                      i32, no mult and no shift
    out "i32":   y = requantize(acc, mult[o], shift[o])       i32

    x: u8 or u16 [..., K]   w: i8 [O, K]   bias: i32 [O]   mult: i32 or u16 [O]   shift: u8 [O]   y: [..., O]
    The zero point of x is folded into the bias: bias[o] = round(b[o] / (s_x * s_w[o])) - sum_k x_zero[k] * w[o, k].
    |acc| < 2^31 is proved from the actual weights, for partial sums in any order.

    Packed weights have width > 0 or group > 0; Program.unpacked expands them to i8.
    width: bits of a code, 2..7. Width 0 means 4 bits if group > 0; otherwise, weights are i8 and not packed.
    w: u8 [O, ceil(K * width / 8)]
    group > 0: w[o, k] = code[o, k] * 2^exponent[o, k // group], exponent in 0..8 - width, stored two per byte;
    exponent: u8 [O, ceil(G / 2)], G = ceil(K / group)
    codebooks > 0, their number: w[o, k] = codebooks[choice[o, k // group], code[o, k]], choice stored two per byte;
    choice: u8 [O, ceil(G / 2)]   codebooks: i8 [codebooks, 2^width]
    weights_of: an earlier Linear whose weights (weight_parts) this op uses (one layer that runs on several feature maps).
    """

    x: str
    out: Literal["codes", "acc", "i32"] = "codes"
    y_zero: Zero = 0
    bits: Int = 8
    group: Int = 0
    weights_of: str | None = None
    width: Int = 0
    codebooks: Int = 0
    parts: ClassVar[tuple[str, ...]] = ("w", "exponent", "choice", "codebooks", "bias", "mult", "shift")

    def part(self, name: str) -> str:
        return f"{self.weights_of}.{name}" if self.weights_of is not None and name in self.weight_parts else super().part(name)

    @property
    def packed(self) -> bool:
        """Whether the weights are stored in fewer than 8 bits each."""
        return self.group != 0 or self.width != 0 or self.codebooks != 0

    @property
    def weight_parts(self) -> tuple[str, ...]:
        """The parts that store the weights: `w` first."""
        if self.codebooks:
            return "w", "choice", "codebooks"
        return ("w", "exponent") if self.group else ("w",)

    @property
    def weight_bits(self) -> int:
        """Bits per stored weight."""
        return self.width or (GROUP_WIDTH if self.group else 8)

    def weights(self, scope: Scope) -> Constant:
        """Return w as i8 [O, K], unpacked if it is packed."""
        inputs = scope.buffer(self.x).channels
        if not self.packed:
            return scope.constant(self.part("w"), ("i8",), (None, inputs))
        return packed_weights(scope, self.part, inputs, self.group, self.weight_bits, self.codebooks)

    def check_owner(self, scope: Scope, earlier: Mapping[str, Linear]) -> None:
        """Check that `weights_of` names an earlier Linear with its own weights, of the same format and number of inputs.

        The number of inputs must be checked here: packed weights of K and of K + 1 inputs can have the same shape.
        """
        if self.weights_of is None:
            return
        owner, of = earlier.get(self.weights_of), f"{self.weights_of!r} (weights_of)"
        if owner is None or owner.weights_of is not None:
            scope.fail(f"weights_of is {self.weights_of!r}, expected an earlier linear op that has its own weights")
        scope.check(owner.group == self.group, f"group is {self.group}, but {of} has {owner.group}")
        scope.check(owner.width == self.width, f"width is {self.width}, but {of} has {owner.width}")
        scope.check(owner.codebooks == self.codebooks, f"codebooks is {self.codebooks}, but {of} has {owner.codebooks}")
        same = scope.buffer(owner.x).channels == scope.buffer(self.x).channels
        scope.check(same, f"reads a different number of channels than {of}")

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        x = scope.buffer(self.x)
        w = self.weights(scope)
        outputs = w.shape[0]
        bias = scope.constant(self.part("bias"), ("i32",), (outputs,)).astype(np.int64)
        # einsum, because sum() would first widen all of w; np.abs(-128) is -128 as i8, and 128 when viewed as u8.
        total, size = (np.einsum("ok->o", part, dtype=np.int64) for part in (w, np.abs(w).view(np.uint8)))
        ups, downs = (size + total) // 2 * x.hi, (total - size) // 2 * x.hi
        lo, hi = downs + np.minimum(bias, 0), ups + np.maximum(bias, 0)  # also bounds partial sums in any order
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
        assert not self.packed, "packed weights cannot run, use Program.unpacked first"
        w = get(self.part("w"))
        acc = kit.matmul(get(self.x), kit.permute(w, (1, 0))) + kit.wide(get(self.part("bias")))
        if self.out == "acc":
            return kit.narrow(acc, "i32")
        acc = requantize(acc, kit.wide(get(self.part("mult"))), kit.wide(get(self.part("shift"))))
        if self.out == "i32":
            return kit.narrow(acc, "i32")
        return clamp(kit, acc, zero_point(kit, get, self.y_zero, acc.shape[-1]), self.bits)


class LayerNorm(Op, frozen=True, tag="layernorm"):
    """y = clamp((t * g[c] + b[c] * 2^b_shift + 2^(shift - 1)) >> shift, 0, 2^bits - 1), normalized over the last axis

    v = (x - zero[c]) * 2^alpha[c],   M1 = sum_c v,   M2 = sum_c v^2,   D = C * M2 - M1^2 + epsilon,
    d = isqrt(D * 4^j) for the largest j with D * 4^j < 2^62,   t = floor((C * v - M1) * 2^(fraction + j) / d + 1/2)

    x: u8 or u16 [..., C]   alpha: u8 [C]   affine: i32 [2, C], the rows g and b   y: u8 or u16 [..., C]
    The scale of x cancels; epsilon = max(1, round(eps * C^2 / s_x^2)). For the output scale s_y and zero point of each channel,
    gamma / s_y = g * 2^(fraction - shift) and beta / s_y + y_zero = b * 2^(b_shift - shift).
    fraction: fraction bits of t. |t| <= (isqrt(C) + 1) * 2^fraction must be below 2^31, so 24 is possible up to C = 16,128.
    center = false: M1 = 0, RMS normalization v / sqrt(mean(v^2) + eps). With gamma / sqrt(C) in g, it is L2 normalization.
    D and all products fit int64 (proved by infer): |C * v - M1| <= sqrt(C * D), with and without centering.
    """

    x: str
    epsilon: Int
    shift: Int
    b_shift: Int
    zero: Zero = 0
    alpha: str | None = None
    bits: Int = 8
    center: bool = True
    fraction: Int = MAX_FRACTION
    parts: ClassVar[tuple[str, ...]] = ("affine",)

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        x = scope.buffer(self.x)
        channels = x.channels
        g, b = scope.constant(self.part("affine"), ("i32",), (2, channels)).astype(np.int64)
        scope.check(self.epsilon >= 1, "epsilon must be at least 1")
        scope.check(1 <= self.shift <= MAX_SHIFT and 0 <= self.b_shift <= 32, "shift must be in 1..62 and b_shift in 0..32")
        scope.check(MIN_FRACTION <= self.fraction <= MAX_FRACTION, f"fraction must be in {MIN_FRACTION}..{MAX_FRACTION}")
        v = magnitude(x.lo, x.hi, *scope.zero(self.zero, channels)) << scope.alpha(self.alpha, channels)
        t = (math.isqrt(channels) + 1) << self.fraction
        largest = int(np.abs(g).max()) * t + (int(np.abs(b).max()) << self.b_shift) + (1 << (self.shift - 1))
        proofs = [
            self.proof("D", channels * channels * v * v + self.epsilon, 62),
            self.proof("t numerator", (t << 31) + 2**31, 63),
            self.proof("t", t, 31),
            self.proof("y before its shift", largest, 63),
        ]
        return scope.codes(self.bits, x.shape), proofs

    def run(self, kit: Kit, get: Get) -> Array:
        v = lifted(kit, get, self.x, self.zero, self.alpha)
        channels = v.shape[-1]
        m1 = v.sum(-1)[..., None] * int(self.center)
        m2 = (v * v).sum(-1)[..., None]
        d = channels * m2 - m1 * m1 + self.epsilon
        j = (61 - ilog2(d)) >> 1
        root = isqrt(d << 2 * j)
        t = round_divide((channels * v - m1) * (1 << self.fraction + j), root)
        affine = kit.wide(get(self.part("affine")))
        y = t * affine[0] + affine[1] * (1 << self.b_shift)
        return clamp(kit, round_shift(y, self.shift), 0, self.bits)


class Term(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One operand of Add: (x - zero[c]) * 2^alpha[c] * mult[c]; mult is a number or the name of an i32 [C] constant."""

    x: str
    mult: Int | str
    zero: Zero = 0
    alpha: str | None = None


class Add(Op, frozen=True, tag="add"):
    """y = clamp(floor((term 0 + term 1) / 2^(shift + y_alpha[c]) + 1/2) + y_zero[c], 0, 2^bits - 1): one rounding

    term = (x - zero[c]) * 2^alpha[c] * mult[c]

    x of a term: u8, u16 or i32 buffer [..., C], or a u8, u16, i16 or i32 constant that broadcasts over leading axes
    alpha, y_alpha: u8 [C]   mult: a number or i32 [C]   y: u8 or u16 [..., C]
    Multipliers are below 2^30; infer proves that the sum plus the rounding term fits int64.
    """

    terms: tuple[Term, Term]
    shift: Int
    y_zero: Zero = 0
    y_alpha: str | None = None
    bits: Int = 8

    def inputs(self) -> tuple[str, ...]:
        return tuple(term.x for term in self.terms)

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        values = [scope.either(term.x, ("u8", "u16", "i16", "i32")) for term in self.terms]
        shapes = [value.shape for value, term in zip(values, self.terms, strict=True) if term.x in scope.buffers]
        scope.check(len(shapes) > 0, "adds only constants, expected at least one buffer")
        shape = shapes[0]
        for term, value in zip(self.terms, values, strict=True):
            # A constant may omit leading axes. A buffer may not: it has a batch axis in front.
            own = shape if term.x in scope.buffers else shape[max(len(shape) - len(value.shape), 0) :]
            scope.check(value.shape == own, f"{term.x!r} has shape {list(value.shape)}, expected {list(own)}")
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
    """acc[..., c] = sum_{t >= skip} (x[..., t, c] - zero[c]) * 2^alpha[c]

    y = clamp(requantize(acc, mult, shift) + y_zero, 0, 2^bits - 1)

    x: u8 or u16 [..., T, C]   alpha: u8 [C]   y: u8 or u16 [..., C]
    The factor 1 / (T - skip) is part of mult / 2^shift.
    """

    x: str
    mult: Int
    shift: Int
    skip: Int = 0
    zero: Zero = 0
    alpha: str | None = None
    y_zero: Int = 0
    bits: Int = 8

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        x = scope.buffer(self.x, min_rank=2)
        *outer, tokens, channels = x.shape
        scope.check(
            0 <= self.skip < tokens,
            f"skip is {self.skip} for shape {list(x.shape)}, expected [..., T, C] with T above skip",
        )
        check_requantizer(scope, self.mult, self.shift)
        largest = magnitude(x.lo, x.hi, *scope.zero(self.zero, channels)) << scope.alpha(self.alpha, channels)
        proof = self.proof("acc", largest * (tokens - self.skip), 31)
        return scope.codes(self.bits, (*outer, channels), self.y_zero), [proof]

    def run(self, kit: Kit, get: Get) -> Array:
        acc = lifted(kit, get, self.x, self.zero, self.alpha)[..., self.skip :, :].sum(-2)
        return clamp(kit, requantize(acc, self.mult, self.shift), self.y_zero, self.bits)
