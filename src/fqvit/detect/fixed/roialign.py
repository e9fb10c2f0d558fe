"""RoIAlign from codes to codes. Neighbours: roialign.py (the same in float), native/roialign.cpp (the same bits, fast).

A box is two small matrices of weights, as in roialign.py, here rounded to 2^-15 once a bin and cell. Places of samples and
their number are exact: edges are integers, and everything is a fraction of known denominator.
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
WEIGHT_FRACTION = 15  # bits of an axis' weights
STRIP_FRACTION = 7  # bits that rows keep before columns are added; 7 + 15 is ALIGN_FRACTION


@dataclass(frozen=True)
class AlignParams:
    """From a map to a head's codes. zero: of the map   ratio: of sums in 2^-22 steps   head_zero, last: the head's codes"""

    stride: int
    zero: int
    ratio: Ratio
    head_zero: int
    last: int


Align = Callable[[Bytes, Integers, int, AlignParams], Bytes]


def level_of(boxes: Integers, least: Sequence[int]) -> Integers:
    """i64 [n]: how many of the ascending least areas a box reaches."""
    return np.searchsorted(np.array(least, np.int64), areas(boxes), side="right").astype(np.int64)


def axis_weights(low: int, high: int, cell: int, bins: int, size: int) -> Integers:
    """i64 [bins, size] in 2^-15: what each cell of an axis gives to each bin of low..high. cell: its length in units of these.

    samples = ceil((high - low) / (bins cell)) a bin. With D = 2 samples bins, sample k of all of them lies, in cell numbers, at
        ((low - cell / 2) D + (2 k + 1) (high - low)) / (cell D)
    and gives its cell and the next one shares of 1 / samples. Beyond -1 or `size` it counts as 0, nearer as the outermost cell.
    """
    samples = -((low - high) // (bins * cell))
    sums = np.zeros((bins, size), np.int64)
    if samples <= 0 or size == 0:
        return sums
    parts = 2 * samples * bins
    whole = cell * parts
    k = np.arange(samples * bins, dtype=np.int64)
    place = (low - cell // 2) * parts + (2 * k + 1) * (high - low)
    inside = (place >= -whole) & (place <= size * whole)
    place = np.clip(place[inside], 0, (size - 1) * whole)
    bin_, first = k[inside] // samples, place // whole
    toward = place - first * whole
    np.add.at(sums, (bin_, first), whole - toward)
    np.add.at(sums, (bin_, np.minimum(first + 1, size - 1)), toward)
    return np.asarray(round_divide(sums << WEIGHT_FRACTION, whole * samples))


def roi_align(map_: Bytes, boxes: Integers, side: int, params: AlignParams) -> Bytes:
    """u8 [h, w, C] and boxes i64 [n, 4] -> codes u8 [n, side, side, C]: clamp(requantize(sum) + head_zero). Slow."""
    codes = requantize(align_sums(map_, boxes, side, params), params.ratio.mult, params.ratio.shift) + params.head_zero
    return np.asarray(codes.clip(0, params.last).astype(np.uint8))


def align_sums(map_: Bytes, boxes: Integers, side: int, params: AlignParams) -> Integers:
    """As roi_align, in 2^-22 steps of the map: i64 [n, side, side, C], below 2^31.

    strip = (sum_rows weight (code - zero) + 2^7) >> 8: at most about 255 2^7;   sum = sum_columns weight strip
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
    """roi_align on the compiled side; the same bits with every number of threads and every instruction set ("" is the best)."""

    def align(map_: Bytes, boxes: Integers, side: int, params: AlignParams) -> Bytes:
        cell, ratio = params.stride << BOX_FRACTION, params.ratio
        codes = (params.zero, ratio.mult, ratio.shift, params.head_zero, params.last)
        return _native.roi_align(np.ascontiguousarray(map_), boxes, side, cell, *codes, threads, isa)

    return align


def multiscale_roi_align(
    levels: Sequence[Bytes], boxes: Integers, side: int, least: Sequence[int], params: Sequence[AlignParams], align: Align
) -> Bytes:
    """Each box from the map of its size: levels of u8 [h, w, C], boxes i64 [n, 4] -> u8 [n, side, side, C].

    least: of level_of   params: one a level   align: roi_align, or the native one
    """
    chosen = level_of(boxes, least)
    rois = np.zeros((len(boxes), side, side, levels[0].shape[-1]), np.uint8)
    for level, (map_, own) in enumerate(zip(levels, params, strict=True)):
        members = np.flatnonzero(chosen == level)
        rois[members] = align(map_, boxes[members], side, own)
    return rois


assert STRIP_FRACTION + WEIGHT_FRACTION == ALIGN_FRACTION
