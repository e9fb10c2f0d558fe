"""The command fqvit-run gives the same classes and integers as the Python package, and a one-line error for every mistake."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fqvit import _native
from fqvit.ir.program import Output, Program
from fqvit.runtime.reference import Reference
from tests.factories import assert_same, embedded_program, images_for, one_thread  # noqa: F401
from tests.native.compilers import run
from tests.native.golden import GOLDEN
from tests.native.library import Library

TINY = GOLDEN / "tiny_v1.fqvit"


@pytest.fixture(scope="module")
def command(library: Library) -> Path:
    return library.command


@pytest.fixture
def image(tmp_path: Path) -> Path:
    return save(tmp_path / "image.ppm", 30, 41)


def save(path: Path, height: int, width: int, seed: int = 0) -> Path:
    """Write smooth random pixels as PPM, or as PGM if the path ends in .pgm."""
    channels = 1 if path.suffix == ".pgm" else 3
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 5, channels), np.uint8).squeeze())
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(path)
    return path


def results(command: Path, *words: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run(command, *map(str, words), "--json").splitlines()]


def rejected(command: Path, *words: object, **options: Any) -> str:
    """Return the one line that the command writes when it fails."""
    done = subprocess.run([command, *words], stderr=subprocess.PIPE, check=False, timeout=60, **options)
    text = done.stderr.decode()
    assert done.returncode == 2 and text.startswith("fqvit-run: ") and text.count("\n") == 1 and text.endswith(".\n"), text
    return text[len("fqvit-run: ") : -1]


def logits_of(program: Program, path: Path) -> NDArray[Any]:
    with Image.open(path) as image:
        logits: NDArray[Any] = Reference(program).run(program.header.preprocess.apply(image)[None])[0]
    return logits


@pytest.mark.parametrize("isa", _native.instruction_sets())
def test_top_5_and_logits_match_python(command: Path, tmp_path: Path, isa: str) -> None:
    program, file = embedded_program("fmnist_vit"), tmp_path / "fmnist.fqvit"
    program.save(file)
    paths = [save(tmp_path / name, 28 + 9 * i, 40 - 5 * i, i) for i, name in enumerate(("a.ppm", "b.pgm", "c.ppm", "d.pgm"))]
    found = results(command, file, *paths, "--isa", isa, "--threads", 2, "--repeat", 2, "-o", tmp_path / "logits")
    expected = np.stack([logits_of(program, path) for path in paths])
    assert_same(np.fromfile(tmp_path / "logits", np.int32).reshape(expected.shape), expected, "logits")
    assert program.classes is not None
    for one, path, logits in zip(found, paths, expected, strict=True):
        best = np.argsort(-logits, kind="stable")[:5]
        assert [row["class"] for row in one["top"]] == best.tolist()
        assert [row["logit"] for row in one["top"]] == logits[best].tolist()
        assert [row["name"] for row in one["top"]] == [program.classes[i] for i in best]
        values = [row["value"] for row in one["top"]]
        assert values == pytest.approx((logits[best] * program.header.output.scale).tolist(), rel=1e-5)
        assert (one["image"], one["isa"], one["threads"], one["output"]) == (str(path), isa, 2, "logits")
        assert (one["model"], one["shape"]) == (program.header.model, list(logits.shape))
        assert one["fingerprint"] == program.fingerprint()
        assert one["run_ms"] > 0 and one["load_ms"] > 0 and one["preprocess_ms"] >= 0


def test_the_table_names_the_best_classes(command: Path, image: Path) -> None:
    first, *rows = run(command, TINY, image, "--top", "2").splitlines()
    logits = logits_of(Program.load(TINY), image)
    assert first.startswith(f"{image}: vit, ")
    assert [int(row.split()[1]) for row in rows] == np.argsort(-logits, kind="stable")[:2].tolist()
    assert all(row.split()[2] in "abcdé" for row in rows)


def test_ties_go_to_the_class_with_the_lower_number(command: Path, image: Path, tmp_path: Path) -> None:
    program = Program.load(TINY)
    zeros = {name: np.zeros_like(array) for name, array in program.constants.items() if name in ("head.w", "head.bias")}
    assert len(zeros) == 2
    Program(program.header, {**program.constants, **zeros}).save(tmp_path / "ties.fqvit")
    (one,) = results(command, tmp_path / "ties.fqvit", image, "--top", 100)
    assert [(row["class"], row["logit"]) for row in one["top"]] == [(i, 0) for i in range(5)]


def test_features_are_printed_as_json_and_written_to_a_file(command: Path, image: Path, tmp_path: Path) -> None:
    program, out = Program.load(GOLDEN / "tokens_v1.fqvit"), tmp_path / "tokens"
    text = run(command, GOLDEN / "tokens_v1.fqvit", image)
    assert text.splitlines()[1] == "  tokens: u8 [10, 16]; print it with --json or write it with -o FILE"
    (one,) = results(command, GOLDEN / "tokens_v1.fqvit", image, "-o", out)
    expected, output = logits_of(program, image), program.header.output
    assert (one["output"], one["kind"], one["dtype"], one["shape"]) == ("tokens", "tokens", "u8", [10, 16])
    assert (one["scale"], one["zero_point"]) == (output.scale, output.zero) and "top" not in one
    assert one.get("alpha") == (None if output.alpha is None else program.constants[output.alpha].tolist())
    assert_same(np.array(one["integers"]).reshape(10, 16), expected, "printed tokens")
    assert_same(np.fromfile(out, np.uint8).reshape(10, 16), expected, "written tokens")


def test_every_output_of_a_model_can_be_selected(command: Path, image: Path, tmp_path: Path) -> None:
    program, file = Program.load(TINY), tmp_path / "several.fqvit"
    site = program.header.sites["blocks.0.add2"]
    assert site.alpha is not None
    others = program.header.output, Output("blocks.0.add2", "tokens", site.scale[0], int(site.zero[0]), site.alpha, "tokens@0")
    header = msgspec.structs.replace(
        program.header, output=Output("pool", "embedding", 0.25, 7, name="embedding"), others=others
    )
    program = Program(header, program.constants)
    program.save(file)
    with Image.open(image) as picture:
        expected = Reference(program).run_all(program.header.preprocess.apply(picture)[None])
    lines = run(command, file, image).splitlines()
    assert lines[1:] == [
        "  embedding: u8 [24]; print it with --json or write it with -o FILE",
        "  other outputs: logits, tokens@0 (select one with --output NAME)",
    ]
    for output, wanted in zip(program.header.outputs, expected, strict=True):
        (one,) = results(command, file, image, "--output", output.label, "-o", tmp_path / "out")
        assert (one["output"], one["kind"]) == (output.label, output.kind)
        assert_same(np.fromfile(tmp_path / "out", wanted.dtype).reshape(wanted[0].shape), wanted[0], output.label)
        if output.kind != "logits":
            assert one["integers"] == wanted[0].ravel().tolist()
            assert one.get("alpha") == (None if output.alpha is None else program.constants[output.alpha].tolist())
    assert results(command, file, image, "--output", "logits", "--top", 1)[0]["top"][0]["class"] == expected[1][0].argmax()
    assert results(command, file, image)[0]["output"] == "embedding"
    said = "--output: class: the model has no such output, expected one of embedding, logits, tokens@0."
    assert rejected(command, file, image, "--output", "class") == said


def test_file_names_may_contain_any_bytes(command: Path, image: Path, tmp_path: Path) -> None:
    names = [b'quo"te\\.ppm', b"new\nline\x1b[31m.ppm", "é😀.ppm".encode(), b"not\xffutf8\xed\xa0\x80.ppm"]
    for name in names:
        (tmp_path / os.fsdecode(name)).write_bytes(image.read_bytes())
    done = subprocess.run([command, TINY, *names, "--json"], cwd=tmp_path, capture_output=True, check=True).stdout
    assert [json.loads(line)["image"] for line in done.decode().splitlines()] == [
        name.decode("utf-8", "replace") for name in names
    ]
    assert b"\x1b" not in subprocess.run([command, TINY, names[1]], cwd=tmp_path, capture_output=True, check=True).stdout
    image.rename(tmp_path / "--json")
    assert subprocess.run([command, "--", TINY, "--json"], cwd=tmp_path, capture_output=True, check=True).stdout.startswith(
        b"--json: vit"
    )


def test_help_version_and_instruction_sets_are_printed(command: Path) -> None:
    assert run(command, "--help").startswith("usage: fqvit-run MODEL.fqvit IMAGE.ppm...")
    assert all(len(line) <= 110 for line in run(command, "--help").splitlines())
    assert run(command, "--version") == f"fqvit-run {_native.version}\n"
    assert run(command, "--isa", "list").split() == _native.instruction_sets()


@pytest.mark.parametrize(
    "words, text",
    [
        ([], "expected a model and at least one image. fqvit-run --help shows how."),
        ([TINY], "expected a model and at least one image. fqvit-run --help shows how."),
        ([TINY, "x.ppm", "--fast"], "--fast: unknown option. fqvit-run --help lists the options."),
        ([TINY, "x.ppm", "--top"], "--top: no value. fqvit-run --help lists the options."),
        ([TINY, "x.ppm", "--top", "0"], "--top: 0, expected a number from 1 to 1000000."),
        ([TINY, "x.ppm", "--top", "3x"], "--top: 3x, expected a number from 1 to 1000000."),
        ([TINY, "x.ppm", "--threads", "257"], "--threads: 257, expected a number from 1 to 256."),
        ([TINY, "x.ppm", "--repeat", "99999999999999999999"], "--repeat: 99999999999999999999, expected a number from 1 to"),
        ([TINY, "x.ppm", "--isa", "sse9"], "instruction set sse9: not in this build or not on this CPU, expected one of"),
        (["absent.fqvit", "x.ppm"], "absent.fqvit: no such file. Check the path, or make one with "),
        ([GOLDEN / "detectors" / "mask_rcnn_v1.fqvit", "x.ppm"], "holds a detector, not a classifier."),
        ([TINY, "absent.ppm"], "absent.ppm: cannot be opened (No such file or directory). Check the path."),
        ([TINY, GOLDEN], "cannot be read (Is a directory). Check the path."),
    ],
)  # fmt: skip
def test_mistakes_are_explained_in_one_line(command: Path, words: list[object], text: str, tmp_path: Path) -> None:
    assert text in rejected(command, *words, cwd=tmp_path)


@pytest.mark.parametrize(
    "data, text",
    [
        (b"", "not a binary PPM or PGM image (P6 or P5)."),
        (b"P3 1 1 255 1 2 3", "not a binary PPM or PGM image (P6 or P5)."),
        (b"\x89PNG\r\n", "not a binary PPM or PGM image (P6 or P5)."),
        (b"P6", "its header is damaged"),
        (b"P6 # comment without an end", "its header is damaged"),
        (b"P6 0 4 255\n", "its header is damaged"),
        (b"P6 -4 4 255\n", "its header is damaged"),
        (b"P6 4x4 255\n", "its header is damaged"),
        (b"P6 4194305 1 255\n", "its header is damaged, expected width and height up to 4194304."),
        (b"P6 99999999999999999999999 1 255\n", "its header is damaged"),
        (b"P6 2 2 65535\n" + bytes(24), "its samples do not have 8 bits, expected a maximum of 255."),
        (b"P6 2 2 1\n" + bytes(24), "its samples do not have 8 bits"),
        (b"P6 2 2 255\n" + bytes(11), "it has fewer pixels than its header says."),
        (b"P6 4194304 4194304 255\n" + bytes(11), "it has fewer pixels than its header says."),  # 52 TB
    ],
)
def test_bad_images_are_explained_in_one_line(command: Path, data: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.ppm").write_bytes(data)
    assert f"bad.ppm: {text}" in rejected(command, TINY, "bad.ppm", cwd=tmp_path)


def test_headers_may_have_comments_and_any_whitespace(command: Path, tmp_path: Path) -> None:
    pixels = images_for(Program.load(TINY).header.preprocess, 1)[0]
    data = b"P6 # made by hand\n#another\n 12\t# width\r\n12\v255\n" + pixels.tobytes() + b"more"
    (tmp_path / "image.ppm").write_bytes(data)
    (one,) = results(command, TINY, tmp_path / "image.ppm", "--top", 1)
    assert one["top"][0]["logit"] == Reference(Program.load(TINY)).run(pixels[None]).max()


def test_a_bad_image_leaves_the_output_file_alone(command: Path, image: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"before")
    rejected(command, TINY, image, tmp_path / "absent", "-o", out, stdout=subprocess.DEVNULL)
    assert out.read_bytes() == b"before"


def test_a_full_disk_is_reported(command: Path, image: Path, tmp_path: Path) -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("needs /dev/full")
    # A link protects the device: a bug that removes the output after an error would remove /dev/full itself, if run by root.
    (tmp_path / "full").symlink_to("/dev/full")
    text = rejected(command, TINY, image, "-o", tmp_path / "full", stdout=subprocess.DEVNULL)
    assert text == f"{tmp_path}/full: cannot be written (No space left on device)."
    assert (tmp_path / "full").is_symlink()
    with open("/dev/full", "w") as full:
        for words in ([TINY, image], [TINY, image, "--json"], ["--help"], ["--version"], ["--isa", "list"]):
            assert rejected(command, *words, stdout=full) == "standard output: cannot be written (No space left on device)."
    assert "cannot be written (No such file or directory)" in rejected(
        command, TINY, image, "-o", tmp_path / "a/b", stdout=subprocess.DEVNULL
    )
