"""Test the calibration of a detector: the order of images, quantized attention for the last image, and boxes for mask heads."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from fqvit.detect import calibrate as module
from fqvit.detect.calibrate import calibrate_detector
from fqvit.quant.recipe import RECIPES
from tests.detect.detectors import SETTINGS, random_detector
from tests.factories import one_thread as one_thread

DETECTOR = random_detector("mask r-cnn")
IMAGES = [
    Image.fromarray(np.random.default_rng(seed).integers(0, 100 * seed + 50, (40, 60, 3)).astype(np.uint8)) for seed in range(4)
]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Record the arguments and results of the functions named below, call by call."""
    calls: dict[str, list[Any]] = {}

    def spy(name: str, real: Any) -> Any:
        def called(*given: Any) -> Any:
            result = real(*given)
            calls.setdefault(name, []).append((given, result))
            return result

        return called

    for name in ("prepare", "coded_attention", "classify", "multiscale_roi_align"):
        monkeypatch.setattr(module, name, spy(name, getattr(module, name)))
    return calls


@pytest.mark.parametrize("shuffle", [None, 0, 3])
def test_the_shuffle_seed_determines_the_order_of_images(shuffle: int | None, seen: dict[str, list[Any]]) -> None:
    counts: list[int] = []
    recipe = msgspec.structs.replace(RECIPES["fq-vit"], shuffle=shuffle, images=3)
    found = calibrate_detector(DETECTOR, IMAGES, recipe, seen=counts.append)
    order = [0, 1, 2] if shuffle is None else np.random.default_rng(shuffle).permutation(3).tolist()
    assert [IMAGES.index(given[0]) for given, _ in seen["prepare"]] == order
    assert {given[2] for given, _ in seen["prepare"]} == {"opencv"}
    assert counts == [1, 2, 3] and found.pyramid.images == found.boxes[0].images == found.masks[0].images == 3


@pytest.mark.parametrize("name", ["fq-vit-original", "fq-vit"])
def test_only_the_original_recipe_quantizes_attention_and_only_for_the_last_image(
    name: str, seen: dict[str, list[Any]]
) -> None:
    when: list[int] = []
    recipe = msgspec.structs.replace(RECIPES[name], shuffle=None)
    calibrate_detector(DETECTOR, IMAGES[:3], recipe, seen=lambda _: when.append(len(seen.get("coded_attention", []))))
    assert when == ([0, 0, 1] if name == "fq-vit-original" else [0, 0, 0])


def test_an_image_without_proposals_does_not_affect_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [calibrate_detector(DETECTOR, IMAGES[:1], RECIPES["minmax"])]
    propose, calls = module.propose, iter(range(2))
    monkeypatch.setattr(module, "propose", lambda *given: propose(*given)[: 0 if next(calls) else None])
    found.append(calibrate_detector(DETECTOR, IMAGES[:2], RECIPES["minmax"]))
    one, two = ([q.scale.tolist() for part in (*each.boxes, *each.masks) for q in part.sites.values()] for each in found)
    assert one == two and found[1].pyramid.images == 2


def test_mask_heads_are_observed_on_detected_boxes(seen: dict[str, list[Any]]) -> None:
    calibrate_detector(DETECTOR, IMAGES[:1], RECIPES["fq-vit"])
    (_, found), *_ = seen["classify"]
    assert len(found.boxes)
    np.testing.assert_array_equal(seen["multiscale_roi_align"][-1][0][1], found.boxes)


def test_mask_heads_are_observed_on_proposals_if_nothing_is_detected(seen: dict[str, list[Any]]) -> None:
    settings = msgspec.structs.replace(SETTINGS, score=1.0, detections=7)
    found = calibrate_detector(random_detector("mask r-cnn", settings), IMAGES[:1], RECIPES["fq-vit"])
    (given, classified), *_ = seen["classify"]
    assert len(classified.boxes) == 0 and found.masks[0].sites
    np.testing.assert_array_equal(seen["multiscale_roi_align"][-1][0][1], given[2][:7])
