"""Non-maximum suppression: of boxes that overlap too much, the one with the best score stays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.boxes import Floats, overlaps

Indices = NDArray[np.intp]
BLOCK = 256


def by_score(scores: Floats) -> Indices:
    """Best first; equal scores in their order."""
    return np.argsort(-scores, kind="stable")


def suppress(boxes: Floats, scores: Floats, iou: float) -> Indices:
    """Numbers of the boxes that stay, best first: a box goes if one that stays before it overlaps it by more than `iou`."""
    order = by_score(scores)
    kept = np.zeros(0, np.intp)
    # In blocks, so that thousands of boxes need no matrix of all pairs.
    for start in range(0, len(order), BLOCK):
        block = order[start : start + BLOCK]
        block = block[~(overlaps(boxes[block], boxes[kept]) > iou).any(1)]
        too_near = overlaps(boxes[block], boxes[block]) > iou
        stays = np.ones(len(block), bool)
        for i in range(len(block)):
            if stays[i]:
                stays[i + 1 :] &= ~too_near[i, i + 1 :]
        kept = np.concatenate([kept, block[stays]])
    return kept


def suppress_groups(boxes: Floats, scores: Floats, groups: NDArray[np.int64], iou: float) -> Indices:
    """As suppress, but only boxes of the same group (a class, a level) suppress each other."""
    kept = [np.zeros(0, np.intp)]
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        kept.append(members[suppress(boxes[members], scores[members], iou)])
    together = np.sort(np.concatenate(kept))
    return together[by_score(scores[together])]
