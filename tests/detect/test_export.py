"""Exports of detectors: ONNX files with detect.py, C and golden vectors give the bits of the engine."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fqvit.detect.export import vectors
from fqvit.detect.export.facts import input_size
from fqvit.detect.program import DetectorProgram
from fqvit.ir.program import INPUT
from fqvit.runtime.native import Engine
from tests.cli.command_line import assert_rejected, fqvit
from tests.factories import assert_same

pytest.importorskip("torch")

from .saved import program
from .test_programs import sample_images

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "detectors"


@pytest.fixture(scope="module", params=["mask r-cnn", "cascade"])
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a detector, two images of the same size and one of another size."""
    folder = tmp_path_factory.mktemp("home")
    program(request.param).save(folder / "d.fqvit")
    first, other = sample_images()[:2]
    first.save(folder / "000000000012.png")
    first.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(folder / "000000000034.png")
    other.save(folder / "other.png")
    return folder


def detect_py(folder: Path, *words: object, cwd: Path) -> Any:
    command = [sys.executable, folder / "detect.py", *words]
    return subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)


def need_onnx() -> None:
    pytest.importorskip("onnx", reason="needs the package onnx")
    pytest.importorskip("onnxruntime", reason="needs the package onnxruntime")


def test_detect_py_writes_the_same_bytes_as_predict(home: Path, tmp_path: Path) -> None:
    need_onnx()
    images = ("000000000012.png", "000000000034.png")
    with Image.open(home / images[0]) as image:
        size = f"{image.height}x{image.width}"
    done = fqvit("export", home / "d.fqvit", "--to", "onnx", "--size", size, "-o", tmp_path / "out", "--json").json
    stages = DetectorProgram.load(home / "d.fqvit").stages
    assert done["files"] == 4 + 2 * stages and done["to"] == "onnx"
    assert detect_py(tmp_path / "out", *images, "-o", tmp_path / "a.json", cwd=home).returncode == 0
    command = [sys.executable, "-m", "fqvit", "detect", "predict", "d.fqvit", *images, "-o", str(tmp_path / "b.json")]
    subprocess.run(command, cwd=home, check=True, capture_output=True)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert len(json.loads((tmp_path / "a.json").read_text())) > 10
    printed = detect_py(tmp_path / "out", *images, cwd=home)
    assert printed.stdout == (tmp_path / "a.json").read_text()
    wrong = detect_py(tmp_path / "out", "other.png", cwd=home)
    assert wrong.returncode == 1 and "Export again with --size 80x60" in wrong.stderr and "Traceback" not in wrong.stderr
    assert detect_py(tmp_path / "out", cwd=home).stderr.startswith("usage: python detect.py")
    text = (tmp_path / "out" / "detect.py").read_text()
    assert "fqvit." not in text.replace("fqvit.\n", ""), "the file stands alone"


def test_detect_py_resizes_by_both_rules(tmp_path: Path) -> None:
    need_onnx()
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (47, 61, 3), np.uint8))
    image.save(tmp_path / "1.png")
    for name in ("opencv_v1", "mask_rcnn_v1"):
        path = GOLDEN / f"{name}.fqvit"
        out = tmp_path / name
        assert fqvit("export", path, "--to", "onnx", "--size", "47x61", "-o", out).code == 0
        found = detect_py(out, "1.png", cwd=tmp_path)
        assert found.returncode == 0, found.stderr
        (tmp_path / "b.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "fqvit", "detect", "predict", str(path), "1.png", "-o", "b.json"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        assert found.stdout == (tmp_path / "b.json").read_text()


@pytest.mark.parametrize("flags", ["-O2", "-O1 -fsanitize=undefined,address -fno-sanitize-recover=all"])
def test_c_gives_the_bits_of_the_engine(home: Path, tmp_path: Path, flags: str) -> None:
    if shutil.which("make") is None or shutil.which("cc") is None:
        pytest.skip("needs make and a C compiler")
    detector = DetectorProgram.load(home / "d.fqvit")
    with Image.open(home / "000000000012.png") as image:
        original, pixels = (image.height, image.width), detector.prepare(image).pixels
        expected = detector.ready(1).detect_image(image)
    out = tmp_path / "c"
    assert fqvit("export", home / "d.fqvit", "--to", "c", "--size", f"{original[0]}x{original[1]}", "-o", out).code == 0
    made = subprocess.run(["make", "-s", f"CFLAGS={flags}"], cwd=out, capture_output=True, text=True, check=False)
    if "sanitize" in flags and made.returncode and "cannot find" in made.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert made.returncode == 0, made.stderr
    (tmp_path / "p.rgb").write_bytes(pixels.tobytes())
    words = ["./detect", "../p.rgb", *map(str, (*pixels.shape[:2], *original)), "../masks.bin"]
    done = subprocess.run(words, cwd=out, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = np.array([line.split() for line in done.stdout.splitlines()], np.int64)
    assert_same(rows[:, 0], expected.labels, "labels")
    assert_same(rows[:, 1], expected.scores, "scores")
    assert_same(rows[:, 2:], expected.boxes, "boxes")
    masks = np.fromfile(tmp_path / "masks.bin", np.uint8).reshape(-1, *original)
    assert_same(masks.astype(bool), np.array(list(expected.masks())), "masks")
    for wrong, said in (
        (words[:3], "usage"),
        ([*words[:2], "20", "20"], "expected height"),
        (["./detect", "no", *words[2:4]], "no:"),
    ):
        failed = subprocess.run(wrong, cwd=out, capture_output=True, text=True, check=False)
        assert failed.returncode == 2 and said in failed.stderr
    # A compiled export is replaced, too.
    assert fqvit("export", home / "d.fqvit", "--to", "c", "-o", out).code == 0


def test_the_default_size_is_landscape_of_the_largest_size() -> None:
    detector = program("mask r-cnn")
    assert input_size(detector, None) == (96, 160)
    assert input_size(detector, (60, 40)) == input_size(detector, (480, 320)) == (160, 96)


def test_vectors_of_integer_parts_are_those_of_the_engine(home: Path, tmp_path: Path) -> None:
    image = home / "other.png"
    done = fqvit("export", home / "d.fqvit", "--to", "vectors", "--image", image, "-o", tmp_path / "v")
    assert done.code == 0, done.err
    manifest = json.loads((tmp_path / "v" / "manifest.json").read_text())
    arrays: dict[str, dict[str, Any]] = {}
    for part, entries in manifest["parts"].items():
        for name, entry in entries.items():
            data = (tmp_path / "v" / entry["file"]).read_bytes()
            assert hashlib.sha256(data).hexdigest() == entry["sha256"]
            arrays.setdefault(part, {})[name] = np.load(tmp_path / "v" / entry["file"])
            assert list(arrays[part][name].shape) == entry["shape"]
    detector = DetectorProgram.load(home / "d.fqvit")
    with Image.open(image) as opened:
        found = detector.ready(1).detect_image(opened)
    assert_same(arrays["rescale"]["boxes"], found.boxes, "boxes")
    assert_same(arrays["select"]["scores"], found.scores, "scores")
    assert_same(arrays["select"]["labels"], found.labels, "labels")
    assert_same(arrays["probabilities"]["probabilities"], found.probabilities, "probabilities")
    masks = np.unpackbits(arrays["paste"]["masks"], axis=-1)[..., : found.width].astype(bool)
    assert_same(masks, np.array(list(found.masks())), "masks")
    names = [f"roi_align_boxes_{i}" for i in range(detector.stages)] + [f"masks_{i}" for i in range(detector.stages)]
    assert {"resize", "pad", "pyramid", "propose", *names} <= set(arrays) and manifest["format"] == "fqvit detector vectors 1"
    assert manifest["constants"]["proposals"] == detector.between.proposals


def test_vectors_of_networks_are_those_of_the_engine(home: Path, tmp_path: Path) -> None:
    detector = DetectorProgram.load(home / "d.fqvit")
    vectors.export(detector, tmp_path / "v")
    for name, part in detector.parts():
        folder = tmp_path / "v" / "networks" / name
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["fingerprint"] == part.fingerprint()
        buffers = {key: np.load(folder / entry["file"]) for key, entry in manifest["buffers"].items()}
        outputs = Engine(part, 1).run_all(buffers[INPUT][None])
        for output, found in zip(part.header.outputs, outputs, strict=True):
            assert_same(found[0], buffers[output.buffer], f"{name} {output.buffer}")
    fqvit("export", home / "d.fqvit", "--to", "vectors", "-o", tmp_path / "v")  # replaces an earlier export
    (tmp_path / "v" / "mine.txt").write_text("x")
    assert_rejected(fqvit("export", home / "d.fqvit", "--to", "vectors", "-o", tmp_path / "v"), "mine.txt")


def test_mistakes_are_reported_in_one_line(home: Path, tmp_path: Path) -> None:
    file = home / "d.fqvit"
    assert_rejected(fqvit("export", file, "--to", "qdq"), "--to qdq", "not available for detectors")
    assert_rejected(fqvit("export", file, "--to", "onnx", "--size", "big"), "--size big")
    assert_rejected(fqvit("export", file, "--to", "c", "--prefix", "mine"), "--prefix", "not available for detectors")
    assert_rejected(fqvit("export", file, "--to", "vectors", "--size", "32x32"), "--size", "onnx or c")
    assert_rejected(fqvit("export", file, "--to", "vectors", "--image", "none.png", "-o", tmp_path / "v"), "none.png")
    assert_rejected(fqvit("export", file, "--to", "onnx", "-o", tmp_path / "no" / "x"), "no such folder")
    assert not list(tmp_path.iterdir())
