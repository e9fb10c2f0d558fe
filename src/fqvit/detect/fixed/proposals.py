"""Turn integer network outputs into boxes: proposals, refinement from stage to stage, detections.

See also: float/proposals.py, the same in float.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.fixed.boxes import anchors, decode, iou_above, scaled
from fqvit.detect.fixed.constants import DetectorConstants
from fqvit.detect.fixed.exp import Integers, softmax
from fqvit.detect.nms import by_score, grouped_nms

Codes = NDArray[np.int32]


@dataclass(frozen=True)
class IntegerDetections:
    """Detected boxes, best first.

    boxes: i64 [n, 4] in units of 1/256 pixel   scores: i64 [n] in units of 2^-24   labels: i64 [n], class indices from 0
    """

    boxes: Integers
    scores: Integers
    labels: Integers


def propose(objectness: Sequence[Codes], deltas: Sequence[Codes], size: tuple[int, int], c: DetectorConstants) -> Integers:
    """Select the proposals of an image: i64 [n, 4], best first, at most c.proposals.

    objectness: logits i32 [h, w, A] of each level   deltas: i32 [h, w, 4 * A]   size: height and width without padding
    """
    found: list[tuple[Integers, Integers, Integers]] = []
    for level, (logits, level_deltas) in enumerate(zip(objectness, deltas, strict=True)):
        start = anchors((logits.shape[0], logits.shape[1]), c.strides[level], c.anchors[level])
        scores = scaled(logits.ravel(), c.objectness[level])
        best = by_score(scores)[: c.proposals_a_level]
        boxes = decode(start[best], level_deltas.reshape(-1, 4)[best], c.deltas[level], c.log_limit, size)
        found.append((boxes, scores[best], np.full(len(best), level, np.int64)))
    boxes, scores, levels = (np.concatenate(parts) for parts in zip(*found, strict=True))
    solid = np.flatnonzero((boxes[:, 2:] > boxes[:, :2]).all(1))  # drops boxes that clipping left without area
    boxes, scores, levels = boxes[solid], scores[solid], levels[solid]
    kept = grouped_nms(boxes, scores, levels, iou_above(c.proposal_iou))
    return boxes[kept[: c.proposals]]


def refine(boxes: Integers, logits: Codes, deltas: Codes, stage: int, size: tuple[int, int], c: DetectorConstants) -> Integers:
    """Refine boxes for the next stage, i64 [n, 4]: apply the deltas of each box's most probable class, not counting background.

    logits: i32 [n, classes + 1]   deltas: i32 [n, 4] if class-agnostic, else [n, 4 * classes]
    """
    by_class = deltas.reshape(len(boxes), -1, 4)
    label = logits[:, :-1].argmax(1) if by_class.shape[1] > 1 else np.zeros(len(boxes), np.intp)
    return decode(boxes, by_class[np.arange(len(boxes)), label], c.box_deltas[stage], c.log_limit, size)


def select_detections(
    boxes: Integers, logits: Integers, deltas: Codes, size: tuple[int, int], c: DetectorConstants
) -> IntegerDetections:
    """Select the detections of an image, best first, at most c.detections.

    Candidates are all pairs of box and class with a score above c.score; non-maximum suppression (NMS) then runs within each
    class.
    boxes: i64 [n, 4], of the last stage   logits: i64 [n, classes + 1], base-2 in units of 2^-27, mean of all stages
    deltas: i32, as in refine
    """
    scores = softmax(logits)[:, :-1]
    by_class = deltas.reshape(len(boxes), -1, 4)
    box, label = np.nonzero(scores > c.score)
    chosen = decode(boxes[box], by_class[box, label if by_class.shape[1] > 1 else 0], c.box_deltas[-1], c.log_limit, size)
    kept = grouped_nms(chosen, scores[box, label], label, iou_above(c.iou))[: c.detections]
    return IntegerDetections(chosen[kept], scores[box, label][kept], label[kept])
