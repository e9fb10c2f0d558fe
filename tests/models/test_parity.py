"""Float models give the same logits as timm and transformers (if installed) with the same weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fqvit.data.preprocess import Preprocess
from fqvit.models import zoo
from fqvit.models.config import SwinConfig, ViTConfig
from fqvit.models.load import load_model

ROUNDING = 1e-5  # relative to the largest logit


def small_row(name: str, config: ViTConfig | SwinConfig) -> zoo.Row:
    side = config.image[0]
    preprocess = Preprocess(side, side, 3, side, "bicubic", (0.5,) * 3, (0.5,) * 3)
    return zoo.Row(name, config, preprocess)


VIT = ViTConfig(image=(32, 32), patch=8, channels=3, classes=7, width=24, depth=2, heads=3, hidden=96)
DISTILLED = ViTConfig(**{**vars(VIT), "prefix": 2})
SWIN = SwinConfig(image=(56, 56), patch=2, channels=3, classes=7, width=12, depths=(2, 2), heads=(2, 4), window=7)
TIMM_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 7}
TIMM_SWIN = {"img_size": 56, "patch_size": 2, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 4), "num_classes": 7}


@pytest.fixture(autouse=True)
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (small_row("small_vit", VIT), small_row("small_distilled", DISTILLED), small_row("small_swin", SWIN))
    for row in rows:
        monkeypatch.setitem(zoo.BY_NAME, row.name, row)


def randomized(model: nn.Module) -> nn.Module:
    """Randomize the weights so that every part affects the logits; initially biases and tokens are zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim == 2 and "table" not in name:
                p.copy_(noise * p.shape[1] ** -0.5)
            else:
                p.add_(0.3 * noise)
    return model.eval()


def assert_equal_up_to_rounding(oracle: nn.Module, ours: nn.Module, images: Tensor) -> None:
    with torch.no_grad():
        want, got = oracle(images), ours(images)
    want = getattr(want, "logits", want)
    assert want.shape == got.shape
    assert float((want[0] - want[1]).abs().max()) > 0.01, "the oracle must depend on the image"
    assert float((want - got).abs().max() / want.abs().max()) < ROUNDING


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("small_vit", {}),
        ("small_vit", {"init_values": 0.1}),
        ("small_vit", {"qkv_bias": False}),
        ("small_vit", {"global_pool": "avg"}),
        ("small_vit", {"global_pool": "avg", "class_token": False}),
        ("small_vit", {"global_pool": "avg", "class_token": False, "fc_norm": False}),
        ("small_vit", {"no_embed_class": True}),
        ("small_vit", {"patch_size": 4, "num_classes": 3}),
        ("small_vit", {"img_size": 48, "mlp_ratio": 2}),
    ],
    ids=str,
)
def test_vits_of_any_supported_shape_match_timm(timm: ModuleType, name: str, options: dict[str, Any]) -> None:
    oracle = randomized(timm.models.VisionTransformer(**{**TIMM_VIT, **options}))
    # Settings that the tensors do not show come from the name, unless the tensors have another structure.
    other = {"init_values", "qkv_bias", "global_pool"} & set(options)
    pool = options.get("global_pool", "token")
    given = {"heads": 3, "pool": pool, "activation": "gelu", "qkv_bias": options.get("qkv_bias", True)} if other else {}
    ours = load_model(name, oracle.state_dict(), **given)
    images = torch.randn(2, 3, ours.preprocess.height, ours.preprocess.width, generator=torch.Generator().manual_seed(1))
    assert_equal_up_to_rounding(oracle, ours.module, images)


def test_a_distilled_deit_matches_timm(timm: ModuleType) -> None:
    oracle = randomized(timm.models.VisionTransformerDistilled(**TIMM_VIT))
    ours = load_model("small_distilled", oracle.state_dict())
    assert_equal_up_to_rounding(oracle, ours.module, torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize("options", [{}, {"img_size": 64, "window_size": 8}, {"img_size": 40, "window_size": 5}], ids=str)
def test_a_swin_with_shifts_and_merging_matches_timm(timm: ModuleType, options: dict[str, Any]) -> None:
    oracle = randomized(timm.models.SwinTransformer(**{**TIMM_SWIN, **options}))
    ours = load_model("small_swin", oracle.state_dict())
    side = options.get("img_size", 56)
    assert (ours.preprocess.height, ours.preprocess.width) == (side, side)
    assert_equal_up_to_rounding(oracle, ours.module, torch.randn(2, 3, side, side))


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "swin_tiny_patch4_window7_224"])
def test_known_models_match_timm_with_random_weights(timm: ModuleType, name: str) -> None:
    oracle = randomized(timm.create_model(name))
    assert_equal_up_to_rounding(oracle, load_model(name, oracle.state_dict()).module, torch.randn(2, 3, 224, 224))


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "vit_tiny_patch16_224"])
def test_known_models_match_timm_with_real_weights(timm: ModuleType, shared_data: Path, name: str) -> None:
    from safetensors.torch import load_file

    path = shared_data / "weights" / f"{name}.safetensors"
    oracle = timm.create_model(name).eval()
    oracle.load_state_dict(load_file(path))
    assert_equal_up_to_rounding(oracle, load_model(name, path).module, torch.randn(2, 3, 224, 224))


HF_VIT = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 7,
}
HF_SWIN = {"image_size": 56, "patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 4], "num_labels": 7}


@pytest.mark.parametrize(
    ("name", "kind", "config", "options"),
    [
        ("small_vit", "ViTForImageClassification", "ViTConfig", HF_VIT),
        ("small_vit", "ViTForImageClassification", "ViTConfig", {**HF_VIT, "qkv_bias": False}),
        ("small_distilled", "DeiTForImageClassification", "DeiTConfig", HF_VIT),
        ("small_distilled", "DeiTForImageClassificationWithTeacher", "DeiTConfig", HF_VIT),
        ("small_swin", "SwinForImageClassification", "SwinConfig", HF_SWIN),
        # 25 x 25 tokens in windows of 7: padded, then shifted. timm shifts before padding, so it cannot be the oracle.
        ("small_swin", "SwinForImageClassification", "SwinConfig", {**HF_SWIN, "image_size": 50}),
    ],
)
@pytest.mark.parametrize("live", [True, False], ids=["live", "saved"])
def test_hugging_face_models_match_transformers(
    timm: ModuleType, tmp_path: Path, name: str, kind: str, config: str, options: dict[str, Any], live: bool
) -> None:
    """The fixture `timm` also provides torchvision, which transformers imports."""
    if live and options["image_size"] == 50:
        pytest.skip("the state dict of a Swin does not contain its image size")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        oracle = randomized(getattr(transformers, kind)(getattr(transformers, config)(**options)))
        if not live:
            oracle.save_pretrained(tmp_path)
        # A state dict does not contain the epsilon; the default of transformers is used.
        activation: Any = {"activation": "gelu"} if live and "swin" not in name else {}  # config.json has the activation
        if live and "qkv_bias" in options:  # the tensors differ in structure from the named model
            activation |= {"heads": 3, "pool": "token", "qkv_bias": False}
        ours = load_model(name, oracle.state_dict() if live else tmp_path, **activation)
        assert_equal_up_to_rounding(oracle, ours.module, torch.randn(2, 3, options["image_size"], options["image_size"]))
    if not live:
        assert ours.classes == tuple(f"LABEL_{i}" for i in range(7))
