"""Tests of fqvit.quantize, which gives the same program as load_model, calibrate and lower in one call."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import fqvit
from fqvit.data.images import ImageFolder
from fqvit.errors import FqvitError
from fqvit.lowering.lower import lower
from fqvit.lowering.quantize import quantize
from fqvit.models import live
from fqvit.models.checkpoints.preprocessing import read_preprocessor
from fqvit.models.embedded import embedded_weights
from fqvit.quant.calibrate import calibrate
from fqvit.quant.recipe import Recipe, load_recipe, with_bits, with_methods
from tests.factories import float_model, images_for

PROCESSOR = {"size": {"height": 12, "width": 12}, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 2}


class Small(nn.Module):
    """A plain torch module: one patch embedding and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.patch(x).flatten(2).transpose(1, 2)).mean(1))
        return logits


def small(**more: Any) -> Small:
    torch.manual_seed(0)
    module = Small().eval()
    for name, value in more.items():
        setattr(module, name, value)
    return module


def test_one_call_gives_the_same_program_as_calibrate_and_lower(tmp_path: Path) -> None:
    model = float_model("vit")
    for number, pixels in enumerate(images_for(model.preprocess, 8)):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    source = ImageFolder.unlabelled(tmp_path, model.preprocess)
    expected = lower(model, calibrate(model, source, load_recipe("fqvit"))).fingerprint()
    for images in (tmp_path, source, sorted(tmp_path.iterdir()), [Image.open(path) for path in sorted(tmp_path.iterdir())]):
        assert quantize(model, images).fingerprint() == expected
    assert lower(model, calibrate(model, str(tmp_path))).fingerprint() == expected
    assert lower(model, calibrate(model, sorted(tmp_path.iterdir()), "fqvit")).fingerprint() == expected


def test_the_embedded_models_have_their_own_images(tmp_path: Path) -> None:
    program = fqvit.quantize("fmnist_vit", limit=32)
    program.save(tmp_path / "a.fqvit")
    assert program.header.images == 32 and program.classes is not None and program.classes[0] == "T-shirt/top"
    images = np.random.default_rng(0).integers(0, 256, (4, 30, 33)).astype(np.uint8)
    in_memory, from_file = fqvit.load(program).classify(list(images)), fqvit.load(tmp_path / "a.fqvit").classify(list(images))
    assert in_memory == from_file


def test_a_checkpoint_file_and_a_state_dict_are_models(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 28, 28, 1)).astype(np.uint8)
    path = tmp_path / "fmnist_vit.safetensors"
    path.write_bytes(embedded_weights("fmnist_vit").read_bytes())
    by_path = quantize(path, images)
    assert by_path.fingerprint() == quantize(str(path), images).fingerprint()
    assert by_path.header.sites == quantize("fmnist_vit", images).header.sites  # the embedded model also has class names
    unnamed = tmp_path / "mine.safetensors"
    state = {"head.weight": torch.zeros(3, 4)}
    save_file(state, unnamed)
    for wrong in (unnamed, state):
        with pytest.raises(FqvitError):
            quantize(wrong, images)


def test_a_live_module_keeps_its_weights_and_takes_size_and_classes() -> None:
    module, images = small(), np.random.default_rng(0).integers(0, 256, (4, 12, 12, 3)).astype(np.uint8)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    program = quantize(module, images, size=12, classes=["a", "b", "c", "d", "e"])
    assert program.classes == ("a", "b", "c", "d", "e") and program.input_shape == (12, 12, 3)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_recipes_bits_and_limits_are_applied() -> None:
    model = float_model("vit")
    images = images_for(model.preprocess, 8)
    assert quantize(model, images, "minmax").header.recipe["name"] == "minmax"
    narrow = quantize(model, images, bits="4/8/4", limit=4)
    methods = with_methods(with_bits(load_recipe(), "4/8/4"))
    assert narrow.header.recipe["weight_group"] == methods.weight_group > 0 and narrow.header.images == 4
    own = Recipe(name="own", weight_bits=6)
    assert quantize(model, images, own, "4/8/4").header.recipe["weight_group"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, "model: int, expected a torch module"),
        ({"model": "resnet"}, "not a name that fqvit knows"),
        ({"model": "none.safetensors"}, "no such file or folder"),
        ({"model": "a.fqvit"}, "quantized already"),
        ({"images": 3}, "images: int"),
        ({"images": None}, "no images given. Pass a folder"),
        ({"recipe": "nothing"}, "no such recipe"),
        ({"recipe": 3}, "recipe '3': no such recipe"),
        ({"recipe": "partial"}, "no integer program"),
        ({"bits": 4}, "bits 4: expected W/A/ATTN"),
        ({"limit": 0}, "limit: 0, expected at least 1"),
        ({"outputs": "nothing"}, "output 'nothing': unknown name"),
        ({"size": 12}, "size: only valid for models that are not loaded yet"),
    ],
    ids=str,
)
def test_mistakes_are_reported_in_one_line(
    arguments: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.fqvit").write_bytes(b"x")
    model = float_model("vit")
    given = {"model": model, "images": images_for(model.preprocess, 2), **arguments}
    with pytest.raises(FqvitError, match=message) as caught:
        quantize(**given)
    assert "\n" not in str(caught.value)


def config(folder: str) -> SimpleNamespace:
    """A stand-in for a config of transformers."""
    return SimpleNamespace(to_dict=lambda: {"image_size": 12}, model_type="mine", name_or_path=folder)


def test_preprocessing_comes_from_a_processor_or_from_the_folder_of_a_transformers_module(tmp_path: Path) -> None:
    module = small(config=config(str(tmp_path)))
    assert live.describe(module).transform.mean is None
    wrapped = SimpleNamespace(image_processor=SimpleNamespace(to_dict=lambda: PROCESSOR))
    for processor in (PROCESSOR, SimpleNamespace(to_dict=lambda: PROCESSOR), wrapped):
        p, _ = live.describe(module, processor).preprocess()
        assert (p.mean, p.std, p.interpolation, p.squash) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bilinear", True)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    p, assumed = live.describe(module).preprocess()
    assert p.mean == (0.1, 0.2, 0.3) and f"preprocessor_config.json of {tmp_path}" in assumed[0]
    program = quantize(module, np.zeros((2, 12, 12, 3), np.uint8))
    assert program.header.preprocess == p
    with pytest.raises(FqvitError, match="processor: int, expected an image processor"):
        quantize(module, np.zeros((2, 12, 12, 3), np.uint8), processor=3)
    with pytest.raises(FqvitError, match="processor: for live modules only"):
        quantize("fmnist_vit", processor=PROCESSOR)


def test_preprocessing_comes_from_the_cache_of_the_hub_without_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(PROCESSOR))
    asked = []

    def look(repository: str, name: str, revision: str | None) -> str | None:
        asked.append((repository, name, revision))
        return str(path) if name == path.name else None

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(try_to_load_from_cache=look))  # type: ignore[arg-type]
    found = live.describe(small(config=config("someone/vit")))
    assert found.transform.mean == read_preprocessor(PROCESSOR, "vit").mean
    assert asked == [("someone/vit", "preprocessor_config.json", None)]


def test_a_live_module_of_transformers_uses_the_given_processor() -> None:
    transformers = pytest.importorskip("transformers")
    settings = transformers.ViTConfig(
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        num_labels=3,
    )
    module = transformers.ViTForImageClassification(settings).eval()
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16}, image_mean=[0.1] * 3, image_std=[0.4] * 3)
    images = np.random.default_rng(0).integers(0, 256, (4, 20, 30, 3)).astype(np.uint8)
    p = quantize(module, images, processor=processor).header.preprocess
    assert (p.mean, p.height, p.squash) == ((0.1,) * 3, 16, True)


def test_a_live_module_of_timm_keeps_its_name_and_preprocessing(timm: ModuleType) -> None:
    module = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=4, depth=1).eval()
    images = [Image.new("RGB", (40, 50), (number, 9, 99)) for number in range(3)]
    program = quantize(module, images)
    assert (program.header.model, program.header.preprocess.mean) == ("vit_tiny_patch16_224", (0.5, 0.5, 0.5))


def test_programs_print_in_one_line() -> None:
    model = float_model("vit")
    text = repr(quantize(model, images_for(model.preprocess, 2)))
    assert text.startswith("Program(vit, 12 x 12 x 3 -> logits, ") and "\n" not in text and len(text) < 120
