"""Resize an image exactly as OpenCV does: cv2.resize(..., interpolation=cv2.INTER_LINEAR) for uint8 images.

On an axis that is resized from `old` to n pixels, new pixel i lies between the old pixels first[i] and first[i] + 1, whose
weights are before[i] and after[i], in units of 2^-11:

    scale  = 1 / (n / old)                               float64
    at     = (i + 0.5) * scale - 0.5                     float64, the result converted to float32
    first  = floor(at)
    after  = round(2048 * (at - first))                  float32, ties to even
    before = round(2048 * (1 - (at - first)))            float32, ties to even

The result of every single operation is rounded to nearest: a fused multiply-add could give other weights. The weights are
integers that depend only on old and n. Indices outside the image refer to the nearest border pixel. On the horizontal axis,
before = 2048 and after = 0 if first < 0 or first >= old - 1; on the vertical axis the weights stay as they are. Pixels are then
computed in int32:

    sum[y, x]    = before[x] * pixel[y, first[x]] + after[x] * pixel[y, first[x] + 1]
    result[y, x] = ((before[y] * (sum[first[y], x] >> 4) >> 16) + (after[y] * (sum[first[y] + 1, x] >> 4) >> 16) + 2) >> 2

See also: images.py (the earlier rule, with integer positions and one rounding), docs/explanation/detection-arithmetic.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
ONE = 2048  # the unit of the weights is 2^-11
ROWS_AT_ONCE = 64  # bounds the memory of the int32 sums


def resize(pixels: Pixels, height: int, width: int) -> Pixels:
    """Resize by OpenCV's bilinear interpolation, u8 [h, w, C] -> [height, width, C].

    before + after is 2047, 2048 or 2049, and always 2048 for n <= 5461. So a sum is at most 255 * 2049, and the last shift
    gives at most (1020 + 2) >> 2 = 255: nothing saturates.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    last_row, last_column = pixels.shape[0] - 1, pixels.shape[1] - 1
    y, above, below = axis_weights(pixels.shape[0], height)
    x, left, right = axis_weights(pixels.shape[1], width)
    border = (x < 0) | (x >= last_column)
    left[border], right[border] = ONE, 0
    x, x_next = np.clip(x, 0, last_column), np.clip(x + 1, 0, last_column)

    def sums(rows: NDArray[np.int64]) -> NDArray[np.int32]:
        line = pixels[rows]
        total: NDArray[np.int32] = line[:, x] * left[:, None] + line[:, x_next] * right[:, None]
        return total

    out = np.empty((height, width, pixels.shape[2]), np.uint8)
    for start in range(0, height, ROWS_AT_ONCE):
        band = slice(start, start + ROWS_AT_ONCE)
        first, second = (sums(np.clip(rows, 0, last_row)) for rows in (y[band], y[band] + 1))
        quarters = (above[band, None, None] * (first >> 4) >> 16) + (below[band, None, None] * (second >> 4) >> 16)
        out[band] = (quarters + 2) >> 2
    return out


def axis_weights(old: int, new: int) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """Return first, before and after for each new pixel of an axis."""
    scale = 1 / (new / old)
    at = ((np.arange(new) + 0.5) * scale - 0.5).astype(np.float32)
    first = np.floor(at)
    share = at - first
    one = np.float32(ONE)
    before, after = np.rint((np.float32(1) - share) * one), np.rint(share * one)
    return first.astype(np.int64), before.astype(np.int32), after.astype(np.int32)
