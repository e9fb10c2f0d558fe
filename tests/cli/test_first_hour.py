"""Mistakes of the first hour with fqvit: each ends in a sentence that says what to do, never in a traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fqvit as package
from fqvit.models.embedded import embedded_weights
from tests.cli.command_line import assert_rejected, fqvit
from tests.factories import embedded_program

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a program and a photo."""
    embedded_program("fmnist_vit").save(tmp_path / "a.fqvit")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3)).astype(np.uint8)).save(tmp_path / "cat.jpg")
    monkeypatch.chdir(tmp_path)
    return tmp_path


CALLS: dict[str, Callable[[], object]] = {
    "classify a path": lambda: package.Engine("a.fqvit").classify("cat.jpg"),  # type: ignore[arg-type]
    "run a path": lambda: package.Engine("a.fqvit").run("cat.jpg"),  # type: ignore[arg-type]
    "run paths": lambda: package.Engine("a.fqvit").run(["cat.jpg"]),  # type: ignore[arg-type]
    "run a picture": lambda: package.Engine("a.fqvit").run(Image.new("RGB", (40, 40))),  # type: ignore[arg-type]
    "run all of a picture": lambda: package.Engine("a.fqvit").run_all(Image.new("RGB", (40, 40))),  # type: ignore[arg-type]
    "buffers of a picture": lambda: package.Engine("a.fqvit").buffers(Image.new("RGB", (40, 40))),  # type: ignore[arg-type]
    "profile a path": lambda: package.Engine("a.fqvit").profile("cat.jpg"),  # type: ignore[arg-type]
    "run lists": lambda: package.Engine("a.fqvit").run([[1, 2], [3]]),  # type: ignore[arg-type]
    "load a number": lambda: package.Engine(3),  # type: ignore[arg-type]
    "run on the model": lambda: package.load("a.fqvit").run("cat.jpg"),  # type: ignore[arg-type]
    "run the reference": lambda: package.runtime.reference.run(package.Program.load("a.fqvit"), "cat.jpg"),  # type: ignore[arg-type]
    "load a photo": lambda: package.load("cat.jpg"),
    "load no recipe": lambda: package.load_recipe("nothing"),
    "load a loaded model with weights": lambda: package.load_model(package.load_model("fmnist_vit"), "w.safetensors"),
    "load a list": lambda: package.load_model([1]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", CALLS)
def test_mistakes_in_python_are_reported_in_one_line(name: str, place: Path) -> None:
    with pytest.raises(package.FqvitError) as caught:
        CALLS[name]()
    assert "expected" in str(caught.value) or "Pass" in str(caught.value) or "Use" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_errors_for_paths_and_pictures_recommend_fqvit_load(place: Path) -> None:
    for images in ("cat.jpg", Path("cat.jpg"), Image.new("RGB", (40, 40))):
        with pytest.raises(package.FqvitError, match=r"fqvit.load\(FILE\) takes paths and pictures"):
            package.Engine("a.fqvit").run(images)  # type: ignore[arg-type]
        assert len(package.load("a.fqvit").classify(images)) == 5


def test_a_loaded_model_is_returned_as_it_is() -> None:
    model = package.load_model("fmnist_vit")
    assert package.load_model(model) is model


def test_a_photo_is_not_called_a_damaged_program(place: Path) -> None:
    for command in ("inspect", "classify", "eval"):
        words = (command, "cat.jpg", "cat.jpg")[: 3 if command == "classify" else 2]
        done = fqvit(*words)
        assert_rejected(done, "cat.jpg: not a .fqvit file")
        assert "damaged" not in done.err


def test_the_error_for_a_missing_checkpoint_does_not_recommend_quantize(place: Path) -> None:
    for words in (("eval", "deit_tiny.safetensors"), ("classify", "deit_tiny.safetensors", "cat.jpg"), ("inspect", "d.pth")):
        done = fqvit(*words)
        assert_rejected(done, "no such file")
        assert "quantize -o" not in done.err
    assert_rejected(fqvit("inspect", "b.fqvit"), "make one with `fqvit quantize -o b.fqvit`")


def test_a_float_checkpoint_can_be_evaluated_by_its_path(place: Path) -> None:
    (place / "fmnist_vit.safetensors").write_bytes(embedded_weights("fmnist_vit").read_bytes())
    found = fqvit("eval", "fmnist_vit.safetensors", "--limit", "50", "--json").json
    assert (found["backend"], found["model"]) == ("float", "fmnist_vit")
    (place / "renamed.safetensors").write_bytes((place / "a.fqvit").read_bytes())
    assert fqvit("eval", "renamed.safetensors", "--limit", "50", "--json").json["backend"] == "native"


def test_exported_qdq_files_can_be_evaluated_and_notes_are_not_printed_as_warnings(place: Path) -> None:
    pytest.importorskip("onnxruntime")
    done = fqvit("export", "a.fqvit", "--to", "qdq", "-o", "a.onnx")
    assert done.code == 0 and done.err == "" and "sites with QuantizeLinear" in done.out
    assert fqvit("export", "a.fqvit", "--to", "qdq", "-o", "a.onnx", "--json").json["notes"] == done.out.splitlines()[1:]
    found = fqvit("eval", "a.onnx", "--limit", "200", "--json").json
    program = fqvit("eval", "a.fqvit", "--limit", "200", "--json").json
    assert found["backend"] == "qdq" and abs(found["top1"] - program["top1"]) <= 2.5


def test_bits_that_do_not_make_the_file_smaller_are_mentioned(place: Path) -> None:
    narrow = fqvit("quantize", "--bits", "4/8/4", "--images", "16", "-o", "n.fqvit")
    same = fqvit("quantize", "--bits", "7/8/4", "--images", "16", "-o", "s.fqvit")
    size = (place / "a.fqvit").stat().st_size
    assert (place / "n.fqvit").stat().st_size < 0.7 * size and "stored in 8" not in narrow.out
    assert (place / "s.fqvit").stat().st_size > 0.95 * size
    assert "7-bit weights are stored in 8 bits, so the file is as large as with 8-bit weights" in same.out


@pytest.mark.parametrize("name", ["golden", "knn", "near_duplicates", "run", "serve", "text_search"])
def test_examples_without_arguments_show_their_usage(name: str) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith(f"usage: python examples/{name}.py ")
