"""Fixed-point primitives as ONNX nodes: shifts that floor, requantization, clamping, tables, sums, square roots.

Each is exact by the bounds it is given, which are those that verify proves. What ONNX Runtime gets wrong is not used:
no Max, Min, Clip or ReduceSum on 64 bits, no Div of a negative number, no BitShift of a signed one (docs/export.md).
Bounds are Python integers, so that nothing here can overflow unnoticed. Neighbour: ir/fixed.py, whose meaning this has.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fqvit.export.onnx.graph import OnnxGraph

I31, I63 = 1 << 31, 1 << 63
ShiftArgs = tuple[str, int, int, Any, Any]  # what floor_shift and codes take: p, lo, hi, add, shift
Ints = Any  # a number or an array of Python integers, which have no width: numpy's dtype object


def python_ints(x: Any) -> Ints:
    """As Python integers."""
    return np.asarray(x).astype(object)


def lowest(x: Ints) -> int:
    return int(np.min(python_ints(x)))


def highest(x: Ints) -> int:
    return int(np.max(python_ints(x)))


def type_for(lo: int, hi: int) -> str:
    """The narrower signed type that holds lo..hi."""
    assert max(-lo, hi) < I63, f"{lo}..{hi} does not fit 64 bits"
    return "i32" if max(-lo, hi) < I31 else "i64"


def half(shift: Ints) -> Ints:
    return python_ints(1) << (python_ints(shift) - 1)


def floor_shift(g: OnnxGraph, p: str, lo: int, hi: int, add: Ints, shift: Ints) -> str:
    """floor((p + add) / 2^shift), i32; p: i64, lo <= p + add <= hi."""
    above = nonnegative_offset(lo, shift)
    quotient, dtype = unsigned_shift(g, p, hi, add, shift, above)
    if np.any(above):
        quotient = g.node("Sub", [quotient, g.constant(above, dtype, "raise")], "quotient")
    return quotient if dtype == "i32" else g.cast(quotient, "i32")


def to_codes(g: OnnxGraph, p: str, lo: int, hi: int, add: Ints, shift: Ints, zero: Ints, bits: int) -> str:
    """clamp(floor((p + add) / 2^shift) + zero): codes; p: i64, lo <= p + add <= hi.

    Quotients are raised to zero + a multiple of 2^16, which Cast drops with all other bits above a code's.
    """
    zero = python_ints(zero)
    last, period = (1 << bits) - 1, 1 << 16
    base = -(-highest(nonnegative_offset(lo, shift) - zero) // period) * period
    if base >= I31 or hi + highest((zero + base) << python_ints(shift)) >= 2 * I63:  # no room to raise them so far
        quotient, dtype = unsigned_shift(g, p, hi, add, shift, above := nonnegative_offset(lo, shift))
        quotient = g.node("Sub", [quotient, g.constant(above - zero, dtype, "raise")], "quotient")
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
    """The least n with lo + n 2^shift >= 0."""
    return python_ints(-(-max(-lo, 0) // (python_ints(1) << python_ints(shift))))


def unsigned_shift(g: OnnxGraph, p: str, hi: int, add: Ints, shift: Ints, above: Ints) -> tuple[str, str]:
    """floor((p + add) / 2^shift) + above, and its type; above is so large that this is positive: BitShift is of unsigned
    numbers."""
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
    # What is raised comes down again in the same type.
    dtype = "i32" if max(highest((hi + up) >> python_ints(shift)), highest(above)) < I31 else "i64"
    return g.cast(p, dtype), dtype


def common_shift_factor(shift: Ints, reach: Ints) -> Ints:
    """What factor[c] brings all channels to the largest shift, if |reach[c]| * factor[c] stays small; else 1 for all.

    (p + half) >> s is (p 2^k + half 2^k) >> (s + k), and one shift for all is faster than one a channel.
    """
    factor = python_ints(1) << (highest(shift) - python_ints(shift))
    return factor if highest(python_ints(reach) * factor) < 1 << 61 else 1


def requantize_args(g: OnnxGraph, acc: str, lo: Ints, hi: Ints, mult: Ints, shift: Ints, offset: Ints = 0) -> ShiftArgs:
    """What shifts round_shift((acc + offset) * mult, shift); lo <= acc <= hi, i32 or i64.

    Everything but acc is a constant or one a channel; offset * mult goes into the constant that rounds.
    """
    lo, hi, mult, shift, offset = (python_ints(x) for x in (lo, hi, mult, shift, offset))
    reach = np.maximum(np.maximum(abs(lo), abs(hi)), np.maximum(abs(lo + offset), abs(hi + offset))) * mult
    factor = common_shift_factor(shift, reach + mult + half(shift))
    if highest(factor) > 1 or lowest(shift) == highest(shift):
        mult, shift = mult * factor, highest(shift)
    # acc without its offset is at most twice what verify proves to be below 2^31, and mult is below 2^31.
    assert highest(np.maximum(abs(lo), abs(hi)) * mult) < I63
    p = g.node("Mul", [g.cast(acc, "i64", "wide"), g.constant(mult, "i64", "mult")], "product")
    add = offset * mult + half(shift)
    return p, lowest(lo * mult + add), highest(hi * mult + add), add, shift


def lookup(g: OnnxGraph, index: str, table: Any, dtype: str, shape: tuple[int, ...], label: str = "looked up") -> str:
    """table[index]; index: i32 [N, *shape].

    GatherElements on a flat list is Gather, and twenty times faster in ONNX Runtime, which copies one element at a time there.
    Bytes are looked up as u16, which is faster, too.
    """
    if g.plain_tables:
        return g.node("Gather", [g.constant(table, dtype, "table"), index], label, axis=0)
    entries = g.constant(table, "u16" if dtype == "u8" else dtype, "table")
    taken = g.node("GatherElements", [entries, g.reshape(index, [-1], "flat")], f"{label}, flat", axis=0)
    if dtype == "u8":
        taken = g.cast(taken, "u8", f"{label}, bytes")
    return g.reshape(taken, [-1, *shape], label)


def row_sum(g: OnnxGraph, x: str, length: int, dtype: str, label: str) -> str:
    """The sum over the last axis, which stays with length 1, as a product with ones: ReduceSum is slow, and wrong from 2^50."""
    ones = g.shared_constant(np.ones((length, 1), np.int64), dtype, f"ones.{length}.{dtype}")
    return g.node("MatMul", [x, ones], label)


def halved(g: OnnxGraph, x: str, dtype: str) -> str:
    """x / 2 for x >= 0."""
    return g.node("Div", [x, g.constant(2, dtype, "two")], "half of it")


def round_quotient(g: OnnxGraph, number: int, x: str, label: str) -> str:
    """round_divide(number, x) for x: i64 > 0."""
    sum_ = g.node("Add", [halved(g, x, "i64"), g.constant(number, "i64", "numerator")], "numerator")
    return g.node("Div", [sum_, x], label)


def isqrt(g: OnnxGraph, x: str) -> str:
    """floor(sqrt(x)) for i64 2^60 <= x < 2^62.

    Three steps of Newton's method from a chord, (x / 2^60 + 2) / 3 in units of 2^30, which is off by at most 5.8 %: then by
    0.17 %, 1.5e-6 and 1.1e-12 times 2^31, upwards only. So the result is the root or one more.
    """
    root = g.node("Div", [x, g.constant(3 << 30, "i64", "slope")], "root start")
    root = g.node("Add", [root, g.constant((2 << 30) // 3, "i64", "start")], "root 0")
    for step in (1, 2, 3):
        other = g.node("Div", [x, root], f"root {step} other side")
        root = halved(g, g.node("Add", [root, other], f"root {step} twice"), "i64")
    over = g.node("Less", [x, g.node("Mul", [root, root], "root squared")], "root is one more")
    return g.node("Sub", [root, g.cast(over, "i64", "one more")], "root")
