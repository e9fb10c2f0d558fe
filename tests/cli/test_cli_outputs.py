"""Tests of commands on programs with named outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fqvit.ir.program import Program
from fqvit.models import embedded
from fqvit.models.load import build
from fqvit.runtime.native import Engine
from tests.cli.command_line import assert_rejected, fqvit
from tests.factories import one_thread as one_thread

OUTPUTS = "logits,embedding:l2,class@-1:sign,tokens@0"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "fmnist_vit.safetensors"
    save_file(dict(build(embedded.FMNIST_VIT_CONFIG).state_dict()), path)
    return path


def quantized(weights: Path, folder: Path, outputs: str) -> Path:
    path = folder / "model.fqvit"
    done = fqvit("quantize", "fmnist_vit", "--weights", weights, "--images", 4, "--output", outputs, "-o", path, "--json")
    assert done.json["outputs"] == [output.label for output in Program.load(path).header.outputs]
    return path


@pytest.fixture(scope="module")
def program(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized(weights, tmp_path_factory.mktemp("program"), OUTPUTS)


def test_check_lists_the_outputs_of_a_model(weights: Path) -> None:
    done = fqvit("check", "fmnist_vit", "--weights", weights)
    assert "logits, embedding, class, mean, tokens, layers @0 to @3" in done.out
    found = fqvit("check", "fmnist_vit", "--weights", weights, "--json").json
    assert found["layers"] == 4 and found["named_outputs"] == ["logits", "embedding", "class", "mean", "tokens"]


def test_inspect_lists_the_outputs_of_a_file(program: Path) -> None:
    lines = [line.split(maxsplit=1)[1] for line in fqvit("inspect", program).out.splitlines() if line.startswith("output ")]
    assert [line.partition(",")[0] for line in lines] == [
        "logits",
        "embedding:l2 (embedding)",
        "class@3:sign (signs)",
        "tokens@0 (tokens)",
    ]
    found = fqvit("inspect", program, "--json").json["outputs"]
    for row, info in zip(found, Engine(program).outputs, strict=True):
        assert (row["name"], row["kind"], row["dtype"]) == (info.name, info.kind, info.dtype)
        assert (row["scale"], row["zero"], tuple(row["shape"])) == (info.scale, info.zero, info.shape)


def test_commands_use_the_logits_of_a_program_with_several_outputs(program: Path, weights: Path, tmp_path: Path) -> None:
    picture = tmp_path / "x.png"
    Image.fromarray(np.arange(784, dtype=np.uint8).reshape(28, 28)).save(picture)
    assert fqvit("classify", program, picture, "--json").json["results"][0]["top"]
    assert fqvit("eval", program, "--limit", 4, "--json").json["images"] == 4
    found = fqvit("compare", program, "--weights", weights, "--limit", 2, "--json").json
    assert found["images"] == 2 and found["integer_agreement"] is not None
    assert "outputs.embedding:l2" in {site["site"] for site in found["sites"]}


def test_commands_refuse_a_program_whose_first_output_is_not_logits(weights: Path, tmp_path: Path) -> None:
    path = quantized(weights, tmp_path, "embedding,logits")
    for words in (("classify", path, "x.png"), ("eval", path, "--limit", 4)):
        assert_rejected(fqvit(*words), "outputs features (embedding), expected logits as its first output", "--output")
    found = fqvit("compare", path, "--weights", weights, "--limit", 2, "--json").json
    assert found["integer_agreement"] is not None


def test_features_is_a_deprecated_alias_of_output(weights: Path, tmp_path: Path) -> None:
    words = ("quantize", "fmnist_vit", "--weights", weights, "--images", 2, "-o", tmp_path / "x.fqvit", "--features")
    for features, new in (("pooled", "embedding"), ("tokens", "tokens, which leaves out the class token")):
        done = fqvit(*words, features, "--json")
        assert done.json["output"] == features
        assert done.err == f"fqvit: warning: --features {features} is deprecated. Use --output {new}.\n"
    assert_rejected(fqvit(*words, "pooled", "--output", "mean"), "--features: deprecated, and --output is given already")


def test_mistakes_in_output_names_are_found_before_the_weights_are_read(tmp_path: Path) -> None:
    words = ("quantize", "fmnist_vit", "--weights", tmp_path / "absent.safetensors", "--output")
    assert_rejected(fqvit(*words, "cls"), "output 'cls': unknown name, expected logits, embedding")
    assert_rejected(fqvit(*words, "mean,mean"), "output mean: listed twice")


def test_outputs_that_the_model_does_not_have_are_refused_and_nothing_is_written(weights: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.fqvit"
    words = ("quantize", "fmnist_vit", "--weights", weights, "--images", 2, "-o", path, "--output")
    assert_rejected(fqvit(*words, "tokens@4"), "output tokens@4: this model has 4 layers")
    assert_rejected(fqvit(*words, "embedding:i32"), "output embedding:i32: not from a linear layer")
    assert not path.exists()


def test_a_saved_calibration_keeps_its_outputs(weights: Path, tmp_path: Path) -> None:
    words = ("quantize", "fmnist_vit", "--weights", weights, "-o", tmp_path / "x.fqvit")
    saved = tmp_path / "saved.json"
    first = fqvit(*words, "--images", 2, "--output", "mean@1", "--save-calibration", saved, "--json").json
    assert fqvit(*words, "--calibration", saved, "--json").json["fingerprint"] == first["fingerprint"]
    assert_rejected(fqvit(*words, "--calibration", saved, "--output", "mean"), "Leave out --output or --calibration")


def test_quantize_recommends_recipe_embedding_for_features(weights: Path, tmp_path: Path) -> None:
    words = ("quantize", "fmnist_vit", "--weights", weights, "--images", 4, "-o", tmp_path / "model.fqvit")
    advice = "for features, --recipe embedding is more accurate"
    assert advice in fqvit(*words, "--output", "embedding").out
    assert advice not in fqvit(*words, "--output", "logits,embedding").out
    done = fqvit(*words, "--output", "embedding", "--recipe", "embedding")
    assert done.code == 0 and advice not in done.out and "embedding 8/8/4" in done.out
