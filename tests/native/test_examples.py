"""The examples in C and Rust print the same classes as Python."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fqvit.ir.program import Program
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
