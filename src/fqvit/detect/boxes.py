"""Areas and intersections of boxes [..., 4] (x1, y1, x2, y2), for floats and integers alike."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Numbers = TypeVar("Numbers", NDArray[np.float64], NDArray[np.int64])

# Decoding limits the ratio of sizes, exp(delta), to 16/1000 .. 1000/16.
LARGEST_LOG_RATIO = abs(math.log(16 / 1000))


def areas(boxes: Numbers) -> Numbers:
    """Return the area of each box, [..., 4] -> [...]; 0 if x2 < x1 or y2 < y1."""
    sides = np.maximum(boxes[..., 2:] - boxes[..., :2], 0)
    product: Numbers = sides[..., 0] * sides[..., 1]
    return product


def intersection_and_union(a: Numbers, b: Numbers) -> tuple[Numbers, Numbers]:
    """Return the areas of intersection and union of all pairs of boxes, [A, 4] x [B, 4] -> [A, B] each."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    sides = np.maximum(high - low, 0)
    common = sides[..., 0] * sides[..., 1]
    return common, areas(a)[:, None] + areas(b)[None, :] - common
