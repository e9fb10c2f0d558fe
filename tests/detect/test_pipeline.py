"""Test the steps from network outputs to detections, on small cases computed by hand, and float detectors on images."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fqvit.detect.float.boxes import encode
from fqvit.detect.float.pipeline import Maps, detect
from fqvit.detect.float.proposals import propose, refine, select_detections, sigmoid, softmax
from fqvit.detect.float.roialign import Floats32
from fqvit.detect.images import Input, Pixels
from fqvit.detect.masks import from_runs
from fqvit.detect.results import coco_results
from fqvit.detect.settings import DetectSettings

pytest.importorskip("torch")

from fqvit.detect.float.networks import FloatNetworks, detect_float
from fqvit.detect.model.load import load_detector, random_release
from fqvit.models.config import DetectorConfig, SwinConfig

from .detectors import CONFIGS, SETTINGS, random_detector

ONE_RATIO = DetectSettings(anchor_ratios=(1.0,), strides=(4, 8), proposals_a_level=3, proposals=4)


def test_proposals_are_the_best_of_each_level_after_nms() -> None:
    objectness = [np.full((2, 3, 1), -5.0), np.full((1, 2, 1), -6.0)]
    objectness[0][1, 2] = 3.0
    objectness[1][0, 0] = 4.0
    boxes = propose(objectness, [np.zeros((2, 3, 4)), np.zeros((1, 2, 4))], (8, 12), ONE_RATIO)
    # The anchors of the two levels have sides of 32 and 64 pixels, so all of them are equal when clipped to 8 x 12 pixels.
    # Non-maximum suppression runs per level and keeps one box of each level.
    assert boxes.tolist() == [[0, 0, 12, 8], [0, 0, 12, 8]]


def test_empty_and_nan_proposals_are_dropped() -> None:
    deltas = [np.zeros((1, 2, 4)), np.zeros((1, 1, 4))]
    deltas[0][0, 0] = [100.0, 0, 0, 0]  # moves the box far to the right, out of the image
    deltas[0][0, 1] = np.nan
    boxes = propose([np.zeros((1, 2, 1)), np.zeros((1, 1, 1))], deltas, (16, 16), ONE_RATIO)
    assert boxes.tolist() == [[0, 0, 16, 16]]


def test_refinement_uses_the_deltas_of_the_most_probable_class() -> None:
    boxes, target = np.array([[10.0, 10, 20, 30]]), np.array([[12.0, 11, 25, 28]])
    delta = encode(boxes, target, (0.1, 0.1, 0.2, 0.2))
    both = np.concatenate([np.zeros((1, 4)), delta], 1)
    logits = np.array([[0.0, 1.0, 9.0]])  # the background, which is last, is not a class
    assert refine(boxes, logits, both, (0.1, 0.1, 0.2, 0.2), (100, 100)) == pytest.approx(target)
    assert refine(boxes, logits, delta, (0.1, 0.1, 0.2, 0.2), (100, 100)) == pytest.approx(target)


@pytest.mark.parametrize("agnostic", [True, False])
def test_a_box_can_be_detected_as_two_classes_but_not_twice_as_one(agnostic: bool) -> None:
    boxes = np.array([[0.0, 0, 10, 10], [1.0, 0, 11, 10], [50, 50, 60, 60]])
    logits = np.log(np.array([[0.5, 0.3, 0.2], [0.6, 0.02, 0.38], [0.01, 0.04, 0.95]]))
    deltas = np.zeros((3, 4 if agnostic else 8))
    found = select_detections(boxes, logits, deltas, (1, 1, 1, 1), (100, 100), DetectSettings())
    assert found.scores == pytest.approx([0.6, 0.3])
    assert found.labels.tolist() == [0, 1]
    assert found.boxes == pytest.approx(boxes[[1, 0]])


def test_the_number_of_detections_is_limited() -> None:
    boxes = np.stack([np.arange(30) * 20.0, np.zeros(30), np.arange(30) * 20.0 + 10, np.full(30, 10.0)], 1)
    logits = np.stack([np.linspace(1, 2, 30), np.zeros(30)], 1)
    found = select_detections(
        boxes, logits, np.zeros((30, 4)), (1, 1, 1, 1), (100, 1000), msgspec.structs.replace(ONE_RATIO, detections=5)
    )
    assert found.boxes == pytest.approx(boxes[:-6:-1])


def test_softmax_and_sigmoid_accept_any_logits() -> None:
    assert softmax(np.array([[1e4, 0.0], [-1e4, -1e4]])).tolist() == [[1, 0], [0.5, 0.5]]
    assert sigmoid(np.array([-1e4, 0.0, 1e4])) == pytest.approx([0, 0.5, 1])


class FixedNetworks:
    """Two-stage networks with fixed outputs: one proposal, constant deltas, different logits per stage."""

    stages, box_side, mask_side = 2, 7, 14

    def __init__(self) -> None:
        self.calls: list[str] = []

    def maps(self, pixels: Pixels) -> Maps:
        objectness = [np.full((8 // 2**i, 8 // 2**i, 1), -9.0, np.float32) for i in range(2)]
        objectness[0][2, 2] = 5
        deltas = [np.zeros((*x.shape[:2], 4), np.float32) for x in objectness]
        return Maps([np.ones((8, 8, 3), np.float32), np.ones((4, 4, 3), np.float32)], objectness, deltas)

    def boxes(self, stage: int, rois: Floats32) -> tuple[Floats32, Floats32]:
        self.calls.append(f"boxes {stage}")
        count = len(rois)
        return np.tile(np.float32([4 - 2 * stage, 0, 0]), (count, 1)), np.full((count, 4), 0.1, np.float32)

    def masks(self, stage: int, rois: Floats32, labels: NDArray[np.int64]) -> Floats32:
        self.calls.append(f"masks {stage}")
        return np.full((len(rois), 28, 28), (-1.0, 2.0)[stage], np.float32)


def test_a_cascade_averages_logits_and_mask_probabilities() -> None:
    networks = FixedNetworks()
    settings = msgspec.structs.replace(ONE_RATIO, proposals_a_level=1, proposals=1)
    found = detect(networks, Input(np.zeros((32, 32, 3), np.uint8), 64, 64), settings)
    assert networks.calls == ["boxes 0", "boxes 1", "masks 0", "masks 1"]
    assert found.detections.scores == pytest.approx([np.exp(3) / (np.exp(3) + 2)], abs=1e-6)
    assert found.probabilities[0] == pytest.approx(np.full((28, 28), (sigmoid(np.array(-1.0)) + sigmoid(np.array(2.0))) / 2))
    first = refine(np.array([[0.0, 0, 24, 24]]), np.zeros((1, 3)), np.full((1, 4), 0.1), settings.stds[0], (32, 32))
    second = refine(first, np.zeros((1, 3)), np.full((1, 4), 0.1), settings.stds[1], (32, 32))
    assert found.detections.boxes == pytest.approx(2 * second, abs=1e-5), (
        "in pixels of the image, which is twice as large as the network's input"
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_float_detectors_are_deterministic(name: str) -> None:
    detector = random_detector(name)
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)) for size in ((50, 70), (90, 40), (1, 300))]
    found = list(detect_float(detector, images))
    again = list(detect_float(detector, images))
    assert sum(len(one.detections.scores) for one in found) > 0
    for one, other, image in zip(found, again, images, strict=True):
        d = one.detections
        assert (d.boxes == other.detections.boxes).all()
        assert (d.boxes[:, 2] <= image.width + 1e-6).all()
        assert (d.boxes[:, 3] <= image.height + 1e-6).all()
        assert (d.boxes >= 0).all()
        assert (d.scores > SETTINGS.score).all()
        assert (np.diff(d.scores) <= 0).all()
        for result in coco_results(one, 7, SETTINGS):
            assert json.loads(json.dumps(result)) == result
            assert result["category_id"] in range(1, 6)
            assert from_runs(result["segmentation"]).shape == (image.height, image.width)


def test_an_image_without_detections_gives_no_results() -> None:
    detector = random_detector("mask r-cnn", msgspec.structs.replace(SETTINGS, score=1.0))
    (found,) = detect_float(detector, [Image.new("RGB", (64, 64))])
    assert coco_results(found, 1, SETTINGS) == []


def test_pyramids_are_cached_by_size() -> None:
    networks = FloatNetworks(random_detector("mask r-cnn"))
    assert networks.pyramid((64, 96)) is networks.pyramid((64, 96))
    for i in range(20):
        networks.pyramid((32, 32 + 32 * i))
    assert len(networks._pyramids) == 16


def test_swin_tiny_runs_at_full_size(shared_data: Path) -> None:
    swin = SwinConfig((64, 64), 4, 3, 0, 96, (2, 2, 6, 2), (3, 6, 12, 24), 7, fixed_window=True)
    release = random_release(DetectorConfig(swin, 80), "swin")
    assert round(sum(v.numel() for v in release.values()) / 1e6) == 48, "expected 48 million parameters, as published"
    detector = load_detector(release)
    settings = msgspec.structs.replace(detector.settings, score=0.013, detections=10)
    file = sorted((shared_data / "coco128" / "images").iterdir())[0]
    with Image.open(file) as image:
        (found,) = detect_float(type(detector)(detector.name, detector.module, settings, detector.source), [image])
        size = image.size
    results = coco_results(found, 1, settings)
    assert len(results) == 10
    for result in results:
        x, y, w, h = result["bbox"]
        assert min(x, y) >= 0
        assert x + w <= size[0] + 0.01
        assert y + h <= size[1] + 0.01
