"""Integer boxes: anchors, decoding and IoU thresholds. Boxes are int64 [..., 4], x1, y1, x2, y2 in 1/256 pixel.

Sides of resized images (the network's input) are at most 8192 pixels, so clipped edges are within 0 .. 2^21; sides of anchors
are at most 2^22.
See also: float/boxes.py and float/anchors.py, the same in float.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.boxes import intersection_and_union
from fqvit.detect.fixed.constants import BOX_FRACTION, IOU_FRACTION, OFFSET_FRACTION, DeltaRatios, Ratio
from fqvit.detect.fixed.exp import MANTISSA_FRACTION, Integers, power_of_two
from fqvit.ir.fixed import requantize, round_divide, round_shift

FINE_FRACTION = 16  # decode computes edges in 2^-16 pixel and rounds them once to 1/256 pixel
MAX_PRODUCT = 1 << 61  # largest magnitude of offset times side in decode


def anchors(grid: tuple[int, int], stride: int, halves: tuple[tuple[int, int], ...]) -> Integers:
    """Return the anchors of a grid (rows, columns), i64 [rows * columns * A, 4], in the order of float/anchors.py.

    halves: half the width and half the height of each of the A anchors of a cell
    """
    half = np.array(halves, np.int64)
    step = stride << BOX_FRACTION
    rows, columns = np.arange(grid[0], dtype=np.int64) * step, np.arange(grid[1], dtype=np.int64) * step
    centres = np.stack(np.broadcast_arrays(columns[None, :], rows[:, None]), -1)[:, :, None]
    return np.concatenate([centres - half, centres + half], -1).reshape(-1, 4)


def scaled(codes: NDArray[np.int32], ratio: Ratio) -> Integers:
    """Convert a network's output to another unit: requantize(codes). |codes| <= 2^31 and mult < 2^31, so products fit int64."""
    return np.asarray(requantize(codes.astype(np.int64), ratio.mult, ratio.shift))


def decode(boxes: Integers, deltas: NDArray[np.int32], ratios: DeltaRatios, log_limit: int, size: tuple[int, int]) -> Integers:
    """Apply deltas to boxes and clip them to an image of size (height, width) in pixels: [..., 4] x [..., 4] -> [..., 4].

    centre' = centre + offset * side;  half = side * 2^log / 2, |log| <= log_limit;  edges = centre' -+ half, rounded once
    offset is in 2^-24, log in 2^-27, centre' and half in 2^-16 pixel. The error is at most 1/128 pixel, compared with real
    arithmetic on the same integers.
    """
    sides = boxes[..., 2:] - boxes[..., :2]
    offsets = np.stack([scaled(deltas[..., i], ratios[i]) for i in (0, 1)], -1)
    logs = np.stack([scaled(deltas[..., i], ratios[i]) for i in (2, 3)], -1)
    # A product of 2^61 is 2^29 pixels: the limit only affects boxes far outside of every image.
    farthest = MAX_PRODUCT // np.maximum(sides, 1)
    distance = round_shift(np.clip(offsets, -farthest, farthest) * sides, BOX_FRACTION + OFFSET_FRACTION - FINE_FRACTION)
    mantissa, exponent = power_of_two(np.clip(logs, -log_limit, log_limit))
    # side < 2^23 and mantissa < 2^31; log_limit <= 8 · 2^27 keeps the shift within 15..31.
    half = round_shift(sides * mantissa, MANTISSA_FRACTION + 1 + BOX_FRACTION - FINE_FRACTION - exponent)
    centre = (boxes[..., :2] + boxes[..., 2:]) * (1 << FINE_FRACTION - BOX_FRACTION - 1) + distance
    edges = round_shift(np.concatenate([centre - half, centre + half], -1), FINE_FRACTION - BOX_FRACTION)
    height, width = (side << BOX_FRACTION for side in size)
    return np.asarray(np.clip(edges, 0, np.array([width, height, width, height], np.int64)))


def iou_above(iou: int) -> Callable[[Integers, Integers], NDArray[np.bool_]]:
    """Return the function that tells nms.py for all pairs whether their IoU is above iou / 2^16, [A, 4] x [B, 4] -> [A, B].

    Unions are at most 2^43, so products stay below 2^60.
    """

    def overlapping(a: Integers, b: Integers) -> NDArray[np.bool_]:
        common, union = intersection_and_union(a, b)
        return np.asarray(common << IOU_FRACTION > iou * union)

    return overlapping


def rescaled(boxes: Integers, old: tuple[int, int], new: tuple[int, int]) -> Integers:
    """Scale boxes from an image of size `old` (height, width) to size `new` and round.

    Edges <= 2^21; sides of the original image (`new`) < 2^31.
    """
    (old_height, old_width), (height, width) = old, new
    numerator, denominator = np.array([width, height] * 2, np.int64), np.array([old_width, old_height] * 2, np.int64)
    return np.asarray(round_divide(boxes * numerator, denominator))
