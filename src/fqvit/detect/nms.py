"""Non-maximum suppression: of boxes that overlap too much, the one with the best score stays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.boxes import Floats, areas

Indices = NDArray[np.intp]


def by_score(scores: Floats) -> Indices:
    """Best first; equal scores in their order."""
    return np.argsort(-scores, kind="stable")


def suppress(boxes: Floats, scores: Floats, iou: float) -> Indices:
    """Numbers of the boxes that stay, best first: a box goes if one that stays before it overlaps it by more than `iou`."""
    order = by_score(scores)
    x1, y1, x2, y2 = np.ascontiguousarray(boxes[order].T)
    area = areas(boxes[order])
    waiting, kept = np.arange(len(order)), []
    while len(waiting):
        first, rest = waiting[0], waiting[1:]
        kept.append(first)
        width = np.minimum(x2[first], x2[rest]) - np.maximum(x1[first], x1[rest])
        height = np.minimum(y2[first], y2[rest]) - np.maximum(y1[first], y1[rest])
        common = np.maximum(width, 0) * np.maximum(height, 0)
        # Without a division, which boxes without area would spoil.
        waiting = rest[~(common > iou * (area[first] + area[rest] - common))]
    return order[np.array(kept, np.intp)]


def suppress_groups(boxes: Floats, scores: Floats, groups: NDArray[np.int64], iou: float) -> Indices:
    """As suppress, but only boxes of the same group (a class, a level) suppress each other."""
    kept = [np.zeros(0, np.intp)]
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        kept.append(members[suppress(boxes[members], scores[members], iou)])
    together = np.sort(np.concatenate(kept))
    return together[by_score(scores[together])]
