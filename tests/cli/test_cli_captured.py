"""Tests of commands on captured models: check, quantize, compare, report, bench and export, with a feature extractor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from fqvit.ir.program import Program
from fqvit.models import architectures
from fqvit.models.architectures import Architecture
from tests.captured import FEATURES, captured_program, state_of
from tests.cli.command_line import assert_rejected, fqvit
from tests.factories import images_for
from tests.factories import one_thread as one_thread

# Settings that cannot be inferred from the shapes of the weights.
DECIDED = ("--heads", 3, "--pool", "token", "--activation", "gelu")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "extractor.safetensors"
    save_file(state_of(FEATURES), path)
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    preprocess = captured_program("features").header.preprocess
    for i, pixels in enumerate(images_for(preprocess, 4)):
        Image.fromarray(np.repeat(np.repeat(pixels, 2, 0), 2, 1)).save(folder / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def program(weights: Path, photos: Path) -> Path:
    """A program for images of 24 x 24 pixels; the checkpoint is for 16 x 16."""
    path = weights.with_name("extractor.fqvit")
    done = fqvit("quantize", weights, *DECIDED, "--size", 24, "--calib", photos, "-o", path)
    assert done.code == 0, done.err
    assert "short side 24" in done.out and "(from defaults)" in done.out and "mean and std: those of ImageNet" in done.out
    assert "its preprocessing is not fully specified" in done.err
    return path


def test_check_describes_a_checkpoint_without_a_model_name(weights: Path) -> None:
    found = fqvit("check", weights, *DECIDED, "--size", "24x16", "--json").json
    assert found["captured"] and found["parity"] < 1e-5 and found["classes"] is None
    assert found["input"] == [24, 16, 3] and found["preprocess_source"] == "defaults"
    assert any(sentence.startswith("resize:") for sentence in found["assumed"])
    text = fqvit("check", "--weights", weights, *DECIDED).out
    assert "features, no classifier" in text and "float parity" in text


def test_check_accepts_an_embedded_name_and_rejects_an_empty_folder(weights: Path, tmp_path: Path) -> None:
    assert fqvit("check", "fmnist_vit", "--json").json["captured"] is False
    (tmp_path / "empty").mkdir()
    assert_rejected(fqvit("check", tmp_path / "empty"), "empty")


def test_check_reports_one_line_errors(weights: Path) -> None:
    assert_rejected(fqvit("check", weights), "do not show heads, pool and activation", "--heads, --pool and --activation")
    assert_rejected(fqvit("check", "./nowhere.pth"), "no such file or folder", "hf:ORG/NAME")
    assert_rejected(fqvit("check", "some/model"), "no such file or folder", "hf:ORG/NAME")
    assert_rejected(fqvit("check", "no_such_model"), "not a name that fqvit knows")
    assert_rejected(fqvit("check", weights, *DECIDED, "--size", "0"), "--size 0", "224x320")
    assert_rejected(fqvit("check", weights, *DECIDED, "--size", "24,16"), "--size 24,16")


def test_models_lists_families_ops_and_folded_layers() -> None:
    found = fqvit("models", "--json").json
    assert any("DINOv2" in family["name"] for family in found["families"])
    assert "silu" in found["ops"]["activation"] and "LayerScale, batch norm" in found["folded"]
    text = fqvit("models").out
    assert "DINOv2" in text and "scaled_dot_product_attention" in text and "LayerScale" in text


def test_a_feature_extractor_has_no_classes(program: Path, weights: Path, photos: Path) -> None:
    text = fqvit("inspect", program).out
    assert "embedding, u8 24" in text
    assert_rejected(fqvit("classify", program, photos / "0.png"), "outputs features", "fqvit.Engine")
    assert_rejected(fqvit("eval", program, "--data", photos), "outputs features", "fqvit.Engine")
    assert_rejected(fqvit("eval", weights.with_suffix(""), "--weights", weights, *DECIDED), "has no classifier")
    done = fqvit(
        "quantize", weights, *DECIDED, "--calib", photos, "--features", "pooled", "-o", program.with_name("other.fqvit")
    )
    assert_rejected(type(done)(done.code, done.out, done.err.splitlines()[-1] + "\n"), "has no classifier")


def test_compare_loads_the_weights_at_the_image_size_of_the_program(program: Path, weights: Path, photos: Path) -> None:
    found = fqvit("compare", program, "--weights", weights, *DECIDED, "--data", photos, "--limit", 2, "--json").json
    assert found["images"] == 2 and found["integer_agreement"] is None
    assert min(site["integer_db"] for site in found["sites"]) > 5


def test_a_report_shows_the_attention_of_the_first_token(program: Path, weights: Path, photos: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    out = tmp_path / "report.html"
    done = fqvit("report", program, "--weights", weights, *DECIDED, "--data", photos, "-o", out)
    assert done.code == 0, done.err
    page = out.read_text()
    assert "Attention of the first token" in page and "left out" not in page


def test_bench_runs_the_original_module_in_other_runtimes(program: Path, weights: Path) -> None:
    words = ("--against", "torch", "--rounds", 1, "--json")
    found = fqvit("bench", program, "--weights", weights, *DECIDED, *words).json
    assert [row["name"] for row in found["settings"][0]["results"]] == ["fqvit", "torch fp32"]
    found = fqvit("bench", program, *words).json
    assert [row["name"] for row in found["settings"][0]["results"]] == ["fqvit"]
    assert "cannot be rebuilt from its name" in found["skipped"][0]["reason"]


def test_compare_needs_weights_for_a_program_quantized_from_a_module_in_memory(photos: Path, tmp_path: Path) -> None:
    captured_program("hybrid").save(tmp_path / "hybrid.fqvit")
    done = fqvit("compare", tmp_path / "hybrid.fqvit", "--data", photos)
    assert_rejected(done, "quantized from a module in memory", "--weights")


def test_bitops_of_a_family_are_counted_from_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    known = architectures.lookup
    small = Architecture("small_one", FEATURES)
    monkeypatch.setattr(architectures, "lookup", lambda name: small if name == "small_one" else known(name))
    found = fqvit("bitops", "small_one", "--json").json
    names = [layer["name"] for layer in found["layers"]]
    assert found["model"] == "small_one" and "blocks.1.attn.softmax" in names
    assert next(layer["macs"] for layer in found["layers"] if layer["name"] == "blocks.0.mlp.fc1") == (16 + 3) * 24 * 48


@pytest.mark.parametrize("kind", ["onnx", "c", "vectors", "qdq"])
def test_every_export_accepts_a_feature_extractor(program: Path, kind: str, tmp_path: Path) -> None:
    done = fqvit("export", program, "--to", kind, "-o", tmp_path / f"out.{kind}")
    assert done.code == 0, done.err


def test_the_program_records_the_name_the_output_and_the_image_size(program: Path) -> None:
    header = Program.load(program).header
    assert (header.model, header.output.kind) == ("extractor", "embedding")
    assert (header.preprocess.height, header.preprocess.width) == (24, 24)
