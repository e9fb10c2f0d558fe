"""Checkpoints written by transformers load without that package and give the same outputs as its models."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fqvit.errors import FqvitError
from fqvit.models import live
from fqvit.models.load import FloatModel, load_model

ROUNDING = 2e-6  # relative to the largest output
SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 99}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
BOTH = {"vision_config": SIZES, "text_config": TEXT, "projection_dim": 10}
FIVE = {**SIZES, "num_labels": 5}


@pytest.fixture(scope="module")
def transformers(timm: ModuleType) -> ModuleType:
    """The fixture `timm` also provides torchvision, which transformers imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: ModuleType = pytest.importorskip("transformers")
    return module


def built(transformers: ModuleType, name: str, config: str, options: dict[str, Any]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**options)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model


def saved(model: Any, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return folder


def output(model: Any, images: Tensor, **options: Any) -> Tensor:
    """Return the logits, the projected features or the pooled features of a model of transformers."""
    if "text_config" in model.config.to_dict() and not hasattr(model, "classifier"):
        found = model.get_image_features(images)
        return getattr(found, "pooler_output", found)  # type: ignore[no-any-return]
    found = model(images, **options)
    for name in ("logits", "image_embeds"):
        if getattr(found, name, None) is not None:
            return getattr(found, name)  # type: ignore[no-any-return]
    if type(model).__name__ == "IJepaModel":
        return found.last_hidden_state.mean(1)  # type: ignore[no-any-return]
    own = getattr(found, "pooler_output", None)
    # The pooler of ViT and DeiT is an additional layer, which fqvit leaves out.
    return found.last_hidden_state[:, 0] if own is None or hasattr(getattr(model, "pooler", None), "dense") else own


def assert_equal(want: Tensor, model: FloatModel, images: Tensor) -> None:
    with torch.no_grad():
        got = model.module(images)
    assert want.shape == got.shape
    assert float((want[0] - want[1]).abs().max()) > 1e-3, "the oracle must depend on the image"
    assert float((want - got).abs().max() / want.abs().max()) < ROUNDING


MODELS = [
    ("ViTModel", "ViTConfig", SIZES),
    ("ViTForImageClassification", "ViTConfig", {**FIVE, "hidden_act": "gelu_new"}),
    ("DeiTModel", "DeiTConfig", SIZES),
    ("ViTMSNForImageClassification", "ViTMSNConfig", FIVE),
    ("IJepaModel", "IJepaConfig", SIZES),
    ("IJepaForImageClassification", "IJepaConfig", FIVE),
    ("CLIPVisionModel", "CLIPVisionConfig", SIZES),
    ("CLIPVisionModelWithProjection", "CLIPVisionConfig", {**SIZES, "projection_dim": 10, "hidden_act": "gelu"}),
    ("CLIPModel", "CLIPConfig", BOTH),
    ("CLIPForImageClassification", "CLIPConfig", BOTH),
    ("SiglipVisionModel", "SiglipVisionConfig", SIZES),
    ("SiglipModel", "SiglipConfig", BOTH),
    ("SiglipForImageClassification", "SiglipConfig", BOTH),
    ("Dinov2Model", "Dinov2Config", SIZES),
    ("Dinov2ForImageClassification", "Dinov2Config", {**FIVE, "use_swiglu_ffn": True}),
    ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", SIZES),
    ("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", FIVE),
    ("DINOv3ViTModel", "DINOv3ViTConfig", {**SIZES, "num_register_tokens": 4}),
    ("DINOv3ViTModel", "DINOv3ViTConfig", {**SIZES, "num_register_tokens": 4, "use_gated_mlp": True, "hidden_act": "silu"}),
    ("BeitForImageClassification", "BeitConfig", {**FIVE, "use_relative_position_bias": True}),
    (
        "BeitModel",
        "BeitConfig",
        {
            **SIZES,
            "use_shared_relative_position_bias": True,
            "use_mean_pooling": False,
            "use_absolute_position_embeddings": True,
        },
    ),
    ("Data2VecVisionForImageClassification", "Data2VecVisionConfig", FIVE),
    ("SwinModel", "SwinConfig", SWIN),
    ("Swinv2Model", "Swinv2Config", SWIN),
    ("Swinv2ForImageClassification", "Swinv2Config", {**SWIN, "window_size": 8, "pretrained_window_sizes": [6, 6]}),
]


@pytest.mark.parametrize(("name", "config", "options"), MODELS, ids=lambda value: value if isinstance(value, str) else "")
def test_folders_give_the_same_outputs_as_transformers(
    transformers: ModuleType, tmp_path: Path, name: str, config: str, options: dict[str, Any]
) -> None:
    oracle = built(transformers, name, config, options)
    model = load_model(weights=saved(oracle, tmp_path / "mine"))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = output(oracle, images)
    assert_equal(want, model, images)
    assert model.name == "mine" and not model.module.training
    assert model.assumed == (
        "resize: the whole image is used, without cropping its border",
        "interpolation: bicubic",
        "mean and std: those of ImageNet",
    )
    assert (model.classes is not None) == (options.get("num_labels") is not None)
    described = live.describe(oracle)
    assert (described.name, described.image, described.channels) == (name, (32, 32), 3)
    assert model.classes is None or described.labels == model.classes


def test_mae_encoders_load_without_their_decoder(transformers: ModuleType, tmp_path: Path) -> None:
    decoder = {f"decoder_{key}": value for key, value in TEXT.items() if key != "vocab_size"}
    oracle: Any = built(transformers, "ViTMAEForPreTraining", "ViTMAEConfig", {**SIZES, **decoder, "mask_ratio": 0.0})
    model = load_model(weights=saved(oracle, tmp_path))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        want = oracle.vit(images, noise=torch.arange(16.0).repeat(2, 1)).last_hidden_state[:, 0]
    assert_equal(want, model, images)


@pytest.mark.parametrize("name", ["Dinov2", "Dinov2WithRegisters", "DINOv3ViT"])
def test_the_preprocessor_sets_the_image_size_of_models_that_resample_position_embeddings(
    transformers: ModuleType, tmp_path: Path, name: str
) -> None:
    options = {**SIZES, "image_size": 56} | ({"num_register_tokens": 4} if name == "DINOv3ViT" else {})
    oracle = built(transformers, f"{name}Model", f"{name}Config", options)
    saved(oracle, tmp_path)
    numbers = {
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6],
        "resample": 3,
        "do_resize": True,
        "size": {"shortest_edge": 36},
        "do_center_crop": True,
        "crop_size": {"height": 32, "width": 32},
        "image_processor_type": "BitImageProcessor",
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(numbers))
    model = load_model(weights=tmp_path)
    p = model.preprocess
    assert (p.height, p.width, p.resize, p.squash, p.mean[0], model.assumed) == (32, 32, 36, False, 0.1, ())
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert_equal(output(oracle, images), model, images)


def test_features_leave_out_the_projection(transformers: ModuleType, tmp_path: Path) -> None:
    oracle: Any = built(transformers, "CLIPModel", "CLIPConfig", BOTH)
    model = load_model(weights=saved(oracle, tmp_path), features=True)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert_equal(oracle.vision_model(images).pooler_output, model, images)


@pytest.mark.parametrize(
    ("name", "config", "options", "changes", "message"),
    [
        ("Dinov2Model", "Dinov2Config", SIZES, {"hidden_act": "relu"}, "hidden_act 'relu', expected one of"),
        ("Dinov2Model", "Dinov2Config", SIZES, {"num_attention_heads": 5}, "heads for width 24"),
        ("Dinov2Model", "Dinov2Config", SIZES, {"num_hidden_layers": 3}, "depth 2 in the weights, expected 3 as in config"),
        ("Dinov2Model", "Dinov2Config", SIZES, {"architectures": ["Dinov2Backbone"]}, "weights of Dinov2Backbone"),
        ("Dinov2Model", "Dinov2Config", SIZES, {"new_trick": 1}, "new_trick '1' is not understood"),
        (
            "DINOv3ViTModel",
            "DINOv3ViTConfig",
            {**SIZES, "num_register_tokens": 4, "use_gated_mlp": True, "hidden_act": "silu"},
            {"hidden_act": "gelu"},
            "a gated MLP with hidden_act 'gelu', expected 'silu'",
        ),
        (
            "DINOv3ViTModel",
            "DINOv3ViTConfig",
            {**SIZES, "num_register_tokens": 4},
            {"key_bias": True},
            "key_bias True, expected",
        ),
        ("Swinv2Model", "Swinv2Config", SWIN, {"window_size": 5}, "16 x 16 tokens in windows of 5, expected a multiple"),
        ("CLIPVisionModel", "CLIPVisionConfig", SIZES, {"model_type": "clipseg"}, "model_type 'clipseg' has no definition"),
    ],
)
def test_configs_that_are_not_understood_are_rejected(
    transformers: ModuleType,
    tmp_path: Path,
    name: str,
    config: str,
    options: dict[str, Any],
    changes: dict[str, Any],
    message: str,
) -> None:
    saved(built(transformers, name, config, options), tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, **changes}))
    with pytest.raises(FqvitError, match=message) as caught:
        load_model(weights=tmp_path)
    assert "\n" not in str(caught.value)


def test_nested_configs_may_leave_out_defaults(transformers: ModuleType, tmp_path: Path) -> None:
    """google/siglip-base-patch16-224 has only {"model_type": ...} in vision_config."""
    saved(built(transformers, "SiglipModel", "SiglipConfig", BOTH), tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    for key in ("hidden_act", "layer_norm_eps"):
        del said["vision_config"][key]
    (tmp_path / "config.json").write_text(json.dumps(said))
    config: Any = load_model(weights=tmp_path).module.config
    assert (config.activation, config.eps) == ("gelu_tanh", 1e-6)
