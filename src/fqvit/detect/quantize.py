"""Quantize a detector in one call: load it, calibrate it on images, and lower it to a program.

See also: lowering/quantize.py (classifiers), model/load.py, calibrate.py and lower.py (the three steps).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from fqvit.data.images import spread
from fqvit.detect.calibrate import DetectorCalibration, calibrate_detector
from fqvit.detect.file import file_size
from fqvit.detect.fixed.constants import check_settings
from fqvit.detect.image_files import ImageFiles, read_rgb
from fqvit.detect.lower import LoweredDetector
from fqvit.detect.model.detector import FloatDetector
from fqvit.detect.model.load import load_detector
from fqvit.detect.program import DetectorProgram
from fqvit.detect.settings import DetectSettings, read_settings
from fqvit.errors import FqvitError
from fqvit.lowering.quantize import recipe_of
from fqvit.quant.recipe import DEFAULT_RECIPE, Recipe, check_integer
from fqvit.system.progress import Progress, busy, track

EXPECTED = "a folder, or a list of paths, PIL images or uint8 arrays [H, W, 3]"


def quantize_detector(
    weights: str | Path | FloatDetector | Mapping[str, Tensor],
    images: object,
    recipe: Recipe | str | Path = DEFAULT_RECIPE,
    bits: str | None = None,
    *,
    settings: str | Path | DetectSettings | Mapping[str, Any] | None = None,
    limit: int | None = None,
    progress: Progress | None = track,
) -> DetectorProgram:
    """Quantize a float detector to an integer-only program. Save it with `.save("d.fqvit")`, use it with `fqvit.load`.

    weights: a checkpoint of a Swin Mask R-CNN or Cascade Mask R-CNN, .pth or .safetensors, its state dict, or a loaded detector
    images: unlabelled images of any size like those that the detector will see: a folder, or a list of paths, PIL images or
    uint8 arrays [H, W, 3]
    recipe: a recipe, its name, or a TOML file   bits: of weights, activations and attention, such as "4/8/4"
    settings: image size, anchors, thresholds and class names that differ from the defaults: a mapping, or a TOML or JSON file
    limit: use at most this many images, evenly spaced; by default recipe.images   progress: None shows no progress
    """
    chosen = recipe_of(recipe, bits, limit)
    check_integer(chosen)
    taken, count = _pictures(images, chosen.images)
    if isinstance(weights, FloatDetector):
        if settings is not None:
            raise FqvitError("settings: only valid for weights that are not loaded yet. Pass them to load_detector.")
        detector = weights
    else:
        changes = read_settings(settings) if isinstance(settings, str | os.PathLike) else settings
        with busy("loading the detector"):
            detector = load_detector(weights, changes)
    config = detector.module.config
    check_settings(detector.settings, len(config.backbone.depths) + 1, config.stages)

    def size_of(found: DetectorCalibration) -> int:
        return file_size(DetectorProgram.of(detector, LoweredDetector(detector, found)))

    shown = taken if progress is None else progress(taken, count, "calibrating")
    calibration = calibrate_detector(detector, shown, chosen, progress=progress, size_of=size_of)
    return DetectorProgram.of(detector, LoweredDetector(detector, calibration))


def _pictures(images: object, limit: int) -> tuple[Iterable[Image.Image], int]:
    """Return at most `limit` images, evenly spaced, and their number."""
    if isinstance(images, str | os.PathLike):
        files = ImageFiles.in_folder(Path(images)).limit(limit)
        return (image for _, image in files), len(files)
    if isinstance(images, Image.Image) or not isinstance(images, Sequence):
        raise FqvitError(f"images: {type(images).__name__}, expected {EXPECTED}.")
    if not images:
        raise FqvitError("images: no images. Pass at least one.")
    some = [images[i] for i in spread(len(images), limit)]
    wrong = next((one for one in some if not isinstance(one, str | os.PathLike | Image.Image | np.ndarray)), None)
    if wrong is not None:
        raise FqvitError(f"images: an item is {type(wrong).__name__}, expected {EXPECTED}.")
    return _opened(some), len(some)


def _opened(images: Sequence[Any]) -> Iterator[Image.Image]:
    for image in images:
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
                raise FqvitError(f"images: {image.dtype} {list(image.shape)}, expected {EXPECTED}.")
            yield Image.fromarray(image)
        else:
            yield image if isinstance(image, Image.Image) else read_rgb(image)
