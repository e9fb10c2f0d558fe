"""Test inputs that do not match the model: weights, images and calibrations of other models, and unknown devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fqvit.models import embedded, zoo
from fqvit.models.load import build
from tests.cli.command_line import assert_rejected, fqvit


def checkpoint(folder: Path, **sizes: object) -> Path:
    """Write the checkpoint of an untrained fmnist_vit, with `sizes` changed in its config."""
    torch.manual_seed(0)
    path = folder / "fmnist_vit.safetensors"
    save_file(dict(build(replace(embedded.FMNIST_VIT_CONFIG, **sizes)).state_dict()), path)  # type: ignore[arg-type]
    return path


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return weights of a model with 5 classes instead of 10."""
    return checkpoint(tmp_path_factory.mktemp("five"), classes=5)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return weights of a model for images of 32 x 32 pixels instead of 28 x 28."""
    return checkpoint(tmp_path_factory.mktemp("large"), image=(32, 32))


@pytest.fixture(scope="module")
def program(five: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "five.fqvit"
    done = fqvit("quantize", "--weights", five, "--images", 4, "-o", path)
    assert done.code == 0, done.err
    return path


def test_unknown_devices_are_rejected(five: Path, tmp_path: Path) -> None:
    for words in (("eval", "fmnist_vit"), ("quantize", "-o", tmp_path / "x.fqvit")):
        assert_rejected(fqvit(*words, "--weights", five, "--device", "meta"), "'meta'", "cpu, cuda, cuda:N or mps")


def test_embedded_images_are_rejected_for_models_with_other_classes(program: Path, five: Path) -> None:
    assert_rejected(fqvit("eval", program), "5 classes", "--data")
    assert_rejected(fqvit("eval", "fmnist_vit", "--weights", five), "5 classes", "--data")


def test_embedded_images_are_rejected_for_models_of_another_size(large: Path) -> None:
    assert_rejected(fqvit("eval", "fmnist_vit", "--weights", large), "32x32x1", "28x28x1", "--data")
    assert_rejected(fqvit("quantize", "--weights", large), "32x32x1", "28x28x1", "--calib")


def test_weights_named_like_a_model_with_other_preprocessing_give_a_warning(
    five: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = zoo.find("fmnist_vit")
    different = replace(row, name="fmnist_vit_dark", preprocess=msgspec.structs.replace(row.preprocess, mean=(0.1,)))
    for other in (different, replace(row, name="fmnist_vit_twin")):
        monkeypatch.setitem(zoo.BY_NAME, other.name, other)
        weights = tmp_path / f"{other.name}.safetensors"
        weights.write_bytes(five.read_bytes())
        words = ("quantize", "fmnist_vit", "--weights", weights, "--images", 2, "-o", tmp_path / "x.fqvit")
        done = fqvit(*words)
        assert done.code == 0
        if other is different:
            said = f"fqvit: warning: {weights.name} is named like {other.name}, but is loaded as fmnist_vit"
            assert done.err.startswith(said) and len(done.err.splitlines()) == 1 and f"pass {other.name} as" in done.err
        else:
            assert done.err == ""


def test_a_folder_with_only_some_classes_is_matched_by_ids(program: Path, five: Path, tmp_path: Path) -> None:
    for id in ("n03", "n08"):
        (tmp_path / "val" / id).mkdir(parents=True)
        Image.new("L", (28, 28)).save(tmp_path / "val" / id / "0.png")
    assert_rejected(fqvit("eval", program, "--data", tmp_path / "val"), "2 class sub-folders", "'n03'", "--classes")
    names = tmp_path / "classes.json"
    names.write_text('[["n01", "a"], ["n03", "b"]]')
    assert_rejected(fqvit("eval", program, "--data", tmp_path / "val", "--classes", names), "2 classes", "has 5")
    names.write_text('[["n01", "a"], ["n03", "b"], ["n05", "c"], ["n08", "d"], ["n09", "e"]]')
    for target in ((program,), ("fmnist_vit", "--weights", five)):
        assert fqvit("eval", *target, "--data", tmp_path / "val", "--classes", names, "--json").json["images"] == 2


def test_compare_rejects_weights_of_other_sizes(program: Path, large: Path, tmp_path: Path) -> None:
    assert_rejected(fqvit("compare", program, "--weights", large), "32x32x1", "28x28x1", "Quantize again")
    assert_rejected(fqvit("compare", program, "--weights", checkpoint(tmp_path)), "head", "[10]", "[5]", "Quantize again")


def test_a_saved_calibration_gives_the_same_program(five: Path, tmp_path: Path) -> None:
    saved, words = tmp_path / "saved.json", ("quantize", "--weights", five, "--json", "-o")
    first = fqvit(*words, tmp_path / "a.fqvit", "--images", 4, "--bits", "8/8/8", "--save-calibration", saved).json
    again = fqvit(*words, tmp_path / "b.fqvit", "--calibration", saved).json
    assert (tmp_path / "a.fqvit").read_bytes() == (tmp_path / "b.fqvit").read_bytes()
    for key in ("fingerprint", "bits", "recipe", "calibration_images"):
        assert first[key] == again[key]
    for option, value in (("--recipe", "fq-vit"), ("--bits", "8/8/4"), ("--calib", tmp_path), ("--images", 4), ("--k", 2)):
        assert_rejected(fqvit(*words, tmp_path / "c.fqvit", "--calibration", saved, option, value), "Leave out", option)
    assert_rejected(fqvit(*words, tmp_path / "c.fqvit", "--calibration", tmp_path / "none.json"), "cannot be read")
    assert_rejected(fqvit(*words, tmp_path / "c.fqvit", "--calibration", five), "not UTF-8")
    (tmp_path / "empty.json").write_text("{}")
    assert_rejected(fqvit(*words, tmp_path / "c.fqvit", "--calibration", tmp_path / "empty.json"), "not a valid calibration")
    assert_rejected(
        fqvit("quantize", "fmnist_swin", "--calibration", saved, "-o", tmp_path / "c.fqvit"), "not calibrated", "fmnist_swin"
    )


def test_compare_warns_if_the_program_was_not_made_from_the_given_weights(program: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    other = tmp_path / "other.safetensors"
    save_file(dict(build(replace(embedded.FMNIST_VIT_CONFIG, classes=5)).state_dict()), other)
    done = fqvit("compare", program, "--weights", other, "--limit", 1)
    assert done.code == 0 and "not from the given weights" in done.err
