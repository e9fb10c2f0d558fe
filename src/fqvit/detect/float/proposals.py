"""Turn float network outputs into boxes: proposals, refinement from stage to stage, detections.

See also: fixed/proposals.py, the same in integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.boxes import Floats
from fqvit.detect.detections import Detections
from fqvit.detect.float.anchors import anchors
from fqvit.detect.float.boxes import decode, iou_above
from fqvit.detect.nms import by_score, grouped_nms
from fqvit.detect.settings import DetectSettings

UNIT_STDS = (1.0, 1.0, 1.0, 1.0)


def propose(objectness: Sequence[Floats], deltas: Sequence[Floats], size: tuple[int, int], s: DetectSettings) -> Floats:
    """Select the proposals of an image: [n, 4], best first, at most s.proposals.

    objectness: logits [h, w, A] of each level   deltas: [h, w, 4 * A]   size: height and width of the image without padding
    Logits are compared directly: the sigmoid would not change their order.
    """
    found: list[tuple[Floats, Floats, NDArray[np.int64]]] = []
    for level, (logits, level_deltas, stride) in enumerate(zip(objectness, deltas, s.strides, strict=True)):
        start = anchors((logits.shape[0], logits.shape[1]), stride, s.anchor_scale, s.anchor_ratios)
        scores = logits.astype(np.float64).ravel()
        best = by_score(scores)[: s.proposals_a_level]
        boxes = decode(start[best], level_deltas.astype(np.float64).reshape(-1, 4)[best], UNIT_STDS, *size)
        found.append((boxes, scores[best], np.full(len(best), level)))
    boxes, scores, levels = (np.concatenate(parts) for parts in zip(*found, strict=True))
    # Drop boxes that clipping left without area; the comparison drops NaN, too.
    solid = np.flatnonzero((boxes[:, 2:] > boxes[:, :2]).all(1))
    boxes, scores, levels = boxes[solid], scores[solid], levels[solid]
    kept = grouped_nms(boxes, scores, levels, iou_above(s.proposal_iou))
    return boxes[kept[: s.proposals]]


def refine(boxes: Floats, logits: Floats, deltas: Floats, stds: tuple[float, ...], size: tuple[int, int]) -> Floats:
    """Refine boxes for the next stage, [n, 4]: apply the deltas of each box's most probable class, not counting background.

    logits: [n, classes + 1]   deltas: [n, 4] if class-agnostic, else [n, 4 * classes]
    """
    by_class = deltas.astype(np.float64).reshape(len(boxes), -1, 4)
    label = logits[:, :-1].argmax(1) if by_class.shape[1] > 1 else np.zeros(len(boxes), np.intp)
    return decode(boxes, by_class[np.arange(len(boxes)), label], stds, *size)


def softmax(logits: Floats) -> Floats:
    """Softmax over the last axis."""
    power = np.exp(logits - logits.max(-1, keepdims=True, initial=-np.inf))
    return np.asarray(power / power.sum(-1, keepdims=True))


def sigmoid(logits: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.clip(logits, -500, 500))))


def select_detections(
    boxes: Floats, logits: Floats, deltas: Floats, stds: tuple[float, ...], size: tuple[int, int], s: DetectSettings
) -> Detections:
    """Select the detections of an image, best first, at most s.detections.

    Candidates are all pairs of box and class with a score above s.score; non-maximum suppression (NMS) then runs within each
    class.
    boxes: [n, 4], of the last stage   logits: [n, classes + 1], mean of all stages   deltas: as in refine
    """
    scores = softmax(logits.astype(np.float64))[:, :-1]
    by_class = deltas.astype(np.float64).reshape(len(boxes), -1, 4)
    decoded = decode(boxes[:, None], by_class, stds, *size)
    box, label = np.nonzero(scores > s.score)
    chosen = decoded[box, label if decoded.shape[1] > 1 else 0]
    kept = grouped_nms(chosen, scores[box, label], label, iou_above(s.iou))[: s.detections]
    return Detections(chosen[kept], scores[box, label][kept], label[kept])
