"""Anchors: the boxes that proposals start from, around the corners of a level's cells."""

from __future__ import annotations

import numpy as np

from fqvit.detect.boxes import Floats


def anchors(grid: tuple[int, int], stride: int, scale: float, ratios: tuple[float, ...]) -> Floats:
    """[rows columns A, 4], row by row, all ratios of a place together; centres at (column, row) stride.

    A ratio r gives width stride scale / sqrt(r) and height stride scale sqrt(r). Anchors may lie outside the image.
    """
    root = np.sqrt(np.asarray(ratios, np.float64))
    half = stride * scale / 2 * np.stack([1 / root, root], -1)  # [A, 2]: x, y
    rows, columns = np.arange(grid[0]) * float(stride), np.arange(grid[1]) * float(stride)
    centres = np.stack(np.broadcast_arrays(columns[None, :], rows[:, None]), -1)[:, :, None]
    return np.concatenate([centres - half, centres + half], -1).reshape(-1, 4)
