"""Create the golden files: tiny random programs of format version 1, images, and the outputs that they must give forever.

    python tests/golden/make.py

Creates only missing files and never changes existing ones; tests do not call it. A new format version gets its own files in
addition to these.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from fqvit.detect.calibrate import calibrate_detector  # noqa: E402
from fqvit.detect.lower import LoweredDetector  # noqa: E402
from fqvit.detect.model.load import load_detector, random_release  # noqa: E402
from fqvit.detect.program import DetectorProgram  # noqa: E402
from fqvit.ir.program import Program  # noqa: E402
from fqvit.lowering.lower import lower  # noqa: E402
from fqvit.models.config import DetectorConfig, SwinConfig  # noqa: E402
from fqvit.quant.recipe import load_recipe  # noqa: E402
from fqvit.runtime.reference import run  # noqa: E402
from tests.detect.detectors import SETTINGS  # noqa: E402
from tests.detect.test_programs import sample_images  # noqa: E402
from tests.factories import GROUPED, calibration_of, float_model, images_for, model_of  # noqa: E402
from tests.golden.cosine import cosine  # noqa: E402

# 5 x 7 tokens in windows of 3, padded, and shifted in the second block: a small file with masks.
MASKED_SWIN = SwinConfig((10, 14), 2, 1, 4, 8, (2,), (2,), 3, hidden_ratio=2)
# {file: (kind of model in factories.py or a configuration, recipe, class names, features)}
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

SMALL_SWIN = SwinConfig((64, 64), 4, 3, 0, 4, (1, 1, 1, 1), (1, 1, 2, 2), 2, hidden_ratio=2, fixed_window=True)
MASK_RCNN = DetectorConfig(SMALL_SWIN, 3, channels=8, box_width=12, mask_convs=1, mask_channels=8)
CASCADE = replace(MASK_RCNN, stages=2, agnostic=True, box_convs=1, box_fcs=1, box_channels=8)
# {file in detectors/: (configuration, recipe)}
# The first two were made by 0.1.0: their files have no field `resize`.
DETECTORS = {"mask_rcnn_v1": (MASK_RCNN, "fqvit"), "cascade_v1": (CASCADE, "fq-vit"), "opencv_v1": (MASK_RCNN, "fq-vit")}


# {file: a function that builds its program by hand}
BUILT = {"cosine_v1": cosine}


def make_built() -> None:
    for name, build in BUILT.items():
        if not (HERE / f"{name}.fqvit").exists():
            save(name, build())


def save(name: str, program: Program) -> None:
    images = images_for(program.header.preprocess, 6, 12)
    program.save(HERE / f"{name}.fqvit")
    np.savez_compressed(HERE / f"{name}.npz", images=images, output=run(program, images), fingerprint=program.fingerprint())


def make() -> None:
    for name, (kind, recipe, classes, features) in FILES.items():
        if (HERE / f"{name}.fqvit").exists():
            continue
        model = float_model(kind, 11, classes) if isinstance(kind, str) else model_of(kind, name, 11, classes)
        save(name, lower(model, calibration_of(model, recipe, features=features)))


def make_detectors() -> None:
    shown = [image.resize((60, 44)) for image in sample_images()[:2]]
    for name, (config, recipe) in DETECTORS.items():
        path = HERE / "detectors" / f"{name}.fqvit"
        if path.exists():
            continue
        detector = load_detector(random_release(config, "mmdetection"), msgspec.structs.replace(SETTINGS, detections=12))
        lowered = LoweredDetector(detector, calibrate_detector(detector, shown, load_recipe(recipe)))
        program = DetectorProgram.of(detector, lowered)
        found = [program.ready(1, "reference").detect(program.prepare(image)) for image in shown]
        path.parent.mkdir(exist_ok=True)
        program.save(path)
        arrays = {"fingerprint": np.array(program.fingerprint()), "pictures": np.stack([np.asarray(x) for x in shown])}
        for i, one in enumerate(found):
            arrays |= {f"{part}{i}": getattr(one, part) for part in ("boxes", "scores", "labels", "probabilities")}
            arrays[f"masks{i}"] = np.packbits(np.array(list(one.masks())))
        np.savez_compressed(path.with_suffix(".npz"), **arrays)


if __name__ == "__main__":
    make()
    make_built()
    make_detectors()
