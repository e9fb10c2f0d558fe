"""The plain modules of families/ give the same bits as timm's modules with the same state dict."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from fqvit.models.config import BeitConfig, DinoV3Config, SwinV2Config, VisionConfig
from fqvit.models.families.beit import Beit
from fqvit.models.families.dinov3 import DinoV3
from fqvit.models.families.swinv2 import SwinV2
from fqvit.models.families.vision_transformer import VisionTransformer

TIMM = {"img_size": (32, 48), "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 7}
OURS: dict[str, Any] = {
    "image": (32, 48),
    "patch": 8,
    "channels": 3,
    "outputs": 7,
    "width": 24,
    "depth": 2,
    "heads": 3,
    "hidden": 96,
}


def assert_same_bits(oracle: nn.Module, ours: nn.Module, image: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in oracle.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    ours.load_state_dict(oracle.state_dict())
    images = torch.randn(2, 3, *image, generator=generator)
    with torch.no_grad():
        want, got = oracle.eval()(images), ours.eval()(images)
    assert float((want[0] - want[1]).abs().max()) > 0.01, "the oracle must depend on the image"
    assert torch.equal(want, got)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"global_pool": "avg", "qkv_bias": False}, {"pool": "avg", "norm": False, "fc_norm": True, "qkv_bias": False}),
        ({"global_pool": "avg", "fc_norm": False}, {"pool": "avg"}),
        ({"global_pool": "token", "fc_norm": True}, {"norm": False, "fc_norm": True}),
        ({"global_pool": "", "num_classes": 0}, {"pool": "none", "outputs": 0}),
        (
            {"reg_tokens": 4, "no_embed_class": True, "init_values": 0.1, "num_classes": 0},
            {"registers": 4, "prefix_positions": False, "layer_scale": True, "outputs": 0},
        ),
        ({"reg_tokens": 2}, {"registers": 2}),
        (
            {"pre_norm": True, "act_layer": "quick_gelu"},
            {"norm_pre": True, "patch_bias": False, "activation": "quick_gelu"},
        ),
        (
            {"class_token": False, "global_pool": "map", "act_layer": "gelu_tanh", "num_classes": 0},
            {"class_token": False, "pool": "map", "activation": "gelu_tanh", "outputs": 0},
        ),
        ({"mlp_layer": "swiglu", "act_layer": nn.SiLU}, {"swiglu": True, "hidden": 48}),
    ],
    ids=str,
)
def test_the_vision_transformer_matches_timm_bitwise(timm: ModuleType, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    if theirs.get("mlp_layer") == "swiglu":
        theirs = {**theirs, "mlp_layer": timm.layers.SwiGLUPacked}
    oracle = timm.models.VisionTransformer(**{**TIMM, **theirs})
    assert_same_bits(oracle, VisionTransformer(VisionConfig(**{**OURS, **ours})), (32, 48))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"global_pool": "token"}, {}),
        (
            {"swiglu_mlp": True, "swiglu_align_to": 8, "qkv_bias": False},
            {"swiglu": True, "qv_bias": False, "pool": "avg"},
        ),
        ({"num_classes": 0, "global_pool": ""}, {"outputs": 0, "pool": "none"}),
    ],
    ids=str,
)
def test_dinov3_matches_timm_bitwise(timm: ModuleType, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    fixed = {
        "qkv_bias": True,
        "init_values": 1e-5,
        "rope_type": "dinov3",
        "rope_temperature": 100,
        "rope_rotate_half": True,
        "use_rot_pos_emb": True,
        "use_abs_pos_emb": False,
        "num_reg_tokens": 4,
        "use_fc_norm": False,
        "norm_layer": partial(timm.layers.LayerNorm, eps=1e-5),
        "dynamic_img_size": True,
    }
    oracle = timm.models.eva.Eva(**{**TIMM, **fixed, **theirs})
    assert_same_bits(oracle, DinoV3(DinoV3Config(**{**OURS, **ours})), (32, 48))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"use_abs_pos_emb": False, "use_rel_pos_bias": True, "init_values": 0.1}, {}),
        (
            {"use_shared_rel_pos_bias": True, "global_pool": "token"},
            {
                "positions": True,
                "block_bias": False,
                "shared_bias": True,
                "layer_scale": False,
                "norm": True,
                "fc_norm": False,
                "pool": "token",
            },
        ),
    ],
    ids=["per block", "shared"],
)
def test_beit_matches_timm_bitwise(timm: ModuleType, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    oracle = timm.models.beit.Beit(**TIMM, norm_layer=partial(timm.layers.LayerNorm, eps=1e-6), **theirs)
    assert_same_bits(oracle, Beit(BeitConfig(**{**OURS, **ours})), (32, 48))


@pytest.mark.parametrize(("side", "window", "pretrained"), [(32, 4, (0, 0)), (32, 8, (6, 4)), (64, 16, (0, 0))])
def test_swinv2_matches_timm_bitwise(timm: ModuleType, side: int, window: int, pretrained: tuple[int, int]) -> None:
    shape: dict[str, Any] = {"embed_dim": 12, "depths": (2, 2), "num_heads": (2, 4), "num_classes": 7}
    oracle = timm.models.swin_transformer_v2.SwinTransformerV2(
        img_size=side, patch_size=2, window_size=window, pretrained_window_sizes=pretrained, **shape
    )
    config = SwinV2Config((side, side), 2, 3, 7, 12, (2, 2), (2, 4), (window, window), pretrained)
    assert_same_bits(oracle, SwinV2(config), (side, side))
