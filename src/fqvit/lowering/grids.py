"""Which rows of a map the moves of a detector read, as numbers: what of its program depends on the image's size.

A map [h, w, C] is a list of h w rows of C channels, row by row; -1 is a place beyond the edge. No torch here: resize.py makes
programs of other sizes with these where there is none. models/swin.py has the same windows and merges for float models.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int32]


def neighbours(height: int, width: int) -> Rows:
    """[h w, 9]: each place among its eight neighbours, as a 3x3 convolution reads them: from left to right, top to bottom."""
    framed = np.full((height + 2, width + 2), -1, np.int32)
    framed[1:-1, 1:-1] = numbers(height, width)
    shifted = [framed[i : i + height, j : j + width].ravel() for i in range(3) for j in range(3)]
    return np.stack(shifted, -1)


def enlarged(small: tuple[int, int], large: tuple[int, int]) -> Rows:
    """[H, W]: the place of the small map that each place of the large one shows, floor(i small / large) in each axis."""
    rows, columns = (np.arange(b) * a // b for a, b in zip(small, large, strict=True))
    return numbers(*small)[rows][:, columns]


def every_second(height: int, width: int) -> Rows:
    """[ceil(h / 2), ceil(w / 2)]"""
    return np.ascontiguousarray(numbers(height, width)[::2, ::2])


def windows(grid: tuple[int, int], window: int, shift: int) -> Rows:
    """[W, window^2]: the token at each place of each window after a cyclic shift; -1 where the grid was padded."""
    height, width = grid
    padded = np.full([-(-side // window) * window for side in grid], -1, np.int32)
    padded[:height, :width] = numbers(height, width)
    return _cut(np.roll(padded, (-shift, -shift), (0, 1)), window)


def tokens(grid: tuple[int, int], window: int, shift: int) -> Rows:
    """[T]: where windows() put each token."""
    flat = windows(grid, window, shift).ravel()
    home = np.empty(grid[0] * grid[1], np.int32)
    home[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
    return home


def merged(grid: tuple[int, int]) -> Rows:
    """[T / 4, 4]: the four tokens that become one: (0, 0), (1, 0), (0, 1), (1, 1); -1 beyond an odd edge."""
    height, width = grid
    padded = np.full((height + height % 2, width + width % 2), -1, np.int32)
    padded[:height, :width] = numbers(height, width)
    return np.stack([padded[i::2, j::2].ravel() for j in (0, 1) for i in (0, 1)], -1)


def regions(grid: tuple[int, int], window: int, shift: int) -> NDArray[np.uint8]:
    """[W, window^2]: numbers that are equal where two places of a shifted window were neighbours in the image."""
    height, width = (-(-side // window) * window for side in grid)
    wrapped = [np.arange(side) >= side - shift for side in (height, width)]  # rows and columns that came from the other edge
    region = _cut(2 * wrapped[0][:, None] + wrapped[1], window)
    return np.stack([_in_order(window) for window in region]).astype(np.uint8)


def numbered(same: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """[W, T] from which tokens see each other [W, T, T], a partition of every window: its parts in order, from 0."""
    first = same.argmax(-1)  # the first token that each token sees names its region
    return np.stack([np.unique(window, return_inverse=True)[1] for window in first]).astype(np.uint8)


def _in_order(parts: NDArray[np.int32]) -> NDArray[np.intp]:
    """[T] -> the same parts, numbered as they come: `numbered` without a byte for every pair of tokens."""
    _, first, number = np.unique(parts, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number]


def _cut(grid: NDArray[np.int32], window: int) -> Rows:
    height, width = grid.shape
    squares = grid.reshape(height // window, window, width // window, window)
    return squares.transpose(0, 2, 1, 3).reshape(-1, window * window)


def numbers(height: int, width: int) -> Rows:
    return np.arange(height * width, dtype=np.int32).reshape(height, width)
