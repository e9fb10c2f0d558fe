"""Fixtures: two tiny models with random weights, calibrated and lowered."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fqvit.data.preprocess import Preprocess
from fqvit.ir.program import Program
from fqvit.lowering.lower import lower
from fqvit.models.config import SwinConfig, ViTConfig
from fqvit.models.load import FloatModel, build
from fqvit.quant.calibrate import calibrate
from fqvit.quant.calibration import Calibration
from fqvit.quant.recipe import RECIPES, Recipe

VIT = ViTConfig(image=(16, 16), patch=4, channels=3, classes=7, width=24, depth=2, heads=3, hidden=48)
SWIN = SwinConfig(image=(16, 16), patch=2, channels=3, classes=7, width=16, depths=(2, 2), heads=(2, 4), window=4)


@dataclass(frozen=True)
class Made:
    model: FloatModel
    calibration: Calibration
    program: Program
    images: np.ndarray


def make(config: ViTConfig | SwinConfig, recipe: Recipe, features: str = "logits") -> Made:
    """Build, calibrate and lower a model. Large weights make attention uneven and logits distinct."""
    torch.manual_seed(0)
    module = build(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    preprocess = Preprocess(16, 16, 3, 16, "bicubic", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    model = FloatModel("tiny", module, preprocess, tuple(f"class {i}" for i in range(7)), "random sha256:0")
    images = np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        calibration = calibrate(model, images, recipe, features=features)  # type: ignore[arg-type]
    return Made(model, calibration, lower(model, calibration), images)


@pytest.fixture(scope="session", params=["vit", "swin"])
def made(request: pytest.FixtureRequest) -> Made:
    return make(VIT if request.param == "vit" else SWIN, Recipe(name="fq-vit"))


@pytest.fixture(scope="session")
def features() -> Made:
    return make(VIT, Recipe(name="fq-vit"), "pooled")


@pytest.fixture(scope="session", params=["vit", "swin"])
def compensated(request: pytest.FixtureRequest) -> Made:
    return make(VIT if request.param == "vit" else SWIN, RECIPES["w4"])


@pytest.fixture(scope="session")
def grouped() -> Made:
    return make(VIT, Recipe(name="grouped", weight_bits=4, weight_group=16))
