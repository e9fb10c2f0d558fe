"""Match the detections of a program with those of its float detector, and summarize how far they agree. Needs no torch.

See also: compare_detector.py (sites of the networks), coco.py (average precision against annotations).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from fqvit.detect.boxes import Floats, intersection_and_union
from fqvit.detect.masks import Runs, from_runs
from fqvit.detect.results import Result

MATCH_IOU = 0.5  # smallest IoU (intersection over union) of the boxes of a pair
CLOSE_IOU = 0.75
SCORES = (0.0, 0.3, 0.5)  # smallest scores for which detections are counted


@dataclass(frozen=True)
class Pair:
    """A detection of both detectors. numbers: indices of the float and of the integer detection"""

    numbers: tuple[int, int]
    scores: tuple[float, float]
    box_iou: float
    mask_iou: float


@dataclass(frozen=True)
class Match:
    """The detections of one image. float_only, integer_only: indices of detections without a partner"""

    float_scores: Floats
    integer_scores: Floats
    pairs: list[Pair]
    float_only: list[int]
    integer_only: list[int]


class Agreement(msgspec.Struct, frozen=True):
    """How far the detections of a program agree with those of the float detector, over all images.

    score: detections with at least this score are counted   float_count, integer_count: number of detections
    matched: float detections with an integer partner of the same class and IoU >= 0.5   close: those with IoU >= 0.75
    missing: float detections without a partner   extra: integer detections without a partner
    box_iou, mask_iou: mean over the matched detections; None if there are none, as in the following fields
    score_difference, largest_score_difference: mean and maximum of |integer score - float score|
    score_bias: mean of integer score - float score
    """

    score: float
    float_count: int
    integer_count: int
    matched: int
    close: int
    missing: int
    extra: int
    box_iou: float | None
    mask_iou: float | None
    score_difference: float | None
    largest_score_difference: float | None
    score_bias: float | None


def match(floats: Sequence[Result], integers: Sequence[Result]) -> Match:
    """Match the detections of one image, those with the best float score first.

    A float detection is paired with the integer detection of the same class that has the highest IoU of boxes, at least 0.5,
    and no partner yet.
    """
    overlaps = _ious(_boxes(floats), _boxes(integers))
    kinds = np.equal.outer(_kinds(floats), _kinds(integers))
    overlaps = np.where(kinds, overlaps, 0.0)
    pairs: list[Pair] = []
    for i in sorted(range(len(floats)), key=lambda i: -floats[i]["score"]):
        j = int(overlaps[i].argmax()) if overlaps.shape[1] else -1
        if j < 0 or overlaps[i, j] < MATCH_IOU:
            continue
        masks = floats[i]["segmentation"], integers[j]["segmentation"]
        scores = floats[i]["score"], integers[j]["score"]
        pairs.append(Pair((i, j), scores, float(overlaps[i, j]), mask_iou(*masks)))
        overlaps[:, j] = 0.0
    taken = [{pair.numbers[side] for pair in pairs} for side in (0, 1)]
    alone = [[i for i in range(len(own)) if i not in used] for own, used in zip((floats, integers), taken, strict=True)]
    return Match(_scores(floats), _scores(integers), pairs, *alone)


def agreement(matches: Iterable[Match], score: float) -> Agreement:
    """Summarize the matches of all images. score: pairs count if their float score is at least this"""
    seen = list(matches)
    pairs = [pair for one in seen for pair in one.pairs if pair.scores[0] >= score]
    differences = np.array([pair.scores[1] - pair.scores[0] for pair in pairs])
    return Agreement(
        score=score,
        float_count=sum(int((one.float_scores >= score).sum()) for one in seen),
        integer_count=sum(int((one.integer_scores >= score).sum()) for one in seen),
        matched=len(pairs),
        close=sum(pair.box_iou >= CLOSE_IOU for pair in pairs),
        missing=sum(int((one.float_scores[one.float_only] >= score).sum()) for one in seen),
        extra=sum(int((one.integer_scores[one.integer_only] >= score).sum()) for one in seen),
        box_iou=_mean([pair.box_iou for pair in pairs]),
        mask_iou=_mean([pair.mask_iou for pair in pairs]),
        score_difference=_mean(np.abs(differences)),
        largest_score_difference=float(np.abs(differences).max()) if pairs else None,
        score_bias=_mean(differences),
    )


def agreements(matches: Sequence[Match], lowest: float) -> list[Agreement]:
    """Summarize the matches for each minimum score. lowest: the detector's own threshold, for which all detections count"""
    return [agreement(matches, score) for score in dict.fromkeys(max(score, lowest) for score in SCORES)]


def mask_iou(a: Runs, b: Runs) -> float:
    """Return the IoU of two masks of the same image; 1 if both are empty."""
    first, second = from_runs(a), from_runs(b)
    union = int((first | second).sum())
    return int((first & second).sum()) / union if union else 1.0


def _ious(a: Floats, b: Floats) -> Floats:
    common, union = intersection_and_union(a, b)
    return np.asarray(common / np.maximum(union, 1e-9))


def _boxes(results: Sequence[Result]) -> Floats:
    """Return the boxes as x1, y1, x2, y2."""
    boxes = np.array([result["bbox"] for result in results], np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    return boxes


def _kinds(results: Sequence[Result]) -> NDArray[np.int64]:
    return np.array([result["category_id"] for result in results], np.int64)


def _scores(results: Sequence[Result]) -> Floats:
    return np.array([result["score"] for result in results], np.float64)


def _mean(values: Sequence[float] | Floats) -> float | None:
    return float(np.mean(values)) if len(values) else None
