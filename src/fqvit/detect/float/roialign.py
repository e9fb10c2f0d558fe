"""RoIAlign in float: features of a fixed size for each box, as means of bilinearly interpolated samples of a map.

Interpolation is linear and separable, and so is the mean over the samples of a bin. A box thus becomes two small matrices, rows
[side, height] and columns [side, width], and its features are rows @ map @ columns^T. Training uses the same matrices
(axis_weights) with torch.
See also: fixed/roialign.py, the same in integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.boxes import Floats, areas

Floats32 = NDArray[np.float32]


def level_of(boxes: Floats, finest: float, levels: int) -> NDArray[np.int64]:
    """Return the level of each box, [n]: floor(log2(side / finest + 1e-6)) clipped to 0..levels - 1, side = sqrt(area)."""
    side = np.sqrt(areas(boxes))
    return np.clip(np.floor(np.log2(side / finest + 1e-6)), 0, levels - 1).astype(np.int64)


def axis_weights(low: Floats, high: Floats, bins: int, size: int) -> Floats32:
    """Return the weight of each cell in each bin of the intervals low..high, [n, bins, size].

    low, high: in cells; cell i is centred at i + 0.5

    A bin has ceil((high - low) / bins) evenly spaced samples, each interpolated between two cells. Samples more than one cell
    beyond the centre of an outermost cell have weight 0; others outside the map use the outermost cell.
    """
    weights = np.zeros((len(low), bins, size), np.float32)
    if size == 0 or len(low) == 0:
        return weights
    length = high - low
    samples = np.ceil(length / bins).astype(np.int64)
    box, part = np.arange(len(low))[:, None], np.arange(bins)[None, :]
    for i in range(int(samples.max())):
        # In the coordinates of `position`, cell i is centred at i, hence - 0.5.
        position = low[:, None] - 0.5 + (part + (i + 0.5) / np.maximum(samples, 1)[:, None]) * (length[:, None] / bins)
        counts = (i < samples[:, None]) & (position >= -1) & (position <= size)
        position = np.clip(position, 0, size - 1)
        first = np.minimum(position.astype(np.int64), size - 1)
        share = (counts / np.maximum(samples, 1)[:, None]).astype(np.float32)
        toward = (position - first).astype(np.float32)
        # For one i, each (box, part) occurs once, so += with index arrays loses no term.
        weights[box, part, first] += share * (1 - toward)
        weights[box, part, np.minimum(first + 1, size - 1)] += share * toward
    return weights


def roi_align(map_: Floats32, boxes: Floats, stride: float, side: int) -> Floats32:
    """Map [h, w, C], boxes [n, 4] in pixels -> features [n, side, side, C]."""
    height, width, channels = map_.shape
    rows = axis_weights(boxes[:, 1] / stride, boxes[:, 3] / stride, side, height)
    columns = axis_weights(boxes[:, 0] / stride, boxes[:, 2] / stride, side, width)
    rois = np.zeros((len(boxes), side, side, channels), np.float32)
    for n, (row, column) in enumerate(zip(rows, columns, strict=True)):
        used_rows, used_columns = np.flatnonzero(row.any(0)), np.flatnonzero(column.any(0))
        if len(used_rows) == 0 or len(used_columns) == 0:
            continue
        top, bottom = used_rows[0], used_rows[-1] + 1
        left, right = used_columns[0], used_columns[-1] + 1
        crop = map_[top:bottom, left:right].reshape(bottom - top, -1)
        strips = (row[:, top:bottom] @ crop).reshape(side, right - left, channels)
        rois[n] = column[:, left:right] @ strips
    return rois


def multiscale_roi_align(
    levels: Sequence[Floats32], boxes: Floats, side: int, finest: float, strides: Sequence[int]
) -> Floats32:
    """RoIAlign of each box on the level for its size: levels [h, w, C], boxes [n, 4] -> [n, side, side, C]."""
    chosen = level_of(boxes, finest, len(levels))
    rois = np.zeros((len(boxes), side, side, levels[0].shape[-1]), np.float32)
    for level, map_ in enumerate(levels):
        members = np.flatnonzero(chosen == level)
        rois[members] = roi_align(map_, boxes[members], strides[level], side)
    return rois
