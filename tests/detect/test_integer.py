"""Integer detectors: the same bits on every backend, comparison with the float detector, and rejected inputs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from fqvit.detect.fixed.constants import make_constants
from fqvit.detect.fixed.detector import Backend, IntegerDetector
from fqvit.detect.fixed.found import IntegerFound
from fqvit.detect.fixed.proposals import propose
from fqvit.detect.fixed.reference import KEPT_SIZES, ReferenceDetector
from fqvit.detect.float.boxes import pairwise_iou
from fqvit.detect.float.pipeline import Maps, detect
from fqvit.detect.float.roialign import Floats32
from fqvit.detect.images import Input, Pixels, pad_pixels, prepare
from fqvit.detect.program import DetectorProgram
from fqvit.detect.resize import resized
from fqvit.detect.results import coco_results
from fqvit.errors import FqvitError
from fqvit.ir.program import Program
from fqvit.runtime.native import Engine

pytest.importorskip("torch")

from fqvit.detect.float.networks import FloatNetworks
from tests.factories import one_thread as one_thread

from .detectors import CONFIGS, SETTINGS
from .test_programs import detector_of, lowered, sample_images

every_detector = pytest.mark.parametrize("name", CONFIGS)


@cache
def program_of(name: str) -> DetectorProgram:
    return DetectorProgram.of(detector_of(name), lowered(name, "fqvit"))


def integer(name: str, backend: Backend = "native", threads: int = 1) -> IntegerDetector:
    return program_of(name).ready(threads, backend)


def test_results_do_not_depend_on_the_number_of_boxes_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    image = prepare(sample_images()[1], SETTINGS)
    whole = integer("cascade").detect(image)
    monkeypatch.setattr("fqvit.detect.fixed.reference.BOXES_AT_ONCE", 7)
    assert len(whole.boxes) > 7
    assert_equal(integer("cascade", "reference").detect(image), whole)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_threads_can_share_a_detector(backend: Backend) -> None:
    detector = integer("mask r-cnn", backend)
    images = [prepare(sample_images()[0].resize(size), SETTINGS) for size in ((96, 40), (96, 64), (96, 130), (96, 170))]
    expected = [detector.detect(image) for image in images]

    def some(start: int) -> list[IntegerFound]:
        return [detector.detect(images[(start + i) % 4]) for i in range(4)]

    with ThreadPoolExecutor(4) as pool:
        for start, found in enumerate(pool.map(some, range(4))):
            for i, one in enumerate(found):
                assert_equal(one, expected[(start + i) % 4])
    assert detector.kept_sizes == KEPT_SIZES


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_pyramid_that_is_valid_at_one_size_only_is_rejected_at_others(backend: Backend) -> None:
    small = resized(lowered("mask r-cnn", "fqvit").template, 32, 32)  # at this size, the last two levels have one cell each
    ops = (msgspec.structs.replace(op, x="rpn_head.relu@3") if op.y == "rpn_head.objectness@4" else op for op in small.ops)
    bad = Program(msgspec.structs.replace(small.header, ops=tuple(ops)), small.constants)
    detector = replace(program_of("mask r-cnn"), pyramid=bad).ready(1, backend)
    with pytest.raises(FqvitError, match="objectness@4.* at stride 64.* The file is damaged"):
        detector.detect(prepare(sample_images()[1], SETTINGS))


def test_thousands_of_proposals_and_no_proposals_work() -> None:
    low = lowered("mask r-cnn", "fqvit")
    heads = ([program.header for program in part] for part in (low.boxes, low.masks))
    many = msgspec.structs.replace(
        SETTINGS, short=160, proposals_a_level=9000, proposals=9000, proposal_iou=1.0, score=0.0, detections=300
    )
    constants = make_constants(many, low.template.header, *heads)
    program = replace(program_of("mask r-cnn"), settings=many, between=constants)
    image = prepare(sample_images()[0].resize((160, 160)), many)
    slow = ReferenceDetector(program)
    maps = slow.maps(image.pixels)
    count = len(propose(maps.objectness, maps.deltas, image.size, constants))
    assert count > 3000
    found = program.ready(1).detect(image)
    assert len(found.boxes) == 300 and (found.boxes >= 0).all() and (np.diff(found.scores) <= 0).all()

    nothing = slow.classify(maps.levels, np.zeros((0, 4), np.int64), image.size)
    assert len(nothing.boxes) == 0 and slow.mask_probabilities(maps.levels, nothing).shape[0] == 0


def correlation(a: NDArray[np.float64], b: NDArray[np.float32]) -> float:
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


@every_detector
def test_maps_correlate_with_float_maps(name: str) -> None:
    ours, exact = ReferenceDetector(program_of(name)), FloatNetworks(detector_of(name))
    image = prepare(sample_images()[1], SETTINGS)
    found, wanted = ours.maps(image.pixels), exact.maps(image.pixels)
    for a, b in zip(found, wanted, strict=True):
        assert [x.shape for x in a] == [x.shape for x in b] and all(correlation(x, y) > 0.97 for x, y in zip(a, b, strict=True))


def assert_equal(a: IntegerFound, b: IntegerFound) -> None:
    for x, y in ((a.boxes, b.boxes), (a.scores, b.scores), (a.labels, b.labels), (a.probabilities, b.probabilities)):
        assert x.dtype == y.dtype and x.shape == y.shape and (x == y).all()


@every_detector
def test_native_and_reference_give_the_same_detections(name: str) -> None:
    native, threaded, reference = integer(name), integer(name, threads=2), integer(name, "reference")
    count = 0
    for original in (*sample_images()[:2], sample_images()[0].resize((3, 1))):
        image = prepare(original, SETTINGS)
        found = reference.detect(image)
        assert_equal(native.detect(image), found)
        assert_equal(threaded.detect(image), found)
        count += len(found.boxes)
    assert count > 0


@every_detector
def test_images_of_every_size_are_accepted(name: str) -> None:
    detector = integer(name)
    for original in (*sample_images(), sample_images()[0].resize((1, 90)), sample_images()[0].resize((3, 1))):
        found = detector.detect(prepare(original, SETTINGS))
        d = found.detections
        assert len(d.boxes) == len(found.probabilities) <= SETTINGS.detections
        assert (found.height, found.width) == (original.height, original.width)
        assert (d.boxes >= 0).all() and (d.boxes <= [*original.size, *original.size]).all()
        assert (d.scores > SETTINGS.score).all() and (np.diff(d.scores) <= 0).all() and (d.scores <= 1).all()
        assert (d.boxes * 256 == found.boxes).all() and (d.scores * 2**24 == found.scores).all(), "floats are exact"
        assert len(coco_results(found, 1, SETTINGS)) == len(d.boxes)


class FloatBetweenPrograms:
    """Implement the protocol Networks with integer programs: only the arithmetic between the programs uses floats."""

    def __init__(self, name: str) -> None:
        low = lowered(name, "fqvit")
        self.low, self.stages = low, len(low.boxes)
        self.box_side, self.mask_side = low.boxes[0].input_shape[0], low.masks[0].input_shape[0]

    def maps(self, pixels: Pixels) -> Maps:
        padded = pad_pixels(pixels, SETTINGS)
        program = self.low.pyramid(padded.shape[0], padded.shape[1])
        found = [(output.kind, x[0]) for output, x in zip(program.header.outputs, values(program, padded[None]), strict=True)]
        return Maps(*([x for kind, x in found if kind == wanted] for wanted in ("map", "scores", "deltas")))

    def boxes(self, stage: int, rois: Floats32) -> tuple[Floats32, Floats32]:
        classes, deltas = values(self.low.boxes[stage], self.codes(self.low.boxes[stage], rois))
        return classes, deltas

    def masks(self, stage: int, rois: Floats32, labels: NDArray[np.int64]) -> Floats32:
        (logits,) = values(self.low.masks[stage], self.codes(self.low.masks[stage], rois))
        own: Floats32 = logits[np.arange(len(labels)), :, :, labels]
        return own

    def codes(self, head: Program, rois: Floats32) -> NDArray[np.uint8]:
        q = head.header.input
        assert q is not None
        return (np.floor(rois / q.scale + 0.5) + q.zero).clip(0, 2**q.bits - 1).astype(np.uint8)


def values(program: Program, x: NDArray[np.uint8]) -> list[Floats32]:
    outputs = zip(program.header.outputs, Engine(program, 1).run_all(x), strict=True)
    return [((codes.astype(np.float64) - output.zero) * output.scale).astype(np.float32) for output, codes in outputs]


@every_detector
def test_integer_and_float_arithmetic_between_programs_agree(name: str) -> None:
    detector, float_between = integer(name), FloatBetweenPrograms(name)
    for original in sample_images():
        image = prepare(original, SETTINGS)
        found, exact = detector.detect(image), detect(float_between, image, SETTINGS)
        a, b = found.detections, exact.detections
        overlap = pairwise_iou(a.boxes, b.boxes) * (a.labels[:, None] == b.labels)
        same, best = overlap.max(1) > 0.9, overlap.argmax(1)
        # Random weights give near ties: a box that NMS narrowly drops changes which other boxes are kept.
        assert abs(len(a.scores) - len(b.scores)) <= 3 and same.mean() > 0.9
        assert np.abs(a.scores - b.scores[best])[same].max() < 0.01
        assert np.abs(found.probabilities / 2**15 - exact.probabilities[best])[same].mean() < 0.003


def test_images_that_are_too_large_are_rejected() -> None:
    with pytest.raises(FqvitError, match="expected sides of 1 to 8192"):
        integer("mask r-cnn").detect(Input(np.zeros((1, 8193, 3), np.uint8), 1, 8193))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_parts_that_do_not_fit_together_are_rejected(backend: Backend) -> None:
    whole, low, other = program_of("mask r-cnn"), lowered("mask r-cnn", "fqvit"), lowered("cascade", "fqvit")
    parts: list[tuple[dict[str, Any], str]] = [
        ({"boxes": (low.template,)}, "takes pixels"),
        ({"boxes": other.boxes, "masks": other.masks}, "3 box heads, expected 1, one per stage"),
        ({"boxes": low.masks}, "(gives|has different outputs).*expected"),
        ({"pyramid": low.boxes[0]}, "no output of kind map"),
    ]
    for change, said in parts:
        with pytest.raises(FqvitError, match=said):
            replace(whole, **change).ready(1, backend)
    with pytest.raises(FqvitError, match="expected native or reference"):
        whole.ready(backend="onnx")  # type: ignore[arg-type]
