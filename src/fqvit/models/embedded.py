"""The shapes of the two embedded models. Their files and images come from fqvit.assets, which needs no torch.

zoo.py has their rows; training/ made them.
"""

from __future__ import annotations

from fqvit.assets import (
    FMNIST_CLASSES,
    FMNIST_PREPROCESS,
    MODELS,
    calibration_images,
    embedded_weights,
    test_images,
)
from fqvit.models.swin import SwinConfig
from fqvit.models.vit import ViTConfig

__all__ = [
    "FMNIST_CLASSES",
    "FMNIST_PREPROCESS",
    "FMNIST_SWIN_CONFIG",
    "FMNIST_VIT_CONFIG",
    "MODELS",
    "calibration_images",
    "embedded_configs",
    "embedded_weights",
    "test_images",
]

FMNIST_VIT_CONFIG = ViTConfig(
    image=(28, 28), patch=4, channels=1, classes=10, width=96, depth=4, heads=3, hidden=384
)

# Stage 1 has 14 x 14 tokens: two windows a side, the second block shifted. After the merging one window sees all.
FMNIST_SWIN_CONFIG = SwinConfig(
    image=(28, 28), patch=2, channels=1, classes=10, width=48, depths=(2, 2), heads=(2, 4), window=7
)


def embedded_configs() -> dict[str, ViTConfig | SwinConfig]:
    """name -> config, in the order of MODELS."""
    return {"fmnist_vit": FMNIST_VIT_CONFIG, "fmnist_swin": FMNIST_SWIN_CONFIG}
