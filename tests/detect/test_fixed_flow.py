"""Test that the integer pipeline uses no floats, and that it selects the same boxes as the float pipeline for equal inputs."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

import fqvit.detect
from fqvit.detect.fixed.boxes import scaled
from fqvit.detect.fixed.proposals import propose, refine, select_detections
from fqvit.detect.float.proposals import propose as float_propose
from fqvit.detect.float.proposals import refine as float_refine
from fqvit.detect.float.proposals import select_detections as float_select_detections
from fqvit.detect.images import RESIZERS, ResizeRule, prepare

from .test_fixed_constants import S, constants

HERE = Path(fqvit.detect.__file__).parent
# Modules in which every function is a step from pixels to masks.
FILES = ("fixed/boxes", "fixed/exp", "fixed/masks", "fixed/proposals", "fixed/roialign", "nms")
FLOATS = (float, np.floating, complex)


def floats_in(value: Any, depth: int = 3) -> Iterator[str]:
    if isinstance(value, FLOATS) or (isinstance(value, np.ndarray) and value.dtype.kind not in "iub"):
        yield type(value).__name__
    elif isinstance(value, list | tuple) and depth:
        for each in value:
            yield from floats_in(each, depth - 1)


class Watch:
    """Profiler that inspects the variables of every function of the detection package when it returns."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.found: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "return" or not frame.f_code.co_filename.startswith(str(HERE)):
            return
        module = Path(frame.f_code.co_filename).relative_to(HERE).with_suffix("")
        name = f"{'.'.join(module.parts)}.{frame.f_code.co_name}"
        self.seen.add(name)
        for variable, value in [*frame.f_locals.items(), ("the result", argument)]:
            self.found.update(f"{name}: {variable} is {kind}" for kind in floats_in(value))


def outside_weights(found: set[str]) -> set[str]:
    """Return `found` without the variables of the interpolation weights, which OpenCV defines with floats."""
    formula = tuple(f"opencv.axis_weights: {name} is " for name in ("scale", "at", "first", "share", "one", "before", "after"))
    return {line for line in found if not line.startswith(formula)}


@pytest.mark.parametrize("rule", RESIZERS)
def test_no_variable_is_a_float_from_pixels_to_masks(rule: ResizeRule) -> None:
    pytest.importorskip("torch")
    from .detectors import SETTINGS
    from .test_integer import integer
    from .test_programs import sample_images

    for name in ("mask r-cnn", "cascade of 4conv1fc"):
        detector, image, watch = integer(name, "reference"), sample_images()[0], Watch()
        sys.setprofile(watch)
        try:
            found = detector.detect(prepare(image, SETTINGS, rule))
            masks = list(found.masks())
        finally:
            sys.setprofile(None)
        assert masks and outside_weights(watch.found) == set() and (watch.found == set()) == (rule == "rounded")
        for needed in (
            "opencv.resize" if rule == "opencv" else "images.resize",
            "fixed.proposals.propose",
            "fixed.boxes.decode",
            "fixed.exp.softmax",
            "fixed.masks.paste",
            "fixed.roialign.axis_weights",
        ):
            assert needed in watch.seen
        assert "float.boxes.decode" not in watch.seen


def test_the_watcher_detects_floats() -> None:
    watch = Watch()
    sys.setprofile(watch)
    try:
        float_propose([np.zeros((1, 1, 2))] * 3, [np.zeros((1, 1, 8))] * 3, (16, 16), S)
    finally:
        sys.setprofile(None)
    assert any(line.startswith("float.boxes.decode: size is ndarray") for line in watch.found)


@pytest.mark.parametrize("name", FILES)
def test_the_source_has_no_floats_and_no_true_division(name: str) -> None:
    tree = ast.parse((HERE / f"{name}.py").read_text())
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Constant) or not isinstance(node.value, float)
        assert not isinstance(node, ast.BinOp | ast.AugAssign) or not isinstance(node.op, ast.Div)
        named = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        assert named not in ("float", "float32", "float64", "mean", "sqrt", "exp", "log", "log2", "divide", "true_divide")


def test_proposals_equal_float_proposals() -> None:
    rng, c = np.random.default_rng(0), constants()
    s = msgspec.structs.replace(S, proposals_a_level=80, proposals=40)
    c = msgspec.structs.replace(c, proposals_a_level=80, proposals=40)
    grids = [(12, 10), (6, 5), (3, 3)]
    objectness = [rng.permutation(h * w * 2).reshape(h, w, 2).astype(np.int32) * 3 + i for i, (h, w) in enumerate(grids)]
    deltas = [rng.integers(-30, 30, (h, w, 8)).astype(np.int32) for h, w in grids]
    found = propose(objectness, deltas, (47, 40), c)
    exact = float_propose([x * 0.05 / (i + 1) for i, x in enumerate(objectness)], [x * 0.05 for x in deltas], (47, 40), s)
    assert len(found) == len(exact) == 40
    # Anchors are rounded to 1/256 pixel, and decoding enlarges them, with their errors, by a factor of up to e^1.5.
    assert np.abs(found / 256 - exact).max() < 5 / 256


@pytest.mark.parametrize("deltas_per_box", [4, 12])
def test_refinement_and_selection_equal_those_of_the_float_pipeline(deltas_per_box: int) -> None:
    rng, c = np.random.default_rng(1), constants()
    corner = rng.integers(0, 200 * 256, (80, 2))
    boxes = np.concatenate([corner, corner + rng.integers(256, 90 * 256, (80, 2))], 1)
    first, second = (rng.integers(-40, 40, (80, 4)).astype(np.int32) for _ in range(2))
    deltas, size = rng.integers(-60, 60, (80, deltas_per_box)).astype(np.int32), (250, 260)
    real = deltas * 0.03
    moved = refine(boxes, first, deltas, 0, size, c)
    assert np.abs(moved / 256 - float_refine(boxes / 256, first * 0.1, real, S.stds[0], size)).max() <= 1 / 128
    total = scaled(first, c.classes[0]) + scaled(second, c.classes[1])
    found = select_detections(boxes, total, deltas, size, c)
    exact = float_select_detections(boxes / 256, (first + second) * 0.1 / 2, real, S.stds[1], size, S)
    assert len(found.scores) == len(exact.scores) > 20
    assert np.abs(found.scores / 2**24 - exact.scores).max() < 2**-22
    assert (found.labels == exact.labels).all() and np.abs(found.boxes / 256 - exact.boxes).max() <= 1 / 128


def test_images_are_enlarged_without_floats() -> None:
    watch = Watch()
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (70, 300, 3), np.uint8))
    sys.setprofile(watch)
    try:
        made = prepare(image, S)
    finally:
        sys.setprofile(None)
    assert made.size == (311, 1333) and watch.found == set() and "images._axis" in watch.seen
