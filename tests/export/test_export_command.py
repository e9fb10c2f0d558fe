"""Tests of `fqvit export` and of `fqvit eval` on exported ONNX files."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fqvit.ir.program import Program
from fqvit.lowering.lower import lower
from fqvit.runtime.reference import run
from tests.cli.command_line import assert_rejected, fqvit
from tests.factories import calibration_of, float_model, images_for, one_thread  # noqa: F401

CLASSES = ("a", "b", "c", "d", "e")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = float_model("vit", classes=CLASSES)
    path = tmp_path_factory.mktemp("export") / "small.fqvit"
    lower(model, calibration_of(model, "fqvit")).save(path)
    return path


@pytest.fixture(scope="module")
def data(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of ten images, one sub-folder per predicted class. The first image is in the wrong sub-folder."""
    folder = tmp_path_factory.mktemp("data")
    program = Program.load(file)
    images = images_for(program.header.preprocess, 10)
    answers = run(program, images).argmax(-1)
    for name in CLASSES:
        (folder / name).mkdir()
    for i, (image, answer) in enumerate(zip(images, answers)):
        Image.fromarray(image).save(folder / CLASSES[(answer + (i == 0)) % 5] / f"{i}.png")
    for name in CLASSES:
        if not any((folder / name).iterdir()):
            (folder / name).rmdir()
    return folder


@pytest.fixture
def exported(file: Path, tmp_path: Path) -> Path:
    pytest.importorskip("onnx", reason="needs the package onnx")
    pytest.importorskip("onnxruntime", reason="needs the package onnxruntime")
    out = tmp_path / "small.onnx"
    done = fqvit("export", file, "--to", "onnx", "-o", out)
    assert done.code == 0, done.err
    return out


def test_an_exported_file_can_be_evaluated_without_the_program(exported: Path, file: Path, data: Path) -> None:
    found = fqvit("eval", exported, "--data", data, "--json").json
    assert (found["top1"], found["images"], found["backend"], found["model"]) == (90.0, 10, "onnx", "vit")
    assert fqvit("eval", exported, "--data", data, "--backend", "onnx", "--json").json["top1"] == 90.0
    assert fqvit("eval", file, "--data", data, "--backend", "onnx", "--json").json["top1"] == 90.0
    assert fqvit("eval", file, "--data", data, "--json").json["top1"] == 90.0


def test_a_session_matches_the_reference_and_has_the_header_fields_of_the_program(exported: Path, file: Path) -> None:
    from fqvit.errors import FqvitError
    from fqvit.runtime.onnx import Session

    program, session = Program.load(file), Session(exported, threads=1)
    assert session.classes == CLASSES and session.preprocess == program.header.preprocess
    assert session.output == program.header.output and session.output_shape == (5,)
    images = images_for(session.preprocess, 3)
    assert np.array_equal(session.run(images), run(program, images))
    assert session.run(images[:0]).shape == (0, 5)
    with pytest.raises(FqvitError, match="expected uint8"):
        session.run(images[:, :3])


def test_export_reports_file_size_and_fingerprint(
    exported: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = fqvit("export", file, "--to", "onnx", "--json").json
    assert said["out"] == "small.onnx" and said["bytes"] == exported.stat().st_size and said["files"] == 1
    assert said["fingerprint"] == Program.load(file).fingerprint()
    assert "small.onnx: " in fqvit("export", file, "--to", "onnx").out
    assert fqvit("export", file, "--to", "c", "--prefix", "shoes").code == 0
    assert "void shoes_run(" in (tmp_path / "small_c" / "model.h").read_text()


def test_mistakes_give_one_line_errors(exported: Path, file: Path, tmp_path: Path) -> None:
    assert_rejected(fqvit("export", file, "--to", "onnx", "-o", tmp_path / "none" / "x.onnx"), "no such folder")
    assert_rejected(fqvit("export", tmp_path / "none.fqvit", "--to", "onnx", "-o", tmp_path / "x.onnx"), "none.fqvit")
    assert_rejected(fqvit("export", file, "--to", "onnx", "--prefix", "shoes"), "--prefix: only valid with --to c")
    assert_rejected(
        fqvit("export", file, "--to", "c", "-o", tmp_path / "c", "--prefix", "a b"), "prefix 'a b'", "such as 'my_model'"
    )
    assert_rejected(fqvit("eval", exported, "--backend", "native"), "only runs with --backend onnx")
    assert_rejected(fqvit("eval", tmp_path / "none.onnx"), "no such file")
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(exported.read_bytes()[:1000])
    assert_rejected(fqvit("eval", broken), "broken.onnx", "cannot load it")


def test_onnx_files_without_fqvit_metadata_are_rejected(exported: Path, tmp_path: Path) -> None:
    import onnx

    proto = onnx.load(exported)
    del proto.metadata_props[:]
    other = tmp_path / "other.onnx"
    onnx.save(proto, other)
    assert_rejected(fqvit("eval", other), "has no fqvit metadata")


def test_a_missing_package_is_reported_with_the_command_to_install_it(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("fqvit.export")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnx", None)
    for words in (("export", file, "--to", "onnx", "-o", tmp_path / "x.onnx"), ("eval", file, "--backend", "onnx")):
        assert_rejected(fqvit(*words), "needs onnx, which is not installed", 'pip install "fqvit[onnx]"')
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    (tmp_path / "x.onnx").write_bytes(b"")
    assert_rejected(fqvit("eval", tmp_path / "x.onnx"), "needs onnxruntime, which is not installed")
