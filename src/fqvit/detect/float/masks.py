"""Paste a box's mask probabilities into the image, in float.

See also: fixed/masks.py, the same in integers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.boxes import Floats


def _axis(low: float, high: float, first: int, last: int, side: int) -> Floats:
    """Return the interpolation weights [last - first, side] of the mask's cells at the centres of pixels first..last - 1.

    Outside its cells the mask is 0.
    """
    pixels = np.arange(first, last) + 0.5
    # If the box has length 0 along the axis, all pixels show the middle of the mask, as in mmdetection.
    position = (pixels - low) / (high - low) * side - 0.5 if high > low else np.full(len(pixels), side / 2 - 0.5)
    weights: Floats = np.maximum(1 - np.abs(position[:, None] - np.arange(side)), 0)
    return weights


def paste(probabilities: Floats, box: Floats, height: int, width: int, threshold: float) -> NDArray[np.bool_]:
    """Probabilities [side, side], box in pixels -> mask [height, width]: True if the interpolated probability >= `threshold`.

    Pixels more than one pixel outside the box are False and not computed.
    """
    mask = np.zeros((height, width), bool)
    x1, y1, x2, y2 = (float(edge) for edge in box)
    left, right = max(int(np.floor(x1)) - 1, 0), min(int(np.ceil(x2)) + 1, width)
    top, bottom = max(int(np.floor(y1)) - 1, 0), min(int(np.ceil(y2)) + 1, height)
    if left < right and top < bottom:
        side = len(probabilities)
        values = _axis(y1, y2, top, bottom, side) @ probabilities @ _axis(x1, x2, left, right, side).T
        mask[top:bottom, left:right] = values >= threshold
    return mask
