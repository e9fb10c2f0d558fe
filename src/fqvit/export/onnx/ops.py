"""Emit Lookup, Linear, LayerNorm, Add and Mean as ONNX nodes. See also: ir/ops.py, which defines these ops."""

from __future__ import annotations

import math

import numpy as np

from fqvit.export.onnx.fixed import (
    I31,
    common_shift_factor,
    floor_shift,
    half,
    halved,
    highest,
    isqrt,
    lookup,
    lowest,
    python_ints,
    requantize_args,
    row_sum,
    to_codes,
    type_for,
)
from fqvit.export.onnx.graph import OnnxGraph
from fqvit.ir.kit import kit
from fqvit.ir.ops import Add, LayerNorm, Linear, Lookup, Mean
from fqvit.ir.value import Constant, magnitude


def lookup_op(g: OnnxGraph, op: Lookup) -> str:
    """Emit a table lookup. With alpha, one table per value of alpha is stored, so that a single lookup gives the code."""
    x, y = g.value(op.x), g.value(op.y)
    table, index = g.constants[op.part("table")], g.cast(op.x, "i32", "index")
    if op.alpha is not None:
        n = len(table)
        alphas = g.constants[op.alpha].astype(np.int64)
        every_alpha = np.arange(len(op.y_zero))
        # The reference op computes the tables. Its input has one channel per value of alpha, and every code in each channel.
        codes = {op.x: np.repeat(np.arange(n)[:, None], len(every_alpha), 1), op.alpha: every_alpha, op.part("table"): table}
        table = op.run(kit("numpy"), codes.__getitem__).T.reshape(-1)
        index = g.node("Add", [index, g.constant(alphas * n, "i32", "first entry")], "position")
    return lookup(g, index, table, y.dtype, x.shape)


def byte_parts(g: OnnxGraph, x: str) -> list[tuple[str, int]]:
    """Return codes as u8 tensors with a factor each: x itself (1), or its high byte (256) and its low byte (1)."""
    value = g.value(x)
    if value.dtype == "u8":
        return [(x, 1)]
    if value.hi < 256:
        return [(g.cast(x, "u8", "bytes"), 1)]
    wide, base = g.cast(x, "i32"), g.constant(256, "i32", "base")
    high = g.node("Div", [wide, base], "high")
    low = g.node("Sub", [wide, g.node("Mul", [high, base], "without low")], "low")
    return [(g.cast(high, "u8", "high byte"), 256), (g.cast(low, "u8", "low byte"), 1)]


def weighted_sum(g: OnnxGraph, sums: list[tuple[str, int]]) -> str:
    """Emit the sum of factor * x as i32."""
    terms = [x if factor == 1 else g.node("Mul", [x, g.constant(factor, "i32", "base")], "high part") for x, factor in sums]
    return terms[0] if len(terms) == 1 else g.node("Add", terms, "acc")


def linear(g: OnnxGraph, op: Linear) -> str:
    """Emit MatMulInteger of u8 x u8 with weights w + 128: in ONNX Runtime, u8 x i8 saturates on CPUs without VNNI."""
    x, y = g.value(op.x), g.value(op.y)
    w, bias = g.constants[op.part("w")].astype(np.int64), g.constants[op.part("bias")].astype(np.int64)
    weights = g.shared_constant((w + 128).T, "u8", op.part("w"))
    middle = g.constant(128, "u8", "middle")
    sums = [(g.node("MatMulInteger", [part, weights, "", middle], "sum"), factor) for part, factor in byte_parts(g, op.x)]
    acc = weighted_sum(g, sums)
    if op.out == "acc":
        return g.node("Add", [acc, g.shared_constant(bias, "i32", op.part("bias"))], "acc") if np.any(bias) else acc
    lo, hi = np.minimum(w, 0).sum(1) * x.hi, np.maximum(w, 0).sum(1) * x.hi
    mult, shift = g.constants[op.part("mult")], g.constants[op.part("shift")]
    shift_args = requantize_args(g, acc, lo, hi, mult, shift, bias)
    if op.out == "i32":
        return floor_shift(g, *shift_args)
    return to_codes(g, *shift_args, g.zero(op.y_zero, y.channels), op.bits)


def lifted(g: OnnxGraph, x: str, zero: Constant, scale: Constant, dtype: str) -> str:
    """Emit (x - zero) * scale as i32 or i64."""
    v = g.cast(x, dtype, "codes as integers")
    if np.any(zero):
        v = g.node("Sub", [v, g.constant(zero, dtype, "zero")], "centred")
    return g.node("Mul", [v, g.constant(scale, dtype, "scale")], "lifted") if np.any(scale != 1) else v


def layernorm(g: OnnxGraph, op: LayerNorm) -> str:
    x = g.value(op.x)
    channels, zero, scale = x.channels, g.zero(op.zero, x.channels), g.alpha(op.alpha)
    largest_t = math.isqrt(channels) + 1
    if op.center and op.alpha is None and zero.ndim == 0 and (channels * x.hi) ** 2 < 1 << 61:
        zero = np.array(0, np.int64)  # D and C * v - M1 do not depend on a zero point that all channels share
    largest = magnitude(x.lo, x.hi, lowest(zero), highest(zero)) * highest(scale)

    # Comments and labels use the notation of ir/ops.py, and u = C * v - M1 (C * v without centering). The variable d holds D,
    # and the variable root holds what ir/ops.py calls d: isqrt(D * 4^j).
    dtype = "i32" if 2 * channels * largest < I31 else "i64"
    v = lifted(g, op.x, zero, scale, dtype)
    u = g.node("Mul", [v, g.constant(channels, dtype, "C")], "C v")
    squared = "i32" if channels * largest**2 < I31 else "i64"
    w = v if dtype == squared else g.cast(v, squared)
    m2 = row_sum(g, g.node("Mul", [w, w], "v squared"), channels, squared, "M2")
    m2 = m2 if squared == "i64" else g.cast(m2, "i64")
    d = g.node("Mul", [m2, g.constant(channels, "i64", "C")], "C M2")
    if op.center:
        m1 = row_sum(g, v, channels, dtype, "M1")
        u = g.node("Sub", [u, m1], "C v - M1")
        m1 = m1 if dtype == "i64" else g.cast(m1, "i64")
        d = g.node("Sub", [d, g.node("Mul", [m1, m1], "M1 squared")], "D without epsilon")
    d = g.node("Add", [d, g.constant(op.epsilon, "i64", "epsilon")], "D")
    by_4, by_2 = normaliser(g, d, op.epsilon, (channels * largest) ** 2 + op.epsilon, op.fraction)
    root = isqrt(g, g.node("Mul", [d, by_4], "D 4^j"))

    # t + K = (u * 2^(fraction + j) + d / 2 + K * d) / d. Div truncates; K makes the numerator positive, so Div rounds down.
    # Nothing overflows: verify proves |t| <= K < 2^31, d < 2^31 and |u * 2^(fraction + j)| < K * d.
    k = largest_t << op.fraction
    above = g.node("Add", [halved(g, root, "i64"), g.node("Mul", [root, g.constant(k, "i64", "K")], "K d")], "d / 2 + K d")
    wide = u if dtype == "i64" else g.cast(u, "i64")
    numerator = g.node("Add", [g.node("Mul", [wide, by_2], "numerator"), above], "numerator above 0")
    t = g.node("Div", [numerator, root], "t + K")
    gain, offset = python_ints(g.constants[op.part("affine")])
    reach, add = highest(abs(gain)) * k, (offset << op.b_shift) + half(op.shift)
    far = reach + highest(abs(add))
    if far + reach < 1 << 61:
        add = add - gain * k
    else:
        t = g.node("Sub", [t, g.constant(k, "i64", "K")], "t")
    p = g.node("Mul", [t, g.constant(gain, "i64", "gain")], "t g")
    return to_codes(g, p, -far, far, add, op.shift, 0, op.bits)


def normaliser(g: OnnxGraph, d: str, least: int, most: int, fraction: int) -> tuple[str, str]:
    """Emit 4^j and 2^(fraction + j) for the largest j with d * 4^j < 2^62. This j is the number of k in 1..30 with d < 4^k.

    d: i64, least <= d <= most
    """
    powers = [4**k for k in range(1, 31)]
    always = sum(most < power for power in powers)
    limits = [power for power in powers if least < power <= most] or [least]  # avoid an empty list: d is never below `least`
    below = g.node("Less", [d, g.constant(limits, "i64", "powers of 4")], "is below")
    count = row_sum(g, g.cast(below, "i64", "below"), len(limits), "i64", "j")
    table = 1 << np.arange(always, always + len(limits) + 1, dtype=np.int64)
    by_4, by_2 = (g.constant(values, "i64", "powers") for values in (table**2, table << fraction))
    return g.node("Gather", [by_4, count], "4^j"), g.node("Gather", [by_2, count], "2^(fraction+j)")


def add(g: OnnxGraph, op: Add) -> str:
    """Emit the codes of x1 * m1 + x2 * m2 + constant, where m = mult * 2^alpha.

    The constant contains the zero points, the terms that are constants, and 2^(shift - 1) for rounding.
    """
    y = g.value(op.y)
    shift = python_ints(op.shift) if op.y_alpha is None else python_ints(op.shift + g.constants[op.y_alpha].astype(np.int64))
    mults = [
        python_ints(term.mult if isinstance(term.mult, int) else g.constants[term.mult]) * python_ints(g.alpha(term.alpha))
        for term in op.terms
    ]
    zeros = [python_ints(g.zero(term.zero, y.channels)) for term in op.terms]
    ends = []  # bounds of |x| and of |x - zero|
    for term, zero in zip(op.terms, zeros):
        x = python_ints([g.value(term.x).lo, g.value(term.x).hi] if term.x in g.values else g.constants[term.x])
        ends.append((max(abs(lowest(x)), abs(highest(x))), magnitude(lowest(x), highest(x), lowest(zero), highest(zero))))
    reach = sum(far * mult for (_, far), mult in zip(ends, mults)) + half(shift)
    factor = common_shift_factor(shift, reach + sum(mults))
    if highest(factor) > 1 or lowest(shift) == highest(shift):
        mults, shift, reach = [mult * factor for mult in mults], highest(shift), reach * factor
    folded = all((plain + far) * highest(mult) < 1 << 60 for (plain, far), mult in zip(ends, mults))
    constant, products = half(shift), []
    for term, mult, zero in zip(op.terms, mults, zeros):
        if term.x not in g.values:
            constant = constant + (python_ints(g.constants[term.x]) - zero) * mult
            continue
        x = g.cast(term.x, "i64", "wide")
        if folded:
            constant = constant - zero * mult
        elif np.any(python_ints(zero)):
            x = g.node("Sub", [x, g.constant(zero, "i64", "zero")], "centred")
        products.append(g.node("Mul", [x, g.constant(mult, "i64", "mult")], "product"))
    p = products[0] if len(products) == 1 else g.node("Add", products, "sum")
    far = highest(reach)
    return to_codes(g, p, -far, far, constant, shift, g.zero(op.y_zero, y.channels), op.bits)


def mean(g: OnnxGraph, op: Mean) -> str:
    """Emit the sum over rows as a matrix product with ones. Zero points and alpha are part of the requantization after it."""
    x = g.value(op.x)
    *outer, tokens, _ = x.shape
    rows = tokens - op.skip
    dtype = type_for(0, rows * x.hi)
    ones = g.shared_constant((np.arange(tokens) >= op.skip)[None], dtype, f"rows.{op.skip}.{tokens}.{dtype}")
    acc = g.node("MatMul", [ones, g.cast(op.x, dtype)], "sum, with its axis")
    acc = g.reshape(acc, [0, *outer, x.channels], "sum")
    scale = python_ints(g.alpha(op.alpha))
    offset = -rows * python_ints(g.zero(op.zero, x.channels))
    return to_codes(g, *requantize_args(g, acc, 0, rows * x.hi, scale * op.mult, op.shift, offset), op.y_zero, op.bits)
