"""Emit fixed-point primitives as ONNX nodes: shifts, requantization, lookups, row sums, square roots.

Every function computes exactly what its counterpart in ir/fixed.py defines, given bounds that Program.verify has proved. Bounds
are Python integers, so they cannot overflow. Some ops of ONNX Runtime are inexact, truncate or are undefined, and are therefore
avoided: Max, Min, Clip and ReduceSum on 64 bits, Div of negative numbers, BitShift of signed numbers (docs/reference/onnx.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fqvit.export.onnx.graph import OnnxGraph

I31, I63 = 1 << 31, 1 << 63
ShiftArgs = tuple[str, int, int, Any, Any]  # arguments of floor_shift and to_codes: p, lo, hi, add, shift
Ints = Any  # a Python integer, or an array of them (dtype object): no fixed width, no overflow


def python_ints(x: Any) -> Ints:
    """Convert to Python integers."""
    return np.asarray(x).astype(object)


def lowest(x: Ints) -> int:
    return int(np.min(python_ints(x)))


def highest(x: Ints) -> int:
    return int(np.max(python_ints(x)))


def type_for(lo: int, hi: int) -> str:
    """Return the narrowest of i32 and i64 that holds lo..hi."""
    assert max(-lo, hi) < I63, f"{lo}..{hi} does not fit 64 bits"
    return "i32" if max(-lo, hi) < I31 else "i64"


def half(shift: Ints) -> Ints:
    """Return 2^(shift - 1), which is added before a shift to round."""
    return python_ints(1) << (python_ints(shift) - 1)


def floor_shift(g: OnnxGraph, p: str, lo: int, hi: int, add: Ints, shift: Ints) -> str:
    """Emit floor((p + add) / 2^shift) as i32. p: i64, lo <= p + add <= hi"""
    above = nonnegative_offset(lo, shift)
    quotient, dtype = unsigned_shift(g, p, hi, add, shift, above)
    if np.any(above):
        quotient = g.node("Sub", [quotient, g.constant(above, dtype, "offset")], "quotient")
    return quotient if dtype == "i32" else g.cast(quotient, "i32")


def to_codes(g: OnnxGraph, p: str, lo: int, hi: int, add: Ints, shift: Ints, zero: Ints, bits: int) -> str:
    """Emit the codes clamp(floor((p + add) / 2^shift) + zero, 0, 2^bits - 1) as u8 or u16. p: i64, lo <= p + add <= hi

    A multiple of 2^16 is added to make quotients non-negative; the final Cast to u8 or u16 drops it again.
    """
    zero = python_ints(zero)
    last, period = (1 << bits) - 1, 1 << 16
    base = -(-highest(nonnegative_offset(lo, shift) - zero) // period) * period
    if base >= I31 or hi + highest((zero + base) << python_ints(shift)) >= 2 * I63:  # would not fit 32 or 64 bits
        quotient, dtype = unsigned_shift(g, p, hi, add, shift, above := nonnegative_offset(lo, shift))
        quotient = g.node("Sub", [quotient, g.constant(above - zero, dtype, "offset")], "quotient")
        base = 0
    else:
        quotient, dtype = unsigned_shift(g, p, hi, add, shift, zero + base)
    ends = [g.constant(end, dtype, "end") for end in (base, base + last)]
    if dtype == "i32":
        quotient = g.node("Clip", [quotient, *ends], "clipped")
    else:
        quotient = g.node("Where", [g.node("Less", [quotient, ends[0]], "below"), ends[0], quotient], "not below")
        quotient = g.node("Where", [g.node("Less", [ends[1], quotient], "above"), ends[1], quotient], "clipped")
    return g.cast(quotient, "u8" if bits <= 8 else "u16", "codes")


def nonnegative_offset(lo: int, shift: Ints) -> Ints:
    """Return the smallest n >= 0 with lo + n * 2^shift >= 0."""
    return python_ints(-(-max(-lo, 0) // (python_ints(1) << python_ints(shift))))


def unsigned_shift(g: OnnxGraph, p: str, hi: int, add: Ints, shift: Ints, above: Ints) -> tuple[str, str]:
    """Emit floor((p + add) / 2^shift) + above and return it with its type.

    `above` must make the result non-negative, because ONNX defines BitShift for unsigned types only.
    """
    up = python_ints(above) << python_ints(shift)
    raised = python_ints(add) + up
    if hi + highest(up) < I63 and -I63 <= lowest(raised) and highest(raised) < I63:
        if np.any(raised):
            p = g.node("Add", [p, g.constant(raised, "i64", "half")], "raised")
        p = g.cast(p, "u64", "unsigned")
    else:  # the sum needs the 64th bit
        assert hi + highest(up) < 2 * I63
        p = g.cast(p, "u64", "unsigned")
        p = g.node("Add", [p, g.constant(raised % (2 * I63), "u64", "half")], "raised")
    p = g.node("BitShift", [p, g.constant(shift, "u64", "shift")], "shifted", direction="RIGHT")
    # The caller subtracts `above` again in the same type.
    dtype = "i32" if max(highest((hi + up) >> python_ints(shift)), highest(above)) < I31 else "i64"
    return g.cast(p, dtype), dtype


def common_shift_factor(shift: Ints, reach: Ints) -> Ints:
    """Return per-channel factors that raise all shifts to the largest one, or 1 if reach * factor could overflow.

    reach: bound of |p + half| per channel
    (p + half) >> s equals (p * 2^k + half * 2^k) >> (s + k), and one shift per tensor is faster than one per channel.
    """
    factor = python_ints(1) << (highest(shift) - python_ints(shift))
    return factor if highest(python_ints(reach) * factor) < 1 << 61 else 1


def requantize_args(g: OnnxGraph, acc: str, lo: Ints, hi: Ints, mult: Ints, shift: Ints, offset: Ints = 0) -> ShiftArgs:
    """Emit acc * mult and return the arguments with which floor_shift gives round_shift((acc + offset) * mult, shift).

    acc: i32 or i64, lo <= acc <= hi. All other arguments are per tensor or per channel. offset * mult becomes part of `add`.
    """
    lo, hi, mult, shift, offset = (python_ints(x) for x in (lo, hi, mult, shift, offset))
    reach = np.maximum(np.maximum(abs(lo), abs(hi)), np.maximum(abs(lo + offset), abs(hi + offset))) * mult
    factor = common_shift_factor(shift, reach + mult + half(shift))
    if highest(factor) > 1 or lowest(shift) == highest(shift):
        mult, shift = mult * factor, highest(shift)
    # verify proves |acc + offset| < 2^31, which implies |acc| < 2^32, and mult < 2^31. The mult of Mean contains 2^alpha, but
    # its proof covers |acc + offset| * 2^alpha.
    assert highest(np.maximum(abs(lo), abs(hi)) * mult) < I63
    p = g.node("Mul", [g.cast(acc, "i64", "wide"), g.constant(mult, "i64", "mult")], "product")
    add = offset * mult + half(shift)
    return p, lowest(lo * mult + add), highest(hi * mult + add), add, shift


def lookup(g: OnnxGraph, index: str, table: Any, dtype: str, shape: tuple[int, ...], label: str = "looked up") -> str:
    """Emit table[index]. index: i32 [N, *shape]

    On flat tensors GatherElements equals Gather and is twenty times faster in ONNX Runtime, where Gather copies one element at
    a time. Tables of u8 are stored as u16, which is faster still.
    """
    if g.plain_tables:
        return g.node("Gather", [g.constant(table, dtype, "table"), index], label, axis=0)
    entries = g.constant(table, "u16" if dtype == "u8" else dtype, "table")
    taken = g.node("GatherElements", [entries, g.reshape(index, [-1], "flat")], f"{label}, flat", axis=0)
    if dtype == "u8":
        taken = g.cast(taken, "u8", f"{label}, bytes")
    return g.reshape(taken, [-1, *shape], label)


def row_sum(g: OnnxGraph, x: str, length: int, dtype: str, label: str) -> str:
    """Emit the sum over the last axis, which is kept with length 1.

    Emitted as MatMul with ones, because ReduceSum of i64 in ONNX Runtime is slow, and inexact from 2^50 on.
    """
    ones = g.shared_constant(np.ones((length, 1), np.int64), dtype, f"ones.{length}.{dtype}")
    return g.node("MatMul", [x, ones], label)


def halved(g: OnnxGraph, x: str, dtype: str) -> str:
    """Emit floor(x / 2) for x >= 0."""
    return g.node("Div", [x, g.constant(2, dtype, "two")], "half")


def round_quotient(g: OnnxGraph, number: int, x: str, label: str) -> str:
    """Emit round_divide(number, x). x: i64 > 0"""
    sum_ = g.node("Add", [halved(g, x, "i64"), g.constant(number, "i64", "numerator")], "numerator")
    return g.node("Div", [sum_, x], label)


def isqrt(g: OnnxGraph, x: str) -> str:
    """Emit floor(sqrt(x)) for i64 2^60 <= x < 2^62.

    Newton's method starts from the chord (x / 2^60 + 2) / 3 in units of 2^30, which is off by at most 5.8 %. The results of
    the three iterations are too large by at most 0.18 %, 1.6e-4 % and 1.2e-10 %. Roots are below 2^31, so the last result is
    the root or the root + 1; the last nodes correct the latter.
    """
    root = g.node("Div", [x, g.constant(3 << 30, "i64", "slope")], "root start")
    root = g.node("Add", [root, g.constant((2 << 30) // 3, "i64", "start")], "root 0")
    for step in (1, 2, 3):
        other = g.node("Div", [x, root], f"root {step} other side")
        root = halved(g, g.node("Add", [root, other], f"root {step} twice"), "i64")
    over = g.node("Less", [x, g.node("Mul", [root, root], "root squared")], "root is one more")
    return g.node("Sub", [root, g.cast(over, "i64", "one more")], "root")
