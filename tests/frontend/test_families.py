"""Test that captured torch models of four families, with trained weights, are bit-exact in the engine and close to float."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import fqvit
from fqvit.frontend.capture import capture
from fqvit.models import embedded
from fqvit.models.embedded import FMNIST_CLASSES, FMNIST_PREPROCESS
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.runtime import reference

TRAINING = Path(__file__).parents[2] / "training"
NAMES = ("rotary", "registers", "cosine", "hybrid")


@pytest.fixture(scope="module")
def families() -> Iterator[ModuleType]:
    sys.path.insert(0, str(TRAINING))
    try:
        import families

        yield families
    finally:
        sys.path.remove(str(TRAINING))


def test_every_family_is_tested(families: ModuleType) -> None:
    assert tuple(families.FAMILIES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_family_is_exact_and_agrees_with_float(families: ModuleType, name: str) -> None:
    module = families.load(name, TRAINING / "weights" / f"{name}.safetensors")
    model = FloatModel(name, capture(module, (1, 28, 28)), FMNIST_PREPROCESS, FMNIST_CLASSES, name)
    program = fqvit.lower(model, fqvit.calibrate(model, embedded.calibration_images()[:64], fqvit.load_recipe("fqvit")))
    images = embedded.test_images()[0][:400]
    logits = fqvit.Engine(program, threads=1).run(images)
    np.testing.assert_array_equal(logits[:4], reference.run(program, images[:4]))
    with torch.no_grad():
        wanted = module(normalise(images, FMNIST_PREPROCESS)).numpy()
    assert np.mean(logits.argmax(1) == wanted.argmax(1)) >= 0.97
