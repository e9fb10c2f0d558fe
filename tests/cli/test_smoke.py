"""Smoke-test the command line for `make check`: run one model through quantize, eval, inspect, classify and export."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from PIL import Image

from fqvit.models import embedded
from fqvit.runtime.native import Engine
from tests.cli.command_line import assert_rejected, fqvit


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smoke") / "model.fqvit"
    done = fqvit("quantize", "fmnist_vit", "--images", 32, "-o", path)
    assert done.code == 0, done.err
    return path


def test_eval_measures_the_quantized_model(program: Path) -> None:
    found = fqvit("eval", program, "--limit", 100, "--json").json
    assert found["images"] == 100 and found["top1"] > 80 and found["top5"] >= found["top1"] and found["seconds"] > 0


def test_inspect_finds_no_float_ops(program: Path) -> None:
    assert fqvit("inspect", program, "--json").json["float_ops"] == 0


def test_classify_ranks_five_classes(program: Path, tmp_path: Path) -> None:
    Image.fromarray(embedded.test_images()[0][0, :, :, 0]).save(tmp_path / "image.png")
    (answer,) = fqvit("classify", program, tmp_path / "image.png", "--json").json["results"]
    assert len(answer["top"]) == 5


def test_classify_prints_all_logits_as_integers_if_requested(program: Path, tmp_path: Path) -> None:
    pixels = embedded.test_images()[0][:1]
    Image.fromarray(pixels[0, :, :, 0]).save(tmp_path / "image.png")
    found = fqvit("classify", program, tmp_path / "image.png", "--json", "--logits").json
    (answer,) = found["results"]
    engine = Engine(program)
    assert answer["logits"] == engine.run(pixels)[0].tolist()
    assert answer["pixels"] == hashlib.sha256(pixels.tobytes()).hexdigest()
    assert found["fingerprint"] == engine.fingerprint and found["scale"] == engine.header.output.scale
    assert_rejected(fqvit("classify", program, tmp_path / "image.png", "--logits"), "--logits", "--json")
    assert_rejected(
        fqvit("classify", program, "x.png", "--json", "--logits", "--zero-shot", "x.npz"), "--logits", "--zero-shot"
    )


def test_export_writes_c_source(program: Path, tmp_path: Path) -> None:
    assert fqvit("export", program, "--to", "c", "-o", tmp_path / "c").code == 0
    assert (tmp_path / "c" / "model.c").is_file()


def test_a_missing_file_gives_a_one_line_error() -> None:
    assert_rejected(fqvit("eval", "missing.fqvit"), "missing.fqvit")
