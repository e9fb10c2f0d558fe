"""Lowering rules of detectors' leaf modules (models/maps.py).

Detectors need no ops beyond those of classifiers: a convolution gathers nine rows per location and applies a linear op,
resizing a map gathers rows, and a ReLU is the clamp of the codes that the preceding layer writes.
See also: ../grids.py (row indices).
"""

from __future__ import annotations

import math

from fqvit.errors import FqvitError
from fqvit.ir.moves import Permute, Take
from fqvit.lowering import grids
from fqvit.lowering.emit import LoweredValue
from fqvit.lowering.rules.base import Lowering, Rule
from fqvit.lowering.rules.layers import emit_linear
from fqvit.models import maps
from fqvit.models.layers import Leaf
from fqvit.quant.weights import weight_rows


def lower_conv2d(leaf: maps.Conv2d, low: Lowering) -> LoweredValue:
    """Gather the 3x3 neighbourhood of each location, then apply a linear op: [h, w, C] -> [h, w, 9 * C] -> [h, w, O]."""
    (x,), emit = low.inputs, low.emit
    height, width, channels = x.shape
    q, rows, squares = x.codes(), f"{low.site}.rows", f"{low.site}.squares"
    index = emit.shared("rows", grids.neighbours(height, width))
    emit.op(Take(y=rows, x=x.buffer, index=index, fill=emit.zero(q)))
    low.move(rows, "neighbours")
    low.move(squares, "grid")
    shape = (height, width, 9 * channels)
    emit.op(Permute(y=squares, x=rows, view=shape, perm=(0, 1, 2)))
    return emit_linear(low, LoweredValue(squares, shape, q.tiled(9)), *weight_rows(leaf))


def lower_deconv(leaf: maps.Deconv, low: Lowering) -> LoweredValue:
    """Compute the 2x2 outputs of each location with one linear op, then permute.

    [h, w, C] -> [h, w, 4 * O] -> [2 * h, 2 * w, O]
    """
    (x,) = low.inputs
    height, width, _ = x.shape
    low.codes()  # required: accumulators would have different units at the four locations
    four = emit_linear(low, x, *weight_rows(leaf), name=f"{low.site}.four")
    outputs = four.shape[-1] // 4
    shape = (2 * height, 2 * width, outputs)
    view = (height, width, 2, 2, outputs)
    low.emit.op(Permute(y=low.site, x=four.buffer, view=view, perm=(0, 2, 1, 3, 4), shape=shape))
    return LoweredValue(low.site, shape, four.q)


def lower_relu(leaf: maps.Relu, low: Lowering) -> LoweredValue:
    """Emit nothing: the preceding layer writes the codes of this ReLU (quant/fuse_relu.py)."""
    (x,) = low.inputs
    if x.buffer != low.name:
        raise FqvitError(
            f"{low.name}: cannot fuse this ReLU, expected it to be the only reader of a convolution or linear layer."
        )
    return x


def lower_grid(leaf: maps.Grid, low: Lowering) -> LoweredValue:
    """Reshape [h * w, C] -> [h, w, C]."""
    (x,) = low.inputs
    low.move(low.name, "grid")
    return _reshape(low, x, (*leaf.grid, x.shape[-1]), 1)


def lower_flatten(leaf: maps.Flatten, low: Lowering) -> LoweredValue:
    """Reshape [h, w, C] -> [h * w * C]."""
    (x,) = low.inputs
    return _reshape(low, x, (math.prod(x.shape),), math.prod(x.shape[:-1]))


def _reshape(low: Lowering, x: LoweredValue, shape: tuple[int, ...], times: int) -> LoweredValue:
    """Emit a reshape. times: how many of the input's rows become one row of the output."""
    low.emit.op(Permute(y=low.name, x=x.buffer, view=shape, perm=tuple(range(len(shape)))))
    return LoweredValue(low.name, shape, x.codes().tiled(times))


def lower_upsample(leaf: maps.Upsample, low: Lowering) -> LoweredValue:
    """Upsample the first input to the size of the second by nearest-neighbour interpolation."""
    small, large = low.inputs
    (height, width, _), (rows, columns, _) = small.shape, large.shape
    low.move(low.name, "enlarged", of=large.buffer)
    return _take_rows(low, small, grids.enlarged((height, width), (rows, columns)))


def lower_subsample(leaf: maps.Subsample, low: Lowering) -> LoweredValue:
    """Keep every second location of every second row."""
    (x,) = low.inputs
    height, width, _ = x.shape
    low.move(low.name, "second")
    return _take_rows(low, x, grids.every_second(height, width))


def _take_rows(low: Lowering, x: LoweredValue, index: grids.Rows) -> LoweredValue:
    """Emit a gather of rows: index [h, w] -> [h, w, C]."""
    low.emit.op(Take(y=low.name, x=x.buffer, index=low.emit.shared("rows", index)))
    return LoweredValue(low.name, (*index.shape, x.shape[-1]), x.codes())


RULES: dict[type[Leaf], Rule] = {
    maps.Conv2d: lower_conv2d,
    maps.Deconv: lower_deconv,
    maps.Relu: lower_relu,
    maps.Grid: lower_grid,
    maps.Flatten: lower_flatten,
    maps.Upsample: lower_upsample,
    maps.Subsample: lower_subsample,
}
