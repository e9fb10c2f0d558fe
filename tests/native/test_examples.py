"""The examples in C and Rust print the same classes and similarities as Python."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from fqvit.ir.program import Output, Program
from fqvit.runtime.reference import Reference
from tests.factories import images_for
from tests.native.compilers import ROOT, run, tool
from tests.native.golden import GOLDEN
from tests.native.library import Library

MODEL = GOLDEN / "tiny_v1.fqvit"
C99 = ("-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror")


@pytest.fixture(scope="module")
def c_program(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library.compile(ROOT / "examples" / "c" / "classify.c", tmp_path_factory.mktemp("c") / "classify", *C99)


@pytest.fixture(scope="module")
def similarity(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("similarity") / "similarity"
    return library.compile(ROOT / "examples" / "c" / "similarity.c", to, *C99, "-Wl,--no-as-needed", "-lm")


@pytest.fixture(scope="module")
def rust_program(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cargo, folder = tool("cargo"), tmp_path_factory.mktemp("rust")
    shutil.copytree(ROOT / "examples" / "rust", folder / "project", ignore=shutil.ignore_patterns("target"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FQVIT_PREFIX", str(library.prefix))
        patch.setenv("RUSTFLAGS", "-Dwarnings")
        manifest = folder / "project" / "Cargo.toml"
        run(cargo, "build", "-q", "--offline", "--locked", "--manifest-path", manifest, "--target-dir", folder / "target")
    return folder / "target" / "debug" / "classify"


@pytest.mark.parametrize("language", ["c", "rust"])
def test_an_example_prints_the_same_classes_as_python(language: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    example = request.getfixturevalue(f"{language}_program")
    program = Program.load(MODEL)
    assert program.classes is not None
    for i, pixels in enumerate(images_for(program.header.preprocess, 3)):
        Image.fromarray(pixels).save(tmp_path / f"{i}.ppm")
        logits = Reference(program).run(pixels[None])[0]
        best = np.argsort(-logits, kind="stable")[:3]
        expected = [f"{logits[k] * program.header.output.scale:8.3f}  {k}  {program.classes[k]}" for k in best]
        assert run(example, MODEL, tmp_path / f"{i}.ppm").splitlines() == expected


@pytest.mark.parametrize("language", ["c", "rust"])
def test_an_example_explains_mistakes(language: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    example = request.getfixturevalue(f"{language}_program")
    (tmp_path / "bad.ppm").write_bytes(b"P6 2 2 255\n123")
    (tmp_path / "text").write_text("no image")
    for words in (
        [],
        ["absent", "x"],
        [MODEL, "absent"],
        [MODEL, "bad.ppm"],
        [MODEL, "text"],
        [GOLDEN / "tokens_v1.fqvit", "x"],
    ):
        done = subprocess.run([example, *words], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.startswith("classify: ") and done.stderr.count("\n") == 1, done


@pytest.mark.parametrize("embedding", [Output("pool", "embedding", 0.25, 120), Output("head", "embedding", 0.5, name="scores")])
def test_similarity_in_c_equals_that_in_python(similarity: Path, embedding: Output, tmp_path: Path) -> None:
    plain = Program.load(MODEL)
    others = (Output("norm", "tokens", 0.5, name="tokens"), embedding)
    header = msgspec.structs.replace(plain.header, output=Output("blocks.0.norm1", "tokens", 0.5, name="a"), others=others)
    program = Program(header, {name: x for name, x in plain.constants.items() if name != "classes"})
    program.save(tmp_path / "model.fqvit")
    images = images_for(program.header.preprocess, 2)
    for i, pixels in enumerate(images):
        Image.fromarray(pixels).save(tmp_path / f"{i}.ppm")
    a, b = Reference(program).run_all(images)[2].astype(np.float64) - embedding.zero
    wanted = f"{embedding.label}: {a @ b / np.sqrt((a @ a) * (b @ b)):.6f}\n"
    assert run(similarity, tmp_path / "model.fqvit", tmp_path / "0.ppm", tmp_path / "1.ppm") == wanted


def test_similarity_in_c_explains_mistakes(similarity: Path, tmp_path: Path) -> None:
    for words, text in (
        ([], "expected a model and two images."),
        (["absent", "x", "x"], "absent: no such file."),
        ([MODEL, "x", "x"], "the model has no embedding. Quantize it with --output embedding."),
    ):
        done = subprocess.run([similarity, *words], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.startswith(f"similarity: {text}") and done.stderr.count("\n") == 1, done
