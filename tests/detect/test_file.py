"""Tests of detector files: the same bits after loading, and one-line errors for damaged or malicious files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from fqvit.detect import opencv
from fqvit.detect.images import ResizeRule, resize
from fqvit.detect.results import coco_results
from fqvit.errors import FqvitError
from fqvit.ir.program import Program
from fqvit.runtime.native import Engine

pytest.importorskip("torch")

from fqvit.detect.program import DetectorProgram
from tests.factories import assert_same, calibration_of, float_model
from tests.factories import one_thread as one_thread
from tests.robustness.hostile import containers
from tests.robustness.hostile.allocated import at_most
from tests.robustness.hostile.containers import DETECTOR, Change, Json, Tensors, fingerprint_of, packed, unpacked

from .detectors import CONFIGS
from .saved import program
from .test_programs import sample_images

GOLDEN = Path(__file__).parent.parent / "golden" / "detectors"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_loaded_detector_equals_the_saved_one(name: str, tmp_path: Path) -> None:
    saved = program(name)
    saved.save(tmp_path / "d.fqvit")
    loaded = DetectorProgram.load(tmp_path / "d.fqvit")
    assert loaded.header == saved.header and loaded.fingerprint() == saved.fingerprint()
    assert loaded.constants().keys() == saved.constants().keys() and loaded.classes == 5
    for constant, array in saved.constants().items():
        assert loaded.constants()[constant].dtype == array.dtype
        assert_same(loaded.constants()[constant], array, constant)


def test_a_loaded_detector_gives_the_same_detections(tmp_path: Path) -> None:
    saved = program("cascade")
    saved.save(tmp_path / "d.fqvit")
    image = saved.prepare(sample_images()[0])
    before = saved.ready(1).detect(image)
    after = DetectorProgram.load(tmp_path / "d.fqvit").ready(1, "reference").detect(image)
    assert len(before.boxes) > 0
    assert coco_results(before, 1, saved.settings) == coco_results(after, 1, saved.settings)


def test_a_new_detector_stores_and_uses_the_resize_rule_of_opencv(tmp_path: Path) -> None:
    path, image = tmp_path / "d.fqvit", sample_images()[0]
    program("mask r-cnn").save(path)
    loaded = DetectorProgram.load(path)
    assert loaded.resize == loaded.header.resize == "opencv" and b'"resize":"opencv"' in loaded.encoded()
    pixels = np.asarray(image.convert("RGB"))
    found = loaded.prepare(image)
    assert_same(found.pixels, opencv.resize(pixels, *found.size), "prepared and resized as in OpenCV")
    assert (found.pixels != resize(pixels, *found.size)).any()


def test_a_file_without_a_resize_rule_uses_the_rounded_rule_and_is_saved_with_the_same_bytes(tmp_path: Path) -> None:
    path, image = GOLDEN / "mask_rcnn_v1.fqvit", sample_images()[0]
    loaded = DetectorProgram.load(path)
    assert loaded.resize == "rounded" and b'"resize":"r' not in loaded.encoded() and b'"resize":"o' not in loaded.encoded()
    found = loaded.prepare(image)
    assert_same(found.pixels, resize(np.asarray(image.convert("RGB")), *found.size), "prepared and rounded once")
    loaded.save(tmp_path / "again.fqvit")
    assert (tmp_path / "again.fqvit").read_bytes() == path.read_bytes()


def test_the_resize_rule_survives_saving(tmp_path: Path) -> None:
    whole, rules = program("mask r-cnn"), get_args(ResizeRule)
    saved = [dataclasses.replace(whole, resize=rule) for rule in rules]
    for one in saved:
        one.save(tmp_path / "d.fqvit")
        loaded = DetectorProgram.load(tmp_path / "d.fqvit")
        assert loaded.resize == one.resize and loaded.fingerprint() == one.fingerprint()
    assert len({one.fingerprint() for one in saved}) == len(rules) == 2


def test_saving_a_loaded_detector_again_gives_the_same_bytes(tmp_path: Path) -> None:
    program("mask r-cnn").save(tmp_path / "a.fqvit")
    DetectorProgram.load(tmp_path / "a.fqvit").save(tmp_path / "b.fqvit")
    assert (tmp_path / "a.fqvit").read_bytes() == (tmp_path / "b.fqvit").read_bytes()


def test_the_fingerprint_covers_every_part() -> None:
    whole = program("cascade")
    seen = {whole.fingerprint()}
    settings = msgspec.structs.replace(whole.settings, score=0.5)
    between = msgspec.structs.replace(whole.between, score=1)
    others: list[Json] = [{"model": "x"}, {"source": "x"}, {"settings": settings}, {"between": between}, {"resize": "rounded"}]
    others.append({"pyramid": with_changed_constant(whole.pyramid)})
    for kind, programs in (("boxes", whole.boxes), ("masks", whole.masks)):
        for stage, part in enumerate(programs):
            others.append({kind: (*programs[:stage], with_changed_constant(part), *programs[stage + 1 :])})
    for other in others:
        seen.add(dataclasses.replace(whole, **other).fingerprint())
    assert len(seen) == len(others) + 1


def with_changed_constant(program: Program) -> Program:
    name = next(iter(program.constants))
    return Program(program.header, {**program.constants, name: program.constants[name] ^ 1})


def test_a_detector_that_does_not_verify_is_not_saved(tmp_path: Path) -> None:
    whole = program("cascade")
    with pytest.raises(FqvitError, match="2 box heads, expected 3, one per stage"):
        dataclasses.replace(whole, boxes=whole.boxes[:2]).save(tmp_path / "d.fqvit")
    assert not list(tmp_path.iterdir())


def test_programs_and_detectors_are_not_confused(tmp_path: Path) -> None:
    path = tmp_path / "d.fqvit"
    program("mask r-cnn").save(path)
    for load in (Program.load, Engine):
        with pytest.raises(FqvitError, match=r"d\.fqvit: holds a detector.*fqvit detect eval"):
            load(path)
    model = float_model("vit")
    from fqvit.lowering.lower import lower

    lower(model, calibration_of(model)).save(path)
    with pytest.raises(FqvitError, match=r"d\.fqvit: holds a classifier.*fqvit eval"):
        DetectorProgram.load(path)
    with pytest.raises(FqvitError, match="no such file.*fqvit detect quantize"):
        DetectorProgram.load(tmp_path / "none.fqvit")


# Hostile files with correct fingerprints, which anybody can compute.


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("detector") / "d.fqvit"
    program("cascade").save(path)
    return path.read_bytes()


def rewritten(raw: bytes, change: Change) -> bytes:
    return containers.rewritten(raw, change, DETECTOR)


def assert_rejected(raw: bytes, folder: Path, match: str = ".") -> None:
    path = folder / "bad.fqvit"
    path.write_bytes(raw)
    with pytest.raises(FqvitError, match=match) as caught:
        DetectorProgram.load(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: ") and "\n" not in line and len(line) < 1000


def set_field(*keys: Any, value: Any) -> Change:
    def change(header: Json, _: Tensors) -> None:
        parent: Any = header
        for key in keys[:-1]:
            parent = parent[key]
        parent[keys[-1]] = value

    return change


def without(*keys: Any) -> Change:
    def change(header: Json, _: Tensors) -> None:
        parent: Any = header
        for key in keys[:-1]:
            parent = parent[key]
        del parent[keys[-1]]

    return change


def swap(one: str, other: str) -> Change:
    """Swap two parts and their constants."""

    def change(header: Json, tensors: Tensors) -> None:
        def slot(part: str) -> tuple[Any, Any]:
            name, _, stage = part.partition(".")
            return (header[name], int(stage)) if stage else (header, name)

        (a, i), (b, j) = slot(one), slot(other)
        a[i], b[j] = b[j], a[i]
        renamed = {}
        for name, value in tensors.items():
            part, _, rest = name.partition("/")
            renamed[f"{ {one: other, other: one}.get(part, part) }/{rest}"] = value
        tensors.clear()
        tensors.update(renamed)

    return change


def drop(part: str) -> Change:
    """Remove the constants of a part."""

    def change(_: Json, tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(f"{part}/")]:
            del tensors[name]

    return change


def retype(_: Json, tensors: Tensors) -> None:
    name = next(name for name in tensors if name.startswith("masks.1/") and name.endswith(".w"))
    shape = tensors[name][1]
    tensors[name] = ("F32", shape, b"\0" * 4 * int(np.prod(shape)))


def stray(name: str) -> Change:
    return lambda _, tensors: tensors.update({name: ("U8", [1], b"\0")})


def move_of(old: str, **fields: Any) -> Change:
    def change(header: Json, _: Tensors) -> None:
        next(move for move in header["pyramid"]["moves"].values() if move["kind"] == old).update(fields)

    return change


HOSTILE: dict[str, tuple[Change, str]] = {
    "a newer version": (set_field("version", value=3), "format version 3"),
    "no version": (without("version"), "format version None"),
    "an unknown field": (set_field("command", value="rm"), "unknown field command"),
    "an unknown setting": (set_field("settings", "more", value=1), "settings: .*unknown field more"),
    "an unknown constant": (set_field("between", "more", value=1), "between: .*unknown field more"),
    "an unknown field of a part": (set_field("boxes", 1, "more", value=1), r"boxes\[\S+\]: .*unknown field more"),
    "an unknown resize rule": (set_field("resize", value="nearest"), "resize: invalid enum value 'nearest'"),
    "a resize rule that is a number": (set_field("resize", value=1), "resize: expected str, got int"),
    "a resize rule that is null": (set_field("resize", value=None), "resize: expected str, got null"),
    "no settings": (without("settings"), "missing required field settings"),
    "no constants": (without("between"), "missing required field between"),
    "no pyramid": (without("pyramid"), "missing required field pyramid"),
    "no mask heads": (set_field("masks", value=[]), "belongs to no part"),
    "a float constant": (set_field("between", "score", value=0.5), "between.score: expected int, got float"),
    "a stride of 5": (set_field("between", "strides", value=[5, 8, 16, 32, 64]), "stride of 5"),
    "strides that do not match the levels": (set_field("between", "strides", value=[8, 16, 32, 64, 128]), "at stride 8"),
    "an anchor of 10^9 pixels": (set_field("between", "anchors", 0, 0, 0, value=10**9), "between.anchors"),
    "a shift of 63": (set_field("between", "classes", 0, value=[1, 63]), "between.classes"),
    "fewer anchors": (lambda header, _: [level.pop() for level in header["between"]["anchors"]], "for 2 anchors"),
    "logits that overflow": (set_field("between", "classes", value=[[2**31 - 1, 1]] * 3), "sums of class logits|does not fit"),
    "images of 100,000 pixels per side": (set_field("settings", "long", value=100_000), "images of 96 x 100000"),
    "a short side of 0": (set_field("settings", "short", value=0), "settings.short"),
    "a different mean": (set_field("settings", "mean", value=[0.1, 0.1, 0.1]), "mean or std"),
    "too few class names": (set_field("settings", "classes", value=["a", "b"]), "2 class names, expected one per class"),
    "a duplicate category": (set_field("settings", "categories", value=[1, 2, 3, 4, 4]), "a category occurs twice"),
    "a box head instead of a mask head": (swap("boxes.0", "masks.0"), "box heads take RoIs of different sizes"),
    "the pyramid instead of a head": (swap("pyramid", "boxes.0"), "."),
    "missing constants of a head": (drop("boxes.2"), r"boxes\.2: .*is missing"),
    "missing constants of the pyramid": (drop("pyramid"), "pyramid: .*is missing"),
    "a constant of an unknown part": (stray("boxes.3/x"), "'boxes.3/x' belongs to no part"),
    "a constant without a part": (stray("x"), "'x' belongs to no part"),
    "a constant with the name of a buffer": (stray("boxes.0/pixels"), r"boxes\.0: constant 'pixels' has the name of a buffer"),
    "float weights": (retype, "is F32: only integers"),
    "no moves": (without("pyramid", "moves"), "has a fixed image size"),
    "a different window in a move": (move_of("windows", window=4), "."),
    "a window of 0": (move_of("windows", window=0), "."),
    "a different kind of move": (move_of("merge", kind="second"), "."),
    "a head that takes pixels": (without("boxes", 0, "input"), "."),
    "a different RoI size": (set_field("boxes", 0, "input", "shape", value=[6, 6, 16]), "."),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_detector_gives_a_one_line_error(case: str, original: bytes, tmp_path: Path) -> None:
    change, match = HOSTILE[case]
    raw = rewritten(original, change)
    with at_most(50e6):
        assert_rejected(raw, tmp_path, match)


def test_the_rewriting_helper_makes_loadable_files(original: bytes, tmp_path: Path) -> None:
    (tmp_path / "d.fqvit").write_bytes(rewritten(original, set_field("source", value="elsewhere")))
    assert DetectorProgram.load(tmp_path / "d.fqvit").source == "elsewhere"


@pytest.mark.parametrize("text", ["", "[1]", '{"version": 1', '{"version": 1}', "[" * 100_000])
def test_json_that_is_not_a_detector_is_rejected(text: str, original: bytes, tmp_path: Path) -> None:
    _, _, tensors = unpacked(original, DETECTOR)
    assert_rejected(packed(text, fingerprint_of(text, tensors), tensors, DETECTOR), tmp_path)


def test_a_truncated_file_is_rejected(original: bytes, tmp_path: Path) -> None:
    for length in sorted({*range(0, 64, 7), *range(64, len(original), len(original) // 25), len(original) - 1}):
        assert_rejected(original[:length], tmp_path)


def test_a_flipped_bit_is_rejected(original: bytes, tmp_path: Path) -> None:
    for index in [*range(16), *np.random.default_rng(0).integers(16, len(original), 30).tolist(), len(original) - 1]:
        changed = bytearray(original)
        changed[index] ^= 1 << (index % 8)
        assert_rejected(bytes(changed), tmp_path)
