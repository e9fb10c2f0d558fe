"""Emit Take, Permute and Concat as ONNX nodes. See also: ir/moves.py, which defines these ops."""

from __future__ import annotations

import math

import numpy as np

from fqvit.export.onnx.graph import NUMPY, TYPES, OnnxGraph
from fqvit.ir.elementwise import Depthwise
from fqvit.ir.moves import Concat, Permute, Take


def take(g: OnnxGraph, op: Take | Depthwise) -> str:
    """Emit a Gather of rows, and a Where that fills the rows whose index is -1."""
    x = g.value(op.x)
    rows = g.reshape(op.x, [0, math.prod(x.shape[:-1]), x.channels], "rows")
    index = g.constants[op.index].astype(np.int64)
    clipped = g.shared_constant(np.maximum(index, 0), "i64", f"{op.index}/clipped")
    taken = g.node("Gather", [rows, clipped], "taken", axis=1)
    if index.min() >= 0:
        return taken
    # ONNX Runtime has no Where for u16.
    dtype = "i32" if x.dtype == "u16" else x.dtype
    if dtype != x.dtype:
        taken = g.cast(taken, dtype)
    # The mask has the shape of the index plus a channel axis of length 1. Stored as i32: the file has no bool initializers.
    outside = g.shared_constant((index < 0)[..., None], "i32", f"{op.index}/outside")
    is_outside = g.shared_node("Cast", [outside], f"{op.index}/is outside", to=TYPES["bool"])
    fill = g.constant(g.zero(op.fill, x.channels), dtype, "fill")
    filled = g.node("Where", [is_outside, fill, taken], "filled")
    return filled if dtype == x.dtype else g.cast(filled, x.dtype)


def permute(g: OnnxGraph, op: Permute) -> str:
    """Emit Reshape to the view, Gather of the selected index, Transpose and Reshape, each only if needed."""
    x, shape, view = op.x, g.value(op.x).shape, op.view
    if view != shape:
        x = g.reshape(x, [0, *view])
    left = list(view)
    if op.select is not None:
        axis, index = op.select
        x = g.node("Gather", [x, g.constant(index, "i64", "selected")], "selected", axis=axis + 1)
        del left[axis]
    if op.perm != tuple(range(len(left))):
        x = g.node("Transpose", [x], "transposed", perm=[0, *(axis + 1 for axis in op.perm)])
    moved = tuple(left[axis] for axis in op.perm)
    return g.reshape(x, [0, *op.shape], "shaped") if op.shape and op.shape != moved else x


def concat(g: OnnxGraph, op: Concat) -> str:
    """Emit a Concat of rows. Constants are first repeated for every image of the batch."""
    buffer = next(x for x in op.xs if x in g.values)
    xs = []
    for x in op.xs:
        if x not in g.values:
            array = g.constants[x]
            dtype = next(name for name, kind in NUMPY.items() if array.dtype == kind)
            images = g.node("Shape", [buffer], "images", start=0, end=1)
            size = g.shared_constant(np.array(array.shape, np.int64), "i64", f"shape.{'x'.join(map(str, array.shape))}")
            size = g.node("Concat", [images, size], f"size of {x}", axis=0)
            x = g.node("Expand", [g.shared_constant(array, dtype, x), size], f"{x} of every image")
        xs.append(x)
    return g.node("Concat", xs, "joined", axis=1)
