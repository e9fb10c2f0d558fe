"""The embedded models: two small float models and Fashion-MNIST images inside the package.

Imports no torch. See also: zoo.py (their rows), load.py (builds the models), training/ (the scripts that trained them).
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.models.config import SwinConfig, ViTConfig

MODELS = ("fmnist_vit", "fmnist_swin")

FMNIST_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

# Mean and standard deviation of pixel / 255 over the 60,000 training images.
FMNIST_PREPROCESS = Preprocess(height=28, width=28, channels=1, resize=28, interpolation="bicubic", mean=(0.286,), std=(0.353,))

FMNIST_VIT_CONFIG = ViTConfig(image=(28, 28), patch=4, channels=1, classes=10, width=96, depth=4, heads=3, hidden=384)

# The first stage has 14 x 14 tokens: two windows per side, shifted in the second block. The second stage is one 7 x 7 window.
FMNIST_SWIN_CONFIG = SwinConfig(
    image=(28, 28), patch=2, channels=1, classes=10, width=32, depths=(2, 2), heads=(2, 4), window=7
)


def embedded_weights(name: str) -> Path:
    """Return the path of an embedded model's weights: float16 safetensors with the keys of its module's state_dict."""
    if name not in MODELS:
        raise FqvitError(f"{name}: no such embedded model, expected {' or '.join(MODELS)}. Pass weights for other models.")
    return _asset(f"{name}.safetensors")


def calibration_images() -> NDArray[np.uint8]:
    """Return 512 training images: u8 [512, 28, 28, 1]."""
    with np.load(_asset("fmnist.npz")) as arrays:
        images: NDArray[np.uint8] = arrays["calibration_images"]
    return images[..., None]


def test_images() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return 1000 test images, 100 per class: u8 [1000, 28, 28, 1] and labels i64 [1000]."""
    with np.load(_asset("fmnist.npz")) as arrays:
        images: NDArray[np.uint8] = arrays["test_images"]
        labels: NDArray[np.uint8] = arrays["test_labels"]
    return images[..., None], labels.astype(np.int64)


def _asset(name: str) -> Path:
    path = Path(str(files("fqvit") / "assets" / name))
    if not path.is_file():
        raise FqvitError(f"{path}: not found, expected in the installed package. Reinstall fqvit.")
    return path
