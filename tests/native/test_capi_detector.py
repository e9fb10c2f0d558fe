"""Call detectors through the C API with ctypes; compare with the detections stored in tests/golden and with Python."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fqvit import _native
from fqvit.detect.program import DetectorProgram
from tests.factories import assert_same
from tests.native.capi import ARGUMENT, FILE, OK, PROGRAM, Api, Image, LibraryError, Options
from tests.native.golden import GOLDEN
from tests.native.library import Library

DETECTORS = {name: GOLDEN / "detectors" / f"{name}_v1.fqvit" for name in ("cascade", "mask_rcnn", "opencv")}


class Description(ctypes.Structure):
    _fields_ = [
        ("model", c_char_p), ("source", c_char_p), ("recipe", c_char_p), ("header", c_char_p), ("fingerprint", c_char_p),
        ("instruction_set", c_char_p), ("threads", c_uint32), ("classes", c_uint32), ("stages", c_uint32),
        ("calibration_images", c_uint64), ("short_side", c_uint32), ("long_side", c_uint32), ("resize", c_char_p),
        ("max_detections", c_uint32), ("mask_side", c_uint32),
    ]  # fmt: skip


class Detection(ctypes.Structure):
    _fields_ = [
        ("box", c_int64 * 4), ("score", c_int64), ("label", c_int64), ("category", c_int64),
        ("probabilities", POINTER(c_int32)),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def api(library: Library) -> Api:
    made = Api(library.shared)
    made.lib.fqvit_detector_class_name.restype = c_char_p
    made.lib.fqvit_detections_count.restype = c_size_t
    return made


def check(api: Api, status: int) -> None:
    if status != OK:
        raise LibraryError(status, api.error())


@contextmanager
def loaded(api: Api, file: Path | bytes, options: Options | None = None) -> Iterator[c_void_p]:
    handle, chosen = c_void_p(0x1234), None if options is None else byref(options)
    if isinstance(file, bytes):
        check(api, api.lib.fqvit_detector_load_memory(file, c_size_t(len(file)), chosen, byref(handle)))
    else:
        check(api, api.lib.fqvit_detector_load(str(file).encode(), chosen, byref(handle)))
    yield handle
    api.lib.fqvit_detector_free(handle)


def image_of(pixels: NDArray[np.uint8], stride: int = 0) -> Image:
    height, width, channels = pixels.shape
    return Image(pixels.ctypes.data, width, height, channels, stride)


def detect(api: Api, handle: c_void_p, image: Image) -> dict[str, Any]:
    """Detect objects and return everything that the API gives as arrays."""
    found = c_void_p()
    check(api, api.lib.fqvit_detector_detect(handle, byref(image), byref(found)))
    side = describe(api, handle).mask_side
    out: dict[str, list[Any]] = {name: [] for name in ("boxes", "scores", "labels", "probabilities", "masks", "categories")}
    for i in range(api.lib.fqvit_detections_count(found)):
        one, mask = Detection(), np.full((image.height, image.width), 7, np.uint8)
        check(api, api.lib.fqvit_detections_get(found, c_size_t(i), byref(one), c_size_t(ctypes.sizeof(one))))
        check(api, api.lib.fqvit_detections_mask(found, c_size_t(i), c_void_p(mask.ctypes.data), c_size_t(mask.nbytes)))
        values = list(one.box), one.score, one.label, np.ctypeslib.as_array(one.probabilities, (side, side)).copy()
        for name, value in zip(out, (*values, mask, one.category), strict=True):
            out[name].append(value)
    api.lib.fqvit_detections_free(found)
    return {name: np.array(values) for name, values in out.items()}


def describe(api: Api, handle: c_void_p) -> Description:
    out = Description()
    check(api, api.lib.fqvit_detector_describe(handle, byref(out), c_size_t(ctypes.sizeof(out))))
    return out


@pytest.mark.parametrize("name", DETECTORS)
def test_golden_detectors_give_their_stored_detections(api: Api, name: str) -> None:
    expected = np.load(DETECTORS[name].with_suffix(".npz"))
    for file, threads in ((DETECTORS[name], 1), (DETECTORS[name].read_bytes(), 2)):
        with loaded(api, file, Options(ctypes.sizeof(Options), threads, None, 0)) as handle:
            for i, pixels in enumerate(expected["pictures"]):
                found = detect(api, handle, image_of(pixels))
                for part in ("boxes", "scores", "labels"):
                    assert_same(found[part], expected[f"{part}{i}"], f"{name}: {part}, found and stored")
                assert_same(found["probabilities"].astype(np.int32), expected[f"probabilities{i}"], f"{name}: probabilities")
                assert_same(np.packbits(found["masks"]), expected[f"masks{i}"], f"{name}: masks, found and stored")
                assert (found["categories"] == found["labels"] + 1).all()


@pytest.mark.parametrize("name", DETECTORS)
def test_a_description_has_the_values_that_python_reads(api: Api, name: str) -> None:
    program = DetectorProgram.load(DETECTORS[name])
    with loaded(api, DETECTORS[name]) as handle:
        found = describe(api, handle)
        assert (found.model.decode(), found.source.decode()) == (program.model, program.source)
        assert json.loads(found.recipe) == program.pyramid.header.recipe and found.header == program.encoded()
        assert found.fingerprint.decode() == program.fingerprint() and found.resize.decode() == program.resize
        assert (found.classes, found.stages, found.threads) == (program.classes, program.stages, 1)
        assert found.instruction_set.decode() == _native.instruction_sets()[0]
        assert (found.short_side, found.long_side) == (program.settings.short, program.settings.long)
        assert found.calibration_images == program.pyramid.header.images
        assert (found.max_detections, found.mask_side) == (program.between.detections, 2 * program.masks[0].input_shape[0])
        names = [api.lib.fqvit_detector_class_name(handle, c_uint32(i)) for i in range(found.classes + 1)]
        assert [name.decode() for name in names if name is not None] == list(program.settings.classes)


def test_gray_rgba_and_strided_copies_of_an_image_give_the_same_detections(api: Api) -> None:
    gray = np.random.default_rng(0).integers(0, 256, (50, 40)).astype(np.uint8)
    rgb = np.ascontiguousarray(np.repeat(gray[:, :, None], 3, 2))
    rgba = np.ascontiguousarray(np.concatenate([rgb, gray[:, ::-1, None]], 2))
    wide = np.zeros((50, 43, 3), np.uint8)
    wide[:, :40] = rgb
    with loaded(api, DETECTORS["opencv"]) as handle:
        expected = detect(api, handle, image_of(rgb))
        strided = Image(wide.ctypes.data, 40, 50, 3, 43 * 3)
        for image in (image_of(np.ascontiguousarray(gray[:, :, None])), image_of(rgba), strided):
            found = detect(api, handle, image)
            assert all(np.array_equal(found[part], expected[part]) for part in expected)


def test_detections_outlive_their_detector(api: Api) -> None:
    pixels, found = np.full((30, 30, 3), 90, np.uint8), c_void_p()
    with loaded(api, DETECTORS["mask_rcnn"]) as handle:
        check(api, api.lib.fqvit_detector_detect(handle, byref(image_of(pixels)), byref(found)))
    mask = np.empty((30, 30), np.uint8)
    for i in range(api.lib.fqvit_detections_count(found)):
        check(api, api.lib.fqvit_detections_mask(found, c_size_t(i), c_void_p(mask.ctypes.data), c_size_t(mask.nbytes)))
    api.lib.fqvit_detections_free(found)
    api.lib.fqvit_detections_free(found)
    assert api.lib.fqvit_detections_count(found) == 0 and "handle: unknown" in api.error()


def test_wrong_arguments_are_rejected(api: Api) -> None:
    pixels = np.zeros((20, 20, 3), np.uint8)
    with loaded(api, DETECTORS["mask_rcnn"]) as handle:
        wrong = {
            "20 x 0": Image(pixels.ctypes.data, 0, 20, 3, 0),
            "2 channels": Image(pixels.ctypes.data, 20, 20, 2, 0),
            f"a stride of 59, expected 60 to {2**40}": Image(pixels.ctypes.data, 20, 20, 3, 59),
            f"a stride of {2**40 + 1}, expected 60 to {2**40}": Image(pixels.ctypes.data, 20, 20, 3, 2**40 + 1),
            "image: null": Image(None, 20, 20, 3, 0),
        }
        for said, image in wrong.items():
            found = c_void_p(1)
            assert api.lib.fqvit_detector_detect(handle, byref(image), byref(found)) == ARGUMENT
            assert said in api.error() and found.value is None
        assert api.lib.fqvit_detector_detect(handle, byref(image_of(pixels)), None) == ARGUMENT
    found = c_void_p()
    assert api.lib.fqvit_detector_detect(handle, byref(image_of(pixels)), byref(found)) == ARGUMENT, "freed"
    for path, status, said in (
        (GOLDEN / "tiny_v1.fqvit", PROGRAM, "holds a classifier or an embedding model, not a detector"),
        (GOLDEN / "none.fqvit", FILE, "no such file"),
    ):
        with pytest.raises(LibraryError, match=said) as raised, loaded(api, path):
            pass
        assert raised.value.status == status
    small = Options(ctypes.sizeof(Options), 1, None, 1000)
    with loaded(api, DETECTORS["mask_rcnn"], small) as handle:
        assert api.lib.fqvit_detector_detect(handle, byref(image_of(pixels)), byref(found)) == PROGRAM
        assert "its buffers need" in api.error()
