"""Anchors: the boxes that proposals are decoded from, one set per cell of a pyramid level."""

from __future__ import annotations

import numpy as np

from fqvit.detect.boxes import Floats


def anchors(grid: tuple[int, int], stride: int, scale: float, ratios: tuple[float, ...]) -> Floats:
    """Return the anchors [rows * columns * A, 4] of a grid (rows, columns), ordered by row, column and ratio.

    The A anchors of a cell are centred at x = column * stride, y = row * stride. An anchor of ratio r has width
    stride * scale / sqrt(r) and height stride * scale * sqrt(r). Anchors may extend beyond the image.
    """
    root = np.sqrt(np.asarray(ratios, np.float64))
    half = stride * scale / 2 * np.stack([1 / root, root], -1)  # [A, 2]: x, y
    rows, columns = np.arange(grid[0]) * float(stride), np.arange(grid[1]) * float(stride)
    centres = np.stack(np.broadcast_arrays(columns[None, :], rows[:, None]), -1)[:, :, None]
    return np.concatenate([centres - half, centres + half], -1).reshape(-1, 4)
