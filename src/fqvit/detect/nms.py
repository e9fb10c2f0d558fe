"""Non-maximum suppression (NMS) of boxes, for floats and integers alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.boxes import Numbers

Indices = NDArray[np.intp]
BLOCK = 256
# Which pairs of boxes overlap too much, [A, 4] x [B, 4] -> [A, B]: iou_above of float/boxes.py or of fixed/boxes.py.
Overlapping = Callable[[Numbers, Numbers], NDArray[np.bool_]]


def by_score(scores: Numbers) -> Indices:
    """Return indices by descending score; equal scores keep their order."""
    return np.argsort(-scores, kind="stable")


def nms(boxes: Numbers, scores: Numbers, overlapping: Overlapping[Numbers]) -> Indices:
    """Return the indices of the boxes to keep, best first. A box is dropped if it overlaps a better box that is kept."""
    order = by_score(scores)
    kept = np.zeros(0, np.intp)
    # In blocks: thousands of boxes would make a large matrix of pairs.
    for start in range(0, len(order), BLOCK):
        block = order[start : start + BLOCK]
        block = block[~overlapping(boxes[block], boxes[kept]).any(1)]
        overlaps = overlapping(boxes[block], boxes[block])
        stays = np.ones(len(block), bool)
        for i in range(len(block)):
            if stays[i]:
                stays[i + 1 :] &= ~overlaps[i, i + 1 :]
        kept = np.concatenate([kept, block[stays]])
    return kept


def grouped_nms(boxes: Numbers, scores: Numbers, groups: NDArray[np.int64], overlapping: Overlapping[Numbers]) -> Indices:
    """Like nms, but only boxes of the same group (a class or a pyramid level) suppress each other."""
    kept = [np.zeros(0, np.intp)]
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        kept.append(members[nms(boxes[members], scores[members], overlapping)])
    together = np.sort(np.concatenate(kept))
    return together[by_score(scores[together])]
