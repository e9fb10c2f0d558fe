"""Emit Multiply, Rotary, Depthwise and Max as ONNX nodes. See also: ir/elementwise.py, which defines these ops."""

from __future__ import annotations

import numpy as np

from fqvit.export.onnx.fixed import python_ints, requantize_args, to_codes
from fqvit.export.onnx.graph import OnnxGraph
from fqvit.export.onnx.moves import take
from fqvit.ir.elementwise import Depthwise, Max, Multiply, Rotary
from fqvit.ir.value import magnitude


def centred(g: OnnxGraph, x: str, zero: int) -> str:
    """Emit x - zero as i32."""
    wide = g.cast(x, "i32", "codes as integers")
    return g.node("Sub", [wide, g.constant(zero, "i32", "zero")], "centred") if zero else wide


def multiply(g: OnnxGraph, op: Multiply) -> str:
    a, b = g.value(op.a), g.value(op.b)
    left, right = centred(g, op.a, op.a_zero), centred(g, op.b, op.b_zero)
    if len(b.shape) < len(a.shape):
        right = g.reshape(right, [0, *(1,) * (len(a.shape) - len(b.shape)), *b.shape], "of every row")
    far = magnitude(a.lo, a.hi, op.a_zero, op.a_zero) * magnitude(b.lo, b.hi, op.b_zero, op.b_zero)
    product = g.node("Mul", [left, right], "acc")
    return to_codes(g, *requantize_args(g, product, -far, far, op.mult, op.shift), op.y_zero, op.bits)


def rotary(g: OnnxGraph, op: Rotary) -> str:
    """Emit x * cosine + partner * sine on [..., T, C / P, P], where P is the period of the channels."""
    x = g.value(op.x)
    table = g.constants[op.part("table")].astype(np.int64)
    period = table.shape[-1]
    parts = g.reshape(centred(g, op.x, op.zero), [0, *x.shape[:-1], x.channels // period, period], "periods")
    partner = g.shared_constant(g.constants[op.partner].astype(np.int64), "i64", f"{op.partner}/index")
    others = g.node("Gather", [parts, partner], "partners", axis=len(x.shape) + 1)
    terms = [
        g.node("Mul", [values, g.constant(table[i][:, None], "i32", name)], f"{name} term")
        for i, (values, name) in enumerate(((parts, "cosine"), (others, "sine")))
    ]
    acc = g.reshape(g.node("Add", terms, "sum"), [0, *x.shape], "acc")
    far = magnitude(x.lo, x.hi, op.zero, op.zero) * int(np.abs(table).sum(0).max())
    return to_codes(g, *requantize_args(g, acc, -far, far, op.mult, op.shift), op.y_zero, op.bits)


def depthwise(g: OnnxGraph, op: Depthwise) -> str:
    """Emit a Gather of the taps and the sum of their products with the weights, as a matrix product with ones."""
    x, y = g.value(op.x), g.value(op.y)
    w, bias = g.constants[op.part("w")].astype(np.int64), g.constants[op.part("bias")].astype(np.int64)
    products = g.node("Mul", [g.cast(take(g, op), "i32", "taps"), g.constant(w, "i32", "w")], "products")
    ones = g.shared_constant(np.ones((1, len(w)), np.int64), "i32", f"ones.1x{len(w)}.i32")
    acc = g.reshape(g.node("MatMul", [ones, products], "sum, with its axis"), [0, *y.shape], "sum")
    lo, hi = np.minimum(w, 0).sum(0) * x.hi, np.maximum(w, 0).sum(0) * x.hi
    mult, shift = g.constants[op.part("mult")], g.constants[op.part("shift")]
    args = requantize_args(g, acc, lo, hi, python_ints(mult), python_ints(shift), bias)
    return to_codes(g, *args, g.zero(op.y_zero, y.channels), op.bits)


def maximum(g: OnnxGraph, op: Max) -> str:
    x = g.value(op.x)
    # ONNX Runtime has no ReduceMax for u16.
    values = g.cast(op.x, "i32") if x.dtype == "u16" else op.x
    axis = len(x.shape) - 1
    axes = g.shared_constant(np.array([axis], np.int64), "i64", f"axes.{axis}")
    most = g.node("ReduceMax", [values, axes], "maximum", keepdims=0)
    return g.cast(most, x.dtype) if x.dtype == "u16" else most
