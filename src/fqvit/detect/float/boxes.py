"""Float boxes: IoU, encoding, decoding and clipping. Boxes are float64 [..., 4], x1, y1, x2, y2 in pixels.

See also: fixed/boxes.py, the same in integers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.boxes import LARGEST_LOG_RATIO, Floats, intersection_and_union


def pairwise_iou(a: Floats, b: Floats) -> Floats:
    """Intersection over union of all pairs, [A, 4] x [B, 4] -> [A, B]; 0 if both boxes have no area."""
    common, union = intersection_and_union(a, b)
    result: Floats = np.divide(common, union, out=np.zeros_like(common), where=union > 0)
    return result


def iou_above(iou: float) -> Callable[[Floats, Floats], NDArray[np.bool_]]:
    """Return the function that tells nms.py for all pairs whether their IoU is above `iou`, [A, 4] x [B, 4] -> [A, B]."""
    return lambda a, b: pairwise_iou(a, b) > iou


def encode(boxes: Floats, targets: Floats, stds: tuple[float, ...]) -> Floats:
    """Return the deltas [..., 4] that decode turns into `targets`.

    xy: (target centre - centre) / size / std;  wh: log(target size / size) / std
    """
    size, centre = boxes[..., 2:] - boxes[..., :2], (boxes[..., :2] + boxes[..., 2:]) / 2
    target_size, target_centre = targets[..., 2:] - targets[..., :2], (targets[..., :2] + targets[..., 2:]) / 2
    deltas = np.concatenate([(target_centre - centre) / size, np.log(target_size / size)], -1)
    scaled: Floats = deltas / np.asarray(stds)
    return scaled


def decode(boxes: Floats, deltas: Floats, stds: tuple[float, ...], height: float, width: float) -> Floats:
    """Apply deltas to boxes and clip them to an image: [..., 4] x [..., 4] -> [..., 4].

    centre' = centre + delta_xy * std * size;  size' = size * exp(clip(delta_wh * std, +-log(1000 / 16)))
    """
    scaled = deltas * np.asarray(stds)
    size, centre = boxes[..., 2:] - boxes[..., :2], (boxes[..., :2] + boxes[..., 2:]) / 2
    centre = centre + scaled[..., :2] * size
    size = size * np.exp(np.clip(scaled[..., 2:], -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
    return clip(np.concatenate([centre - size / 2, centre + size / 2], -1), height, width)


def clip(boxes: Floats, height: float, width: float) -> Floats:
    """Clip x to 0..width and y to 0..height."""
    return np.clip(boxes, 0, np.array([width, height, width, height], np.float64))
