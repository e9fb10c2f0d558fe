"""Whole detectors with integer networks, beside the float ones."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fqvit.detect.images import prepare
from fqvit.detect.integer import IntegerNetworks
from fqvit.detect.pipeline import detect
from fqvit.detect.roialign import cut_out
from fqvit.errors import FqvitError

pytest.importorskip("torch")

from fqvit.detect.float import FloatNetworks
from tests.factories import one_thread as one_thread

from .detectors import CONFIGS, SETTINGS
from .test_programs import detector_of, lowered, pictures

every_detector = pytest.mark.parametrize("name", CONFIGS)


def integer(name: str) -> IntegerNetworks:
    low = lowered(name, "fqvit")
    return IntegerNetworks(low.template, low.boxes, low.masks, SETTINGS, 1)


def alike(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


@every_detector
def test_integer_networks_follow_the_float_ones(name: str) -> None:
    ours, exact = integer(name), FloatNetworks(detector_of(name))
    assert (ours.stages, ours.box_side, ours.mask_side) == (exact.stages, exact.box_side, exact.mask_side)
    image = prepare(pictures()[1], SETTINGS)
    found, wanted = ours.maps(image.pixels), exact.maps(image.pixels)
    for a, b in zip(found, wanted, strict=True):
        assert [x.shape for x in a] == [x.shape for x in b] and all(alike(x, y) > 0.97 for x, y in zip(a, b, strict=True))
    corner = np.random.default_rng(0).uniform(0, 60, (40, 2))
    boxes = np.concatenate([corner, corner + np.random.default_rng(1).uniform(4, 60, (40, 2))], 1)
    labels = np.arange(40) % CONFIGS[name].classes
    for stage in range(ours.stages):
        squares = cut_out(wanted.levels, boxes, ours.box_side, SETTINGS.finest, SETTINGS.strides)
        for a, b in zip(ours.boxes(stage, squares), exact.boxes(stage, squares), strict=True):
            assert a.shape == b.shape and alike(a, b) > 0.97
        squares = cut_out(wanted.levels, boxes, ours.mask_side, SETTINGS.finest, SETTINGS.strides)
        a, b = ours.masks(stage, squares, labels), exact.masks(stage, squares, labels)
        assert a.shape == b.shape and alike(a, b) > 0.97


@every_detector
def test_images_of_every_size_are_detected_on(name: str) -> None:
    networks = integer(name)
    for picture in (*pictures(), pictures()[0].resize((1, 90)), pictures()[0].resize((3, 1))):
        image = prepare(picture, SETTINGS)
        found = detect(networks, image, SETTINGS)
        assert len(found.detections.boxes) == len(found.probabilities) <= SETTINGS.detections
        assert np.isfinite(found.detections.boxes).all() and np.isfinite(found.probabilities).all()


def test_a_pyramid_is_no_head() -> None:
    low = lowered("mask r-cnn", "fqvit")
    with pytest.raises(FqvitError, match="takes pixels"):
        IntegerNetworks(low.template, [low.template], low.masks, SETTINGS)
