"""Makes the golden files: tiny random programs of format version 1, images, and every bit that they must give for ever.

    python tests/golden/make.py

Tests never call it. Files that are there stay as they are: only missing ones are made. A new format version gets files of its
own beside these.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from fqvit.ir.lower import lower  # noqa: E402
from fqvit.models.config import SwinConfig  # noqa: E402
from fqvit.runtime.reference import run  # noqa: E402
from tests.factories import GROUPED, calibration_of, float_model, images_for, model_of  # noqa: E402

# 5 x 7 tokens in windows of 3, padded, shifted in the second block: masks in a small file.
MASKED_SWIN = SwinConfig((10, 14), 2, 1, 4, 8, (2,), (2,), 3, hidden_ratio=2)
# file -> model of factories.py or a configuration, recipe, class names, features
FILES = {
    "tiny_v1": ("vit", "fq-vit", ("a", "b", "c", "d", "é"), "logits"),
    "swin_v1": ("padded swin", "fq-vit", None, "logits"),
    "original_v1": ("distilled", "fq-vit-original", None, "logits"),
    "uniform_v1": ("no class token", "minmax", None, "logits"),
    "tokens_v1": ("mean", "fq-vit", None, "tokens"),
    "grouped_v1": ("vit", GROUPED, None, "logits"),
    "fqvit_v1": ("distilled", "fqvit", None, "logits"),
    "fqvit_swin_v1": (MASKED_SWIN, "fqvit", None, "logits"),
}


def make() -> None:
    for name, (kind, recipe, classes, features) in FILES.items():
        if (HERE / f"{name}.fqvit").exists():
            continue
        model = float_model(kind, 11, classes) if isinstance(kind, str) else model_of(kind, name, 11, classes)
        program = lower(model, calibration_of(model, recipe, features=features))
        images = images_for(model.preprocess, 6, 12)
        program.save(HERE / f"{name}.fqvit")
        np.savez_compressed(HERE / f"{name}.npz", images=images, output=run(program, images), fingerprint=program.fingerprint())


if __name__ == "__main__":
    make()
