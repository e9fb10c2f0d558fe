"""Compare boxes, anchors and non-maximum suppression (NMS) with slow definitions that compute one number at a time."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from fqvit.detect.boxes import areas
from fqvit.detect.float.anchors import anchors
from fqvit.detect.float.boxes import clip, decode, encode, iou_above, pairwise_iou
from fqvit.detect.nms import BLOCK, grouped_nms, nms

STDS = (0.1, 0.1, 0.2, 0.2)


def some_boxes(count: int, seed: int = 0, side: float = 100.0) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    start = rng.uniform(0, side, (count, 2))
    return np.concatenate([start, start + rng.uniform(1, side / 2, (count, 2))], 1)


def slow_iou(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    width = max(min(a[2], b[2]) - max(a[0], b[0]), 0)
    height = max(min(a[3], b[3]) - max(a[1], b[1]), 0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
    return float(width * height / union) if union > 0 else 0.0


def test_pairwise_iou_equals_the_iou_of_each_pair() -> None:
    a, b = some_boxes(7), some_boxes(5, seed=1)
    assert pairwise_iou(a, b) == pytest.approx(np.array([[slow_iou(x, y) for y in b] for x in a]))


def test_boxes_without_area_overlap_nothing() -> None:
    empty = np.array([[3.0, 3.0, 3.0, 8.0]])
    assert areas(empty)[0] == 0
    assert pairwise_iou(empty, empty)[0, 0] == 0
    assert areas(np.array([5.0, 5.0, 1.0, 1.0])) == 0, "x2 < x1"


def test_decoding_inverts_encoding() -> None:
    boxes, targets = some_boxes(20), some_boxes(20, seed=2)
    assert decode(boxes, encode(boxes, targets, STDS), STDS, 1000, 1000) == pytest.approx(targets)


def test_decoding_follows_its_formula() -> None:
    box, delta = np.array([10.0, 20.0, 30.0, 60.0]), np.array([1.0, -2.0, 0.5, 1.0])
    x, y = 20 + 1.0 * 0.1 * 20, 40 - 2.0 * 0.1 * 40
    w, h = 20 * math.exp(0.5 * 0.2), 40 * math.exp(1.0 * 0.2)
    assert decode(box, delta, STDS, 500, 500) == pytest.approx([x - w / 2, y - h / 2, x + w / 2, y + h / 2])


def test_decoding_limits_the_ratio_of_sizes() -> None:
    grown = decode(np.array([500.0, 500.0, 510.0, 510.0]), np.array([0, 0, 99.0, -99.0]), (1, 1, 1, 1), 2000, 2000)
    assert grown[2] - grown[0] == pytest.approx(10 * 1000 / 16)
    assert grown[3] - grown[1] == pytest.approx(10 * 16 / 1000)


def test_clipping_limits_edges_to_width_and_height() -> None:
    assert clip(np.array([[-5.0, -6.0, 700.0, 500.0]]), 480, 640).tolist() == [[0, 0, 640, 480]]


def test_anchors_are_ordered_by_cell_and_ratio() -> None:
    found = anchors((2, 3), 8, 4.0, (0.5, 1.0, 2.0))
    assert found.shape == (2 * 3 * 3, 4)
    first = (1 * 3 + 2) * 3  # index of the first anchor at row 1, column 2
    assert found[first + 1].tolist() == [16 - 16, 8 - 16, 16 + 16, 8 + 16]
    wide, tall = found[first], found[first + 2]
    assert (wide[3] - wide[1]) / (wide[2] - wide[0]) == pytest.approx(0.5)
    assert (tall[3] - tall[1]) / (tall[2] - tall[0]) == pytest.approx(2)
    assert areas(found) == pytest.approx(np.full(18, 32.0 * 32.0))


def slow_suppress(boxes: NDArray[np.float64], scores: NDArray[np.float64], iou: float) -> list[int]:
    waiting, kept = sorted(range(len(boxes)), key=lambda i: (-scores[i], i)), []
    while waiting:
        kept.append(waiting.pop(0))
        waiting = [i for i in waiting if slow_iou(boxes[kept[-1]], boxes[i]) <= iou]
    return kept


@pytest.mark.parametrize("count", [0, 1, 30, 2 * BLOCK + 17])
@pytest.mark.parametrize("iou", [0.2, 0.5, 0.7])
def test_nms_equals_the_greedy_definition(count: int, iou: float) -> None:
    boxes = some_boxes(count, side=250.0)
    scores = np.random.default_rng(3).integers(0, 40, count) / 40.0  # with ties
    assert nms(boxes, scores, iou_above(iou)).tolist() == slow_suppress(boxes, scores, iou)


def test_nms_matches_torchvision(torchvision_ops: ModuleType) -> None:
    import torch

    boxes, scores = some_boxes(400, side=250.0), np.random.default_rng(5).permutation(400) / 400
    expected = torchvision_ops.nms(torch.tensor(boxes), torch.tensor(scores), 0.5)
    assert nms(boxes, scores, iou_above(0.5)).tolist() == expected.tolist()


def test_a_box_with_an_iou_of_exactly_the_threshold_is_kept() -> None:
    boxes = np.array([[0.0, 0, 10, 10], [0, 0, 10, 5]])
    assert nms(boxes, np.array([0.9, 0.8]), iou_above(0.5)).tolist() == [0, 1]
    assert nms(boxes, np.array([0.9, 0.8]), iou_above(0.49)).tolist() == [0]


def test_groups_do_not_suppress_each_other_and_kept_boxes_are_sorted_by_score() -> None:
    boxes, scores = some_boxes(60), np.random.default_rng(4).uniform(size=60)
    groups = np.arange(60) % 3
    kept = grouped_nms(boxes, scores, groups, iou_above(0.3))
    expected = [np.flatnonzero(groups == g)[slow_suppress(boxes[groups == g], scores[groups == g], 0.3)] for g in range(3)]
    assert sorted(kept.tolist()) == sorted(np.concatenate(expected).tolist())
    assert (np.diff(scores[kept]) <= 0).all()
    assert grouped_nms(np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64), iou_above(0.5)).tolist() == []
