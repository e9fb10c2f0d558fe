"""Compute the row indices of Take ops on feature maps: the size-dependent parts of a detector's program.

A map [h, w, C] is a list of h * w rows of C channels, in raster order; index -1 is a location outside the map. Imports no
torch: detect/resize.py rebuilds programs without it. See also: models/swin.py (the same windows for float models).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int32]


def neighbours(height: int, width: int) -> Rows:
    """Return [h * w, 9]: the 3x3 neighbourhood of each location in raster order, as a convolution reads it."""
    framed = np.full((height + 2, width + 2), -1, np.int32)
    framed[1:-1, 1:-1] = numbers(height, width)
    shifted = [framed[i : i + height, j : j + width].ravel() for i in range(3) for j in range(3)]
    return np.stack(shifted, -1)


def enlarged(small: tuple[int, int], large: tuple[int, int]) -> Rows:
    """Return [H, W]: nearest-neighbour upsampling; location i of an axis reads location floor(i * small / large)."""
    rows, columns = (np.arange(b) * a // b for a, b in zip(small, large, strict=True))
    return numbers(*small)[rows][:, columns]


def every_second(height: int, width: int) -> Rows:
    """Return [ceil(h / 2), ceil(w / 2)]: every second location of every second row."""
    return np.ascontiguousarray(numbers(height, width)[::2, ::2])


def windows(grid: tuple[int, int], window: int, shift: int) -> Rows:
    """Return [W, window^2]: the tokens of each window after padding the grid and a cyclic shift; -1 for padding."""
    height, width = grid
    padded = np.full([-(-side // window) * window for side in grid], -1, np.int32)
    padded[:height, :width] = numbers(height, width)
    return _cut(np.roll(padded, (-shift, -shift), (0, 1)), window)


def tokens(grid: tuple[int, int], window: int, shift: int) -> Rows:
    """Return [T]: the inverse of windows(): the position of each token in the flattened windows."""
    flat = windows(grid, window, shift).ravel()
    positions = np.empty(grid[0] * grid[1], np.int32)
    positions[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
    return positions


def merged(grid: tuple[int, int]) -> Rows:
    """Return [ceil(h / 2) * ceil(w / 2), 4]: the four tokens to merge, (0, 0), (1, 0), (0, 1), (1, 1); -1 for padding."""
    height, width = grid
    padded = np.full((height + height % 2, width + width % 2), -1, np.int32)
    padded[:height, :width] = numbers(height, width)
    return np.stack([padded[i::2, j::2].ravel() for j in (0, 1) for i in (0, 1)], -1)


def regions(grid: tuple[int, int], window: int, shift: int) -> NDArray[np.uint8]:
    """Return [W, window^2]: region numbers; tokens of a shifted window attend to each other if their numbers are equal."""
    height, width = (-(-side // window) * window for side in grid)
    wrapped = [np.arange(side) >= side - shift for side in (height, width)]  # rows and columns that wrapped around
    region = _cut(2 * wrapped[0][:, None] + wrapped[1], window)
    return np.stack([_in_order(window) for window in region]).astype(np.uint8)


def numbered(same: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return [W, T]: region numbers in order of first appearance, from a mask [W, T, T] that partitions every window."""
    first = same.argmax(-1)  # a region is identified by its first token
    return np.stack([np.unique(window, return_inverse=True)[1] for window in first]).astype(np.uint8)


def _in_order(parts: NDArray[np.int32]) -> NDArray[np.intp]:
    """Renumber regions [T] in order of first appearance, like `numbered` but without a mask of all pairs."""
    _, first, number = np.unique(parts, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number]


def _cut(grid: NDArray[np.int32], window: int) -> Rows:
    """Split a grid [h, w] into windows [W, window^2]."""
    height, width = grid.shape
    split = grid.reshape(height // window, window, width // window, window)
    return split.transpose(0, 2, 1, 3).reshape(-1, window * window)


def numbers(height: int, width: int) -> Rows:
    """Return [h, w]: the row index of each location."""
    return np.arange(height * width, dtype=np.int32).reshape(height, width)
