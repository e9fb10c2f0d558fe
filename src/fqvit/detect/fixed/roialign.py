"""RoIAlign in integers, from the codes of a map to the codes of a head's input.

A box becomes two small weight matrices, as in float/roialign.py, here with weights rounded once to 2^-15. The number of samples
and their positions are exact: edges are integers, and every position is a fraction with a known denominator.
See also: float/roialign.py (the same in float), native/core/roialign.cpp (bit-exact and fast).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fqvit import _native
from fqvit.detect.boxes import areas
from fqvit.detect.fixed.constants import ALIGN_FRACTION, BOX_FRACTION, Ratio
from fqvit.detect.fixed.exp import Integers
from fqvit.ir.fixed import requantize, round_divide, round_shift

Bytes = NDArray[np.uint8]
WEIGHT_FRACTION = 15  # interpolation weights
STRIP_FRACTION = 7  # sums over rows, before the sum over columns; 7 + 15 = ALIGN_FRACTION


@dataclass(frozen=True)
class AlignParams:
    """Parameters that convert codes of a map to codes of a head's input.

    stride, zero: stride and zero point of the map   ratio: converts sums to codes of the input
    head_zero, last: zero point and largest code of the input
    """

    stride: int
    zero: int
    ratio: Ratio
    head_zero: int
    last: int


Align = Callable[[Bytes, Integers, int, AlignParams], Bytes]


def level_of(boxes: Integers, thresholds: Sequence[int]) -> Integers:
    """Return the index of the map for each box, i64 [n]: how many of the ascending `thresholds` the box's area reaches."""
    return np.searchsorted(np.array(thresholds, np.int64), areas(boxes), side="right").astype(np.int64)


def axis_weights(low: int, high: int, cell: int, bins: int, size: int) -> Integers:
    """Return the weight of each cell in each bin of the interval low..high, i64 [bins, size] in units of 2^-15.

    cell: length of a cell, in the unit of low and high
    A bin has `samples` samples, samples = ceil((high - low) / (bins * cell)). With D = 2 * samples * bins, sample k, counted
    over all bins, is at the cell coordinate
        ((low - cell / 2) * D + (2 * k + 1) * (high - low)) / (cell * D)
    and divides a weight of 1 / samples between the cells before and after it. Samples below -1 or above `size` have weight 0;
    others outside the map use the outermost cell.
    """
    samples = -((low - high) // (bins * cell))
    sums = np.zeros((bins, size), np.int64)
    if samples <= 0 or size == 0:
        return sums
    parts = 2 * samples * bins
    whole = cell * parts
    k = np.arange(samples * bins, dtype=np.int64)
    position = (low - cell // 2) * parts + (2 * k + 1) * (high - low)
    inside = (position >= -whole) & (position <= size * whole)
    position = np.clip(position[inside], 0, (size - 1) * whole)
    bin_, first = k[inside] // samples, position // whole
    toward = position - first * whole
    np.add.at(sums, (bin_, first), whole - toward)
    np.add.at(sums, (bin_, np.minimum(first + 1, size - 1)), toward)
    return np.asarray(round_divide(sums << WEIGHT_FRACTION, whole * samples))


def roi_align(map_: Bytes, boxes: Integers, side: int, params: AlignParams) -> Bytes:
    """Map u8 [h, w, C], boxes i64 [n, 4] -> codes u8 [n, side, side, C]: clamp(requantize(sum) + head_zero).

    This is the reference implementation; native_roi_align is faster.
    """
    codes = requantize(align_sums(map_, boxes, side, params), params.ratio.mult, params.ratio.shift) + params.head_zero
    return np.asarray(codes.clip(0, params.last).astype(np.uint8))


def align_sums(map_: Bytes, boxes: Integers, side: int, params: AlignParams) -> Integers:
    """Return the sums of roi_align, in units of 2^-22 of the map's scale: i64 [n, side, side, C], below 2^31.

    strip = (sum_rows weight * (code - zero) + 2^7) >> 8, at most about 255 * 2^7;   sum = sum_columns weight * strip
    """
    height, width, channels = map_.shape
    cell = params.stride << BOX_FRACTION
    values = map_.astype(np.int64) - params.zero
    rois = np.zeros((len(boxes), side, side, channels), np.int64)
    for n, (x1, y1, x2, y2) in enumerate(boxes.tolist()):
        rows, columns = axis_weights(y1, y2, cell, side, height), axis_weights(x1, x2, cell, side, width)
        used_rows, used_columns = np.flatnonzero(rows.any(0)), np.flatnonzero(columns.any(0))
        part = values[np.ix_(used_rows, used_columns)]
        strips = round_shift(np.tensordot(rows[:, used_rows], part, 1), WEIGHT_FRACTION - STRIP_FRACTION)
        rois[n] = np.einsum("bx,axc->abc", columns[:, used_columns], strips)
    return rois


def native_roi_align(threads: int, isa: str = "") -> Align:
    """Return the compiled roi_align, bit-exact for every number of threads and instruction set. isa: "" selects the best"""

    def align(map_: Bytes, boxes: Integers, side: int, params: AlignParams) -> Bytes:
        cell, ratio = params.stride << BOX_FRACTION, params.ratio
        codes = (params.zero, ratio.mult, ratio.shift, params.head_zero, params.last)
        return _native.roi_align(np.ascontiguousarray(map_), boxes, side, cell, *codes, threads, isa)

    return align


def multiscale_roi_align(
    levels: Sequence[Bytes], boxes: Integers, side: int, thresholds: Sequence[int], params: Sequence[AlignParams], align: Align
) -> Bytes:
    """RoIAlign of each box on the map for its area: levels u8 [h, w, C], boxes i64 [n, 4] -> u8 [n, side, side, C].

    thresholds: areas, as in level_of   params: one per level   align: roi_align or a result of native_roi_align
    """
    chosen = level_of(boxes, thresholds)
    rois = np.zeros((len(boxes), side, side, levels[0].shape[-1]), np.uint8)
    for level, (map_, own) in enumerate(zip(levels, params, strict=True)):
        members = np.flatnonzero(chosen == level)
        rois[members] = align(map_, boxes[members], side, own)
    return rois


assert STRIP_FRACTION + WEIGHT_FRACTION == ALIGN_FRACTION
