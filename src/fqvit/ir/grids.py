"""Which rows of a map the moves of a detector read, as numbers: what of its program depends on the image's size.

A map [h, w, C] is a list of h w rows of C channels, row by row; -1 is a place beyond the edge. Neighbour: rules_maps.py.
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


def numbers(height: int, width: int) -> Rows:
    return np.arange(height * width, dtype=np.int32).reshape(height, width)
