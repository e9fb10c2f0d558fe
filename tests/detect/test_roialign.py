"""Compare float RoIAlign with its definition, sample by sample."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from fqvit.detect.float.roialign import axis_weights, level_of, multiscale_roi_align, roi_align

HEIGHT, WIDTH = 9, 12
BOXES = {
    "inside": (10.0, 12.0, 30.0, 25.0),
    "one cell": (8.0, 8.0, 12.0, 12.0),
    "smaller than a bin": (17.3, 9.1, 17.9, 9.4),
    "the whole map": (0.0, 0.0, 48.0, 36.0),
    "beyond every edge": (-9.0, -9.0, 60.0, 50.0),
    "far outside": (200.0, 200.0, 220.0, 240.0),
    "flat": (5.0, 10.0, 40.0, 10.0),
    "many samples": (-100.0, -80.0, 150.0, 120.0),
}


def slow_sample(map_: NDArray[np.float32], y: float, x: float) -> NDArray[np.float64]:
    height, width, channels = map_.shape
    if y < -1 or y > height or x < -1 or x > width:
        return np.zeros(channels)
    y, x = max(y, 0), max(x, 0)
    low_y, low_x = int(y), int(x)
    if low_y >= height - 1:
        low_y = high_y = height - 1
        y = float(low_y)
    else:
        high_y = low_y + 1
    if low_x >= width - 1:
        low_x = high_x = width - 1
        x = float(low_x)
    else:
        high_x = low_x + 1
    down, right = y - low_y, x - low_x
    top = (1 - right) * map_[low_y, low_x] + right * map_[low_y, high_x]
    bottom = (1 - right) * map_[high_y, low_x] + right * map_[high_y, high_x]
    return np.asarray((1 - down) * top + down * bottom, np.float64)


def slow_roi_align(map_: NDArray[np.float32], box: tuple[float, ...], stride: float, side: int) -> NDArray[np.float64]:
    x1, y1, x2, y2 = (edge / stride - 0.5 for edge in box)
    height, width = (y2 - y1) / side, (x2 - x1) / side
    rows, columns = math.ceil((y2 - y1) / side), math.ceil((x2 - x1) / side)
    out = np.zeros((side, side, map_.shape[2]))
    for i in range(side):
        for j in range(side):
            for a in range(rows):
                for b in range(columns):
                    y, x = y1 + (i + (a + 0.5) / rows) * height, x1 + (j + (b + 0.5) / columns) * width
                    out[i, j] += slow_sample(map_, y, x) / (rows * columns)
    return out


def some_map(seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(HEIGHT, WIDTH, 3)).astype(np.float32)


@pytest.mark.parametrize("side", [2, 7])
@pytest.mark.parametrize("name", BOXES)
def test_roi_features_are_means_of_samples(name: str, side: int) -> None:
    found = roi_align(some_map(), np.array([BOXES[name]]), 4, side)
    assert found.dtype == np.float32
    assert found[0] == pytest.approx(slow_roi_align(some_map(), BOXES[name], 4, side), abs=2e-6)


def test_roi_align_equals_torchvision(torchvision_ops: ModuleType) -> None:
    import torch

    boxes = torch.tensor(list(BOXES.values()))
    expected = torchvision_ops.roi_align(torch.tensor(some_map()).permute(2, 0, 1)[None], [boxes], 7, 0.25, 0, True)
    found = roi_align(some_map(), np.array(list(BOXES.values())), 4, 7)
    assert found == pytest.approx(expected.permute(0, 2, 3, 1).numpy(), abs=2e-6)


def test_weights_of_a_bin_inside_the_map_sum_to_one() -> None:
    weights = axis_weights(np.array([1.2, 3.0]), np.array([7.9, 3.4]), 5, 10)
    assert weights.sum(2) == pytest.approx(np.ones((2, 5)))
    assert axis_weights(np.zeros(0), np.zeros(0), 7, 10).shape == (0, 7, 10)


def test_each_doubling_of_the_side_is_one_level_up() -> None:
    side = np.array([1.0, 55, 111.9, 112, 223.9, 224, 448, 5000])
    boxes = np.stack([np.zeros(8), np.zeros(8), side, side], 1)
    assert level_of(boxes, 56, 4).tolist() == [0, 0, 0, 1, 1, 2, 3, 3]
    assert level_of(np.array([[5.0, 5, 5, 5]]), 56, 4).tolist() == [0], "a box without area uses the first level"


def test_each_box_uses_the_level_for_its_size() -> None:
    levels = [some_map(1), some_map(2)]
    boxes = np.array([[0.0, 0, 20, 20], [0, 0, 40, 40], [3, 3, 9, 9]])
    rois = multiscale_roi_align(levels, boxes, 7, 16.0, (4, 8))
    assert rois[1] == pytest.approx(roi_align(levels[1], boxes[1:2], 8, 7)[0])
    assert rois[[0, 2]] == pytest.approx(roi_align(levels[0], boxes[[0, 2]], 4, 7))
    assert multiscale_roi_align(levels, np.zeros((0, 4)), 7, 16.0, (4, 8)).shape == (0, 7, 7, 3)
