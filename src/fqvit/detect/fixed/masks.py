"""Paste a box's mask probabilities into the image, in integers.

See also: detect/float/masks.py (the same in float), detect/masks.py (run-length encoding of masks).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.fixed.constants import BOX_FRACTION, MASK_FRACTION
from fqvit.detect.fixed.exp import Integers
from fqvit.ir.fixed import round_divide, round_shift

ONE = 1 << MASK_FRACTION


def _axis(low: int, high: int, first: int, last: int, side: int) -> tuple[Integers, Integers]:
    """Locate pixels first..last - 1 in a mask that has a border of zeros.

    Returns the cell before each pixel and the weight of the next cell in units of 2^-15, i64 [last - first] each.
    position = (pixel + 1/2 - low) * side / (high - low) - 1/2. Numerators are below 2^31 * 2^8 * 2^7 * 2^15 < 2^62.
    """
    if high > low:
        pixels = (np.arange(first, last, dtype=np.int64) << BOX_FRACTION) + (1 << BOX_FRACTION - 1) - low
        position = round_divide(pixels * (side << MASK_FRACTION), high - low) - ONE // 2
    else:  # all pixels of an axis of length 0 show the middle of the mask, as in mmdetection
        position = np.full(last - first, (side - 1) << MASK_FRACTION - 1, np.int64)
    position = np.clip(position, -ONE, side << MASK_FRACTION) + ONE
    before = np.minimum(position >> MASK_FRACTION, side)
    return before, position - (before << MASK_FRACTION)


def paste(probabilities: NDArray[np.int32], box: Integers, height: int, width: int, threshold: int) -> NDArray[np.bool_]:
    """Return the mask [height, width] of a box: True where the interpolated probability is >= `threshold`.

    probabilities: i32 [side, side] in units of 2^-15   box: in units of 1/256 pixel   threshold: in units of 2^-30
    Rows are interpolated and rounded to 2^-15, then columns are interpolated exactly: sums are at most 2^30. Pixels more
    than one pixel outside the box are False and not computed.
    """
    mask = np.zeros((height, width), bool)
    x1, y1, x2, y2 = (int(edge) for edge in box)
    left, right = max((x1 >> BOX_FRACTION) - 1, 0), min(-(-x2 >> BOX_FRACTION) + 1, width)
    top, bottom = max((y1 >> BOX_FRACTION) - 1, 0), min(-(-y2 >> BOX_FRACTION) + 1, height)
    if left < right and top < bottom:
        side = len(probabilities)
        bordered = np.pad(probabilities, 1)
        row, down = _axis(y1, y2, top, bottom, side)
        column, across = (x.astype(np.int32) for x in _axis(x1, x2, left, right, side))
        strips = bordered[row] * (ONE - down)[:, None] + bordered[row + 1] * down[:, None]
        strips = round_shift(strips, MASK_FRACTION).astype(np.int32)
        values = strips[:, column] * (ONE - across) + strips[:, column + 1] * across
        mask[top:bottom, left:right] = values >= threshold
    return mask
