"""Emit the attention ops as ONNX nodes. See also: ir/attention.py, which defines these ops.

The softmax tables are indexed by the distance of a score from the largest score of its row. They have one entry for every
possible distance, plus one for masked tokens (those of other regions), so that no index has to be clipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fqvit.export.onnx.fixed import I31, half, halved, lookup, requantize_args, round_quotient, row_sum, to_codes
from fqvit.export.onnx.graph import OnnxGraph
from fqvit.export.onnx.ops import weighted_sum
from fqvit.ir.attention import Attend, LogSoftmax, MatMul, RowCodes, ShiftMatMul, Softmax
from fqvit.ir.fixed import ilog2_round
from fqvit.ir.value import magnitude


def product(g: OnnxGraph, a: str, b: str, a_zero: int, b_zero: int, b_bytes: bool, a_bytes: bool = True) -> str:
    """Emit sum_k (a[..., m, k] - a_zero) * (b[..., k, n] - b_zero) as i32.

    a_bytes, b_bytes: whether a and b are u8; otherwise they are wider
    """
    if a_bytes and b_bytes and max(a_zero, b_zero) < 256:
        zeros = [g.constant(zero, "u8", "zero") for zero in (a_zero, b_zero)]
        return g.node("MatMulInteger", [a, b, *zeros], "sum")
    sides = []
    for x, zero in ((a, a_zero), (b, b_zero)):
        x = g.cast(x, "i32")
        sides.append(g.node("Sub", [x, g.constant(zero, "i32", "zero")], "centred") if zero else x)
    return g.node("MatMul", sides, "sum")


def matmul(g: OnnxGraph, op: MatMul) -> str:
    a, b = g.value(op.a), g.value(op.b)
    right = op.b
    if not op.b_rows:
        axes = list(range(len(b.shape) + 1))
        right = g.node("Transpose", [op.b], "transposed", perm=[*axes[:-2], axes[-1], axes[-2]])
    acc = product(g, op.a, right, op.a_zero, op.b_zero, b.dtype == "u8", a.dtype == "u8")
    reach = (b.shape[-2] if op.b_rows else b.channels) * (
        magnitude(a.lo, a.hi, op.a_zero, op.a_zero) * magnitude(b.lo, b.hi, op.b_zero, op.b_zero)
    )
    if op.index is not None:
        bias = g.constants[op.part("bias")]
        reach += int(np.abs(bias.astype(np.int64)).max())
        index = g.shared_constant(g.constants[op.index], "i32", op.index)
        taken = g.node("Gather", [g.shared_constant(bias, "i32", op.part("bias")), index], "bias by position")  # [M, N, H]
        acc = g.node("Add", [acc, g.node("Transpose", [taken], "bias by head", perm=[2, 0, 1])], "acc")
    mult = op.mult if isinstance(op.mult, int) else g.constants[op.mult][:, None, None]
    return to_codes(g, *requantize_args(g, acc, -reach, reach, mult, op.shift, 0), op.y_zero, op.bits)


def by_distance(g: OnnxGraph, x: str, table: Any, dtype: str, region: str | None, elsewhere: int) -> str:
    """Emit table[row maximum - x], or `elsewhere` for tokens of other regions, which do not count for the maximum."""
    codes = g.value(x)
    n = codes.hi + 1
    entries = table.astype(np.int64)[np.minimum(np.arange(n), len(table) - 1)]
    wide = g.cast(x, "i32")
    last = g.shared_constant(np.array([-1], np.int64), "i64", "last axis")
    if region is None:
        top = g.node("ReduceMax", [wide, last], "row max", keepdims=1)
        return lookup(g, g.node("Sub", [top, wide], "distance"), entries, dtype, codes.shape)
    regions = g.constants[region]
    down = g.shared_constant(regions[:, None, :, None], "i32", f"{region}/down")
    across = g.shared_constant(regions[:, None, None, :], "i32", f"{region}/across")
    same = g.shared_node("Equal", [down, across], f"{region}/same")
    seen = g.node("Where", [same, wide, g.constant(0, "i32", "none")], "visible scores")
    distance = g.node("Sub", [g.node("ReduceMax", [seen, last], "row max", keepdims=1), wide], "distance")
    index = g.node("Where", [same, distance, g.constant(n, "i32", "hidden")], "distance or hidden")
    return lookup(g, index, np.append(entries, elsewhere), dtype, codes.shape)


def row_codes(g: OnnxGraph, op: RowCodes) -> str:
    table = g.constants[op.part("table")]
    return by_distance(g, op.x, table, "u8", op.region, int(table[-1]))


def softmax(g: OnnxGraph, op: Softmax) -> str:
    tokens, table = g.value(op.x).channels, g.constants[op.part("table")]
    e = by_distance(g, op.x, table, "i32", op.region, 0)
    total = g.cast(row_sum(g, e, tokens, "i32", "S"), "i64")
    r = round_quotient(g, op.mult, total, "r")
    p = g.node("Mul", [g.cast(e, "i64"), r], "e r")
    most = op.mult + 2 * int(table.max()) + int(half(op.shift))
    return to_codes(g, p, 0, most, half(op.shift), op.shift, 0, op.bits)


def log_softmax(g: OnnxGraph, op: LogSoftmax) -> str:
    """Emit Log-Int-Softmax. ilog2_round is a table lookup; its index is S / e, clipped at the first one with the last code."""
    x, table = g.value(op.x), g.constants[op.part("table")].astype(np.int64)
    last = 2**op.bits - 1
    dtype = "i32" if 3 * x.channels * int(table.max()) < 2 * I31 else "i64"
    e = by_distance(g, op.x, table, "i32", op.region, 0)
    total = row_sum(g, e, x.channels, "i32", "S")
    none = g.node("Less", [e, g.constant(1, "i32", "one")], "e is 0")
    e = g.node("Max", [e, g.constant(1, "i32", "one")], "e or 1")
    if dtype == "i64":
        e, total = g.cast(e, "i64"), g.cast(total, "i64")
    quotient = g.node("Div", [g.node("Add", [total, halved(g, e, dtype)], "numerator"), e], "S / e")
    if dtype == "i64":
        quotient = g.cast(quotient, "i32")  # at most S
    first = 3 << (last - 2)  # the smallest quotient with the last code
    quotient = g.node("Min", [quotient, g.constant(first, "i32", "last")], "quotient")
    logarithms = ilog2_round(np.maximum(np.arange(first + 1), 1))
    found = lookup(g, quotient, logarithms, "u8", x.shape, "logarithm")
    return g.node("Where", [none, g.constant(last, "u8", "last"), found], "codes")


def weights_times_v(g: OnnxGraph, a: str, weights: Any, v: str, v_zero: int) -> tuple[str, list[tuple[str, int]]]:
    """Emit sum_t weights[a[..., m, t]] * (v[..., t, d] - v_zero). Also returns the weights as u8 tensors with a factor each.

    MatMulInteger takes 8-bit inputs, so 16-bit weights need two products: one of their high bytes and one of their low bytes.
    """
    shape, plain = g.value(a).shape, np.array_equal(weights, np.arange(len(weights)))
    index = "" if plain else g.cast(a, "i32", "index")
    parts: list[tuple[str, int]] = [(a, 1)] if plain else []
    if not plain:
        if weights.max() > 255:
            parts.append((lookup(g, index, weights >> 8, "u8", shape, "high weight"), 256))
        parts.append((lookup(g, index, weights & 255, "u8", shape, "low weight"), 1))
    u8 = g.value(v).dtype == "u8"
    return weighted_sum(g, [(product(g, part, v, 0, v_zero, u8), factor) for part, factor in parts]), parts


def shift_matmul(g: OnnxGraph, op: ShiftMatMul) -> str:
    a, v = g.value(op.a), g.value(op.v)
    last = 2**op.a_bits - 1
    weights = 1 << (last - np.arange(last + 1))
    if op.zero_code:
        weights[last] = 0
    acc, _ = weights_times_v(g, op.a, weights, op.v, op.v_zero)
    row = a.row_sum if a.row_sum is not None else a.channels << a.hi
    reach = magnitude(v.lo, v.hi, op.v_zero, op.v_zero) * row
    return to_codes(g, *requantize_args(g, acc, -reach, reach, op.mult, op.shift, 0), op.y_zero, op.bits)


def attend(g: OnnxGraph, op: Attend) -> str:
    a, v = g.value(op.a), g.value(op.v)
    levels = np.array(op.levels or range(256), np.int64)
    largest = int(levels.max())
    acc, parts = weights_times_v(g, op.a, levels, op.v, op.v_zero)
    ones = g.shared_constant(np.ones((a.channels, 1), np.int64), "u8", f"ones.{a.channels}.u8")
    total = weighted_sum(g, [(g.node("MatMulInteger", [part, ones], "weights"), factor) for part, factor in parts])
    m = round_quotient(g, op.mult * largest, g.cast(total, "i64", "W"), "M")
    p = g.node("Mul", [g.cast(acc, "i64", "wide"), m], "acc M")
    far = magnitude(v.lo, v.hi, op.v_zero, op.v_zero) * (op.mult * largest + a.channels * largest) + int(half(op.shift))
    return to_codes(g, p, -far, far, half(op.shift), op.shift, op.y_zero, op.bits)
