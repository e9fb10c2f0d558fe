"""Compare two classifiers on the same images: the difference between their accuracies with a confidence interval.

Both predict the same class for most images, so the difference is far more precise than either accuracy.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

NORMAL_95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution


class Pair(msgspec.Struct, frozen=True):
    """The second classifier's accuracy minus the first's, in percentage points, with its 95 % confidence interval low..high.

    lost: images that only the first classifies correctly; gained: images that only the second classifies correctly
    """

    images: int
    lost: int
    gained: int
    difference: float
    low: float
    high: float


def pair(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> Pair:
    """Compare two classifiers. first, second: bool [images], whether each image was classified correctly."""
    images, lost, gained = len(first), int((first & ~second).sum()), int((second & ~first).sum())
    low, high = score_interval(images, gained, lost)
    return Pair(images, lost, gained, 100 * (gained - lost) / images, 100 * low, 100 * high)


def score_interval(images: int, gained: int, lost: int, z: float = NORMAL_95) -> tuple[float, float]:
    """Return the score interval of a difference of paired proportions (Tango 1998): all d with |S(d)| <= z, where

    S(d) = (gained - lost - n * d) / sqrt(n * (2 * q + d * (1 - d))),  n = images, and q is the most likely share of `lost`
    images given d: the larger root of
        2 * n * q^2 + ((2 * n - gained + lost) * d - gained - lost) * q - lost * d * (1 - d) = 0.

    Unlike the normal interval, it has a nonzero width even if nothing was gained or lost, and it stays within -1..1.
    """
    n, estimate = images, (gained - lost) / images

    def score(d: float) -> float:
        b = (2 * n - gained + lost) * d - gained - lost
        c = -lost * d * (1 - d)
        q = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
        variance = n * (2 * q + d * (1 - d))
        return math.copysign(math.inf, estimate - d) if variance <= 0 else (gained - lost - n * d) / math.sqrt(variance)

    def bound(inside: float, outside: float) -> float:
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if abs(score(middle)) <= z else (inside, middle)
        return inside

    return bound(estimate, -1.0), bound(estimate, 1.0)
