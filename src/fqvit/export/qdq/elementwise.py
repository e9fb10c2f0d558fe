"""Emit Multiply, Rotary, Depthwise and Max as nodes of a QDQ ONNX graph.

As in writer.py, every tensor is f = (integer - zero) * scale.
"""

from __future__ import annotations

import numpy as np

from fqvit.export.qdq.graph import Floats, QdqGraph, QdqParams, QuantizedTensor
from fqvit.export.qdq.scales import per_channel
from fqvit.ir.elementwise import Max, Multiply, Rotary
from fqvit.ir.value import Constant

Shape = tuple[int, ...]


def _centred(graph: QdqGraph, x: QuantizedTensor, zero: int, y: str) -> str:
    """Emit (code - zero) * scale."""
    return graph.scaled(x.name, np.ones(1), (x.zero - zero) * x.scale, y)


def multiply(
    graph: QdqGraph, op: Multiply, a: QuantizedTensor, b: QuantizedTensor, params: QdqParams, shape: Shape
) -> QuantizedTensor:
    left, right = _centred(graph, a, op.a_zero, f"{op.y}.a"), _centred(graph, b, op.b_zero, f"{op.y}.b")
    if len(b.shape) < len(a.shape):
        right = graph.reshape(right, (*(1,) * (len(a.shape) - len(b.shape)), *b.shape), f"{op.y}.of_every_row")
    product = graph.node("Mul", [left, right], f"{op.y}.product")
    gain = op.mult / 2.0**op.shift * params.scale / (a.scale * b.scale)
    name = graph.scaled(product, gain, (op.y_zero - params.zero) * params.scale, op.y)
    return graph.quantized(name, op.y, shape, params)


def rotary(
    graph: QdqGraph, op: Rotary, x: QuantizedTensor, table: Constant, partner: Constant, params: QdqParams, shape: Shape
) -> QuantizedTensor:
    """Emit x * cosine + partner * sine on [..., T, C / P, P], P: period. x: one scale and one zero point per tensor"""
    period = len(partner)
    centred = _centred(graph, x, op.zero, f"{op.y}.x")
    parts = graph.reshape(centred, (*shape[:-1], shape[-1] // period, period), f"{op.y}.periods")
    index = graph.constant(f"{op.partner}.index", partner.astype(np.int64))
    others = graph.node("Gather", [parts, index], f"{op.y}.partners", axis=len(shape) + 1)
    values = table[:, :, None].astype(np.float64) * op.mult / 2.0**op.shift / x.scale
    scale = params.scale if len(params.scale) == 1 else params.scale.reshape(-1, period)
    terms = [
        graph.node("Mul", [tensor, graph.float32(f"{op.y}.{name}", values[i] * scale)], f"{op.y}.{name}.term")
        for i, (tensor, name) in enumerate(((parts, "cosine"), (others, "sine")))
    ]
    total = graph.reshape(graph.node("Add", terms, f"{op.y}.sum"), shape, f"{op.y}.turned")
    name = graph.scaled(total, np.ones(1), (op.y_zero - params.zero) * params.scale, op.y)
    return graph.quantized(name, op.y, shape, params)


def depthwise(
    graph: QdqGraph, y: str, taps: str, w: Constant, gain: Floats, offset: Floats, params: QdqParams, shape: Shape
) -> QuantizedTensor:
    """Emit the codes of (sum_k taps[..., k, c] * w[k, c] * gain[c]) + offset[c], with 8-bit weights and per-channel scales."""
    channels, middle = shape[-1], graph.profile.middle
    dtype = np.uint8 if middle else np.int8
    codes = graph.constant(f"{y}.w", (w.astype(np.int16) + middle).astype(dtype))
    smallest = np.finfo(np.float32).tiny  # scales must be positive, even if the multiplier is 0
    scales = graph.float32(f"{y}.w.scale", np.maximum(per_channel(np.atleast_1d(gain), channels), smallest))
    zeros = graph.constant(f"{y}.w.zero", np.full(channels, middle, dtype))
    weight = graph.node("DequantizeLinear", [codes, scales, zeros], f"{y}.w.values", axis=1)
    products = graph.node("Mul", [taps, weight], f"{y}.products")
    axis = len(shape)
    axes = graph.constant(f"axis.{axis}", np.array([axis], np.int64))
    total = graph.node("ReduceSum", [products, axes], f"{y}.product", keepdims=0)
    total = graph.node("Add", [total, graph.float32(f"{y}.bias", offset)], f"{y}.sum")
    return graph.quantized(total, y, shape, params)


def maximum(graph: QdqGraph, op: Max, x: QuantizedTensor, shape: Shape) -> QuantizedTensor:
    """Emit ReduceMax: scales are positive, so the largest code has the largest value."""
    axis = len(shape)
    axes = graph.constant(f"axis.{axis}", np.array([axis], np.int64))
    return QuantizedTensor(graph.node("ReduceMax", [x.name, axes], op.y, keepdims=0), shape, x.scale, x.zero)
