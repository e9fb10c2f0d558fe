"""Non-maximum suppression: of boxes that overlap too much, the one with the best score stays. For floats and integers alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.boxes import Numbers

Indices = NDArray[np.intp]
BLOCK = 256
# Which of two lists of boxes overlap too much, [A, 4] x [B, 4] -> [A, B]: `near` of boxes.py or of fixed_boxes.py.
Overlapping = Callable[[Numbers, Numbers], NDArray[np.bool_]]


def by_score(scores: Numbers) -> Indices:
    """Best first; equal scores in their order."""
    return np.argsort(-scores, kind="stable")


def nms(boxes: Numbers, scores: Numbers, overlapping: Overlapping[Numbers]) -> Indices:
    """Numbers of the boxes that stay, best first: a box goes if one that stays before it is `near` it."""
    order = by_score(scores)
    kept = np.zeros(0, np.intp)
    # In blocks, so that thousands of boxes need no matrix of all pairs.
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
    """As suppress, but only boxes of the same group (a class, a level) suppress each other."""
    kept = [np.zeros(0, np.intp)]
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        kept.append(members[nms(boxes[members], scores[members], overlapping)])
    together = np.sort(np.concatenate(kept))
    return together[by_score(scores[together])]
