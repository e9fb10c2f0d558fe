"""Test that the compiled detector is bit-identical to the reference.

This holds for extreme images, any accepted constants, every instruction set and any number of threads.

See also: tests/golden (stored detections), test_integer.py (the same interface on both backends).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from fqvit import _native
from fqvit.detect.fixed.constants import Ratio
from fqvit.detect.fixed.detector import IntegerDetector, _encoded
from fqvit.detect.fixed.found import IntegerFound
from fqvit.detect.fixed.masks import paste
from fqvit.detect.images import RESIZERS, ResizeRule
from fqvit.detect.program import DetectorProgram
from fqvit.errors import FqvitError
from tests.factories import assert_same
from tests.factories import one_thread as one_thread

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "detectors"
NAMES = ("cascade_v1", "mask_rcnn_v1", "opencv_v1")
PARTS = ("boxes", "scores", "labels", "probabilities")


@cache
def golden(name: str) -> DetectorProgram:
    return DetectorProgram.load(GOLDEN / f"{name}.fqvit")


@cache
def native(name: str, threads: int = 1) -> IntegerDetector:
    return IntegerDetector(GOLDEN / f"{name}.fqvit", threads)


def assert_equal(found: IntegerFound, expected: IntegerFound, what: str) -> None:
    for part in PARTS:
        assert_same(getattr(found, part), getattr(expected, part), f"{what}: {part}, native and reference")
    assert (found.height, found.width, found.threshold) == (expected.height, expected.width, expected.threshold)
    for i, (a, b) in enumerate(zip(found.masks(), expected.masks(), strict=True)):
        assert_same(a, b, f"{what}: mask {i}, native and reference")


def noise(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


def extreme_images() -> Iterator[tuple[str, NDArray[np.uint8]]]:
    for height, width in ((1, 1), (1, 700), (700, 1), (3, 2), (37, 301), (64, 64), (301, 199), (513, 40)):
        yield f"{height} x {width}", noise(height, width, height * width)
    yield "black", np.zeros((50, 70, 3), np.uint8)
    yield "white", np.full((50, 70, 3), 255, np.uint8)


@pytest.mark.parametrize("name", NAMES)
def test_extreme_images_give_the_same_bits_as_the_reference(name: str) -> None:
    slow, fast, threaded = golden(name).ready(1, "reference"), native(name), native(name, 3)
    for what, pixels in extreme_images():
        image = Image.fromarray(pixels)
        expected = slow.detect_image(image)
        for detector in (fast, threaded):
            assert_equal(detector.detect_image(image), expected, what)
            assert_equal(detector.detect(golden(name).prepare(image)), expected, f"{what}, prepared")


@pytest.mark.parametrize("isa", _native.instruction_sets())
@pytest.mark.parametrize("name", NAMES)
def test_every_instruction_set_gives_the_same_bits(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.fromarray(noise(90, 130))
    expected = native(name).detect_image(image)
    monkeypatch.setenv("FQVIT_ISA", isa)
    for threads in (1, 3):
        assert_equal(IntegerDetector(GOLDEN / f"{name}.fqvit", threads).detect_image(image), expected, isa)


@pytest.mark.parametrize("rule", RESIZERS)
def test_images_are_resized_bit_identically_to_the_reference(rule: ResizeRule) -> None:
    # Detections depend on every pixel of the image, so equal detections imply equal pixels.
    program = replace(
        golden("mask_rcnn_v1"),
        resize=rule,
        settings=msgspec.structs.replace(golden("mask_rcnn_v1").settings, short=90, long=150),
    )
    slow, fast = program.ready(1, "reference"), program.ready(1)
    for number, (height, width) in enumerate(((90, 150), (45, 75), (180, 300), (91, 151), (400, 30), (7, 600))):
        image = Image.fromarray(noise(height, width, number))
        assert_equal(fast.detect_image(image), slow.detect_image(image), f"{rule}: {height} x {width}")


def test_an_image_without_detections_gives_empty_results() -> None:
    program = golden("mask_rcnn_v1")
    image = program.prepare(Image.fromarray(noise(60, 60)))
    # The first change requires a score above 1, which no box has. The second moves every proposal by 2^29 pixels, out of the
    # image.
    far = Ratio(2**31 - 1, 1)
    for change in ({"score": 1 << 24}, {"deltas": ((far, far, far, far),) * len(program.between.deltas)}):
        changed = replace(program, between=msgspec.structs.replace(program.between, **change))
        found = changed.ready(1).detect(image)
        assert_equal(found, changed.ready(1, "reference").detect(image), "empty")
        assert len(found.boxes) == 0 and found.probabilities.shape == (0, 28, 28)


RATIOS = st.builds(Ratio, st.sampled_from([0, 1, 2**20, 2**30, 2**31 - 1]), st.integers(1, 62))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_accepted_constants_give_the_same_bits_as_the_reference(data: st.DataObject) -> None:
    program = golden(data.draw(st.sampled_from(NAMES[:2])))
    c = program.between
    four = st.tuples(RATIOS, RATIOS, RATIOS, RATIOS)
    logits = st.builds(Ratio, st.just(2**30), st.integers(5, 40))
    changed = msgspec.structs.replace(
        c,
        deltas=tuple(data.draw(four) for _ in c.deltas),
        box_deltas=tuple(data.draw(four) for _ in c.box_deltas),
        objectness=tuple(data.draw(RATIOS) for _ in c.objectness),
        classes=tuple(data.draw(logits) for _ in c.classes),
        mask_logits=tuple(data.draw(RATIOS) for _ in c.mask_logits),
        log_limit=data.draw(st.sampled_from([0, 1, c.log_limit, 8 << 27])),
        score=data.draw(st.sampled_from([0, c.score, 1 << 20])),
        iou=data.draw(st.sampled_from([0, 1 << 15, 1 << 16])),
        proposal_iou=data.draw(st.sampled_from([0, c.proposal_iou, 1 << 16])),
        proposals_a_level=data.draw(st.sampled_from([1, 40, 10_000])),
        proposals=data.draw(st.sampled_from([1, 30])),
        detections=data.draw(st.sampled_from([1, 12])),
    )
    made = replace(program, between=changed)
    image = program.prepare(Image.fromarray(noise(40, 60, data.draw(st.integers(0, 99)))))
    assert_equal(made.ready(1).detect(image), made.ready(1, "reference").detect(image), "random constants")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_masks_are_pasted_bit_identically_to_the_reference(data: st.DataObject) -> None:
    side, height, width = (data.draw(st.integers(1, 40)) for _ in range(3))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    probabilities = rng.integers(0, 2**15 + 1, (side, side)).astype(np.int32)
    edges = np.sort(rng.integers(0, 256 * np.array([[width, width], [height, height]]) + 1, (2, 2)), 1)
    if data.draw(st.booleans()):
        edges[data.draw(st.integers(0, 1))] = 256 * 3
    box = edges.T.ravel().astype(np.int64)
    threshold = data.draw(st.sampled_from([0, 1, 1 << 29, 1 << 30]))
    found = _native.paste_mask(probabilities, box, height, width, threshold).view(np.bool_)
    assert_same(found, paste(probabilities, box, height, width, threshold), "native and reference")


def test_a_detector_from_memory_does_not_need_the_bytes_after_loading() -> None:
    program = golden("mask_rcnn_v1")
    data = bytearray(_encoded(program))
    loaded = _native.load_detector_memory(bytes(data), 1, "")
    del data
    pixels = noise(100, 80)
    found, expected = loaded.detect(pixels), native("mask_rcnn_v1").detect_image(Image.fromarray(pixels))
    for part, array in zip(PARTS, found, strict=True):
        assert_same(array, getattr(expected, part), part)


def test_a_file_can_be_removed_after_loading(tmp_path: Path) -> None:
    path = tmp_path / "d.fqvit"
    path.write_bytes((GOLDEN / "cascade_v1.fqvit").read_bytes())
    detector = IntegerDetector(path, 1)
    path.unlink()
    image = Image.fromarray(noise(70, 40))
    assert_equal(detector.detect_image(image), native("cascade_v1").detect_image(image), "removed file")
    assert detector.header == golden("cascade_v1").header and detector.classes == golden("cascade_v1").classes


def test_wrong_files_and_empty_images_give_one_line_errors(tmp_path: Path) -> None:
    classifier = GOLDEN.parent / "tiny_v1.fqvit"
    with pytest.raises(FqvitError, match=r"tiny_v1.fqvit: holds a classifier or .*, not a detector\. Use `fqvit eval`"):
        IntegerDetector(classifier)
    with pytest.raises(FqvitError, match=r"none.fqvit: no such file\. .* `fqvit detect quantize"):
        IntegerDetector(tmp_path / "none.fqvit")
    with pytest.raises(_native.BadProgram, match="image of 0 x 5"):
        _native.load_detector_file(str(GOLDEN / "cascade_v1.fqvit").encode(), 1, "").detect(np.zeros((0, 5, 3), np.uint8))
