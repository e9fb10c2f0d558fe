"""Write small detectors, and synthetic images with annotations in COCO format, for tests of files and commands."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from fqvit.detect.calibrate import calibrate_detector
from fqvit.detect.lower import LoweredDetector
from fqvit.detect.model.detector import FloatDetector
from fqvit.detect.model.load import load_detector, random_release, save_detector
from fqvit.detect.program import DetectorProgram
from fqvit.quant.recipe import load_recipe

from .detectors import CONFIGS, SETTINGS
from .test_programs import detector_of, lowered, sample_images

ROOT = Path(__file__).resolve().parent.parent.parent


@cache
def shapes() -> ModuleType:
    """Import training/make_shapes.py."""
    sys.path.insert(0, str(ROOT / "training"))
    try:
        return importlib.import_module("make_shapes")
    finally:
        sys.path.pop(0)


@cache
def program(name: str) -> DetectorProgram:
    """Make the program of a random detector with five unnamed classes."""
    return DetectorProgram.of(detector_of(name), lowered(name, "fqvit"))


@cache
def shape_detector() -> FloatDetector:
    """Make a random detector with the classes of the synthetic shapes."""
    settings = msgspec.structs.replace(SETTINGS, classes=shapes().CLASSES)
    return load_detector(random_release(replace(CONFIGS["mask r-cnn"], classes=8), "mmdetection"), settings)


@cache
def shape_program() -> DetectorProgram:
    detector = shape_detector()
    calibration = calibrate_detector(detector, sample_images(), load_recipe("fqvit"))
    return DetectorProgram.of(detector, LoweredDetector(detector, calibration))


def write_all(folder: Path) -> None:
    """Write shapes.fqvit, shapes.safetensors, train (3 images), val (4 images) and their annotations into the folder."""
    shape_program().save(folder / "shapes.fqvit")
    detector = shape_detector()
    save_detector(folder / "shapes.safetensors", detector.module, detector.settings)
    for name, count, split in (("train", 3, shapes().TRAIN_SPLIT), ("val", 4, shapes().VAL_SPLIT)):
        shapes().write_split(folder, name, count, (split, 0))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    write_all(folder)
    return folder


@pytest.fixture(autouse=True)
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def results_of(path: Path | str) -> list[dict[str, Any]]:
    return json.loads(Path(path).read_text(encoding="utf-8"))
