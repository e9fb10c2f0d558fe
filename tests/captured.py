"""Small models that are captured rather than built from leaves: a feature extractor, a classifier and a gated hybrid."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fqvit.frontend.load import load_model
from fqvit.ir.program import Program
from fqvit.lowering.lower import lower
from fqvit.models.config import VisionConfig
from fqvit.models.families.build import build_family
from fqvit.models.load import FloatModel
from tests.factories import calibration_of

SIZES: dict[str, Any] = {"image": (16, 16), "patch": 4, "channels": 3, "width": 24, "depth": 2, "heads": 3, "hidden": 48}
# Like DINOv2 with registers: no classifier.
FEATURES = VisionConfig(**SIZES, outputs=0, registers=2, layer_scale=True)
# Like a classifier on CLIP: an additional norm, another activation.
CLASSIFIER = VisionConfig(**SIZES, outputs=5, norm_pre=True, activation="quick_gelu")
SETTINGS = {"heads": 3, "pool": "token", "activation": "gelu"}


def state_of(config: VisionConfig) -> dict[str, Tensor]:
    """Return random weights, large enough for every site to use many codes."""
    generator = torch.Generator().manual_seed(0)
    return {k: 0.3 * torch.randn(v.shape, generator=generator) for k, v in build_family(config).state_dict().items()}


class Hybrid(nn.Module):
    """A convolution named `pixels` like the input of a program, a gated MLP with SiLU, mean pooling and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels = nn.Conv2d(3, 8, 4, 4)
        self.norm, self.gate, self.value, self.out = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 5)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pixels(images).flatten(2).transpose(1, 2)
        y = self.norm(x)
        x = x + self.out(F.silu(self.gate(y)) * self.value(y))
        return self.head(x.mean(1))  # type: ignore[no-any-return]


@cache
def captured(kind: str) -> FloatModel:
    """Load the model of a kind: features, classifier or hybrid."""
    if kind == "hybrid":
        return load_model(Hybrid().eval(), 16)
    config = FEATURES if kind == "features" else CLASSIFIER
    return load_model(weights=state_of(config), **{**SETTINGS, "activation": config.activation})


@cache
def captured_program(kind: str) -> Program:
    model = captured(kind)
    return lower(model, calibration_of(model, "fqvit", count=6))
