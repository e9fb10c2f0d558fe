"""Checkpoints with missing, unexpected or invalid tensors: each gives a one-line error quickly."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.models import zoo
from fqvit.models.config import SwinConfig, ViTConfig
from fqvit.models.load import build, load_model

State = dict[str, Tensor]
CONFIGS: dict[str, ViTConfig | SwinConfig] = {
    "vit_one": ViTConfig(image=(16, 16), patch=4, channels=3, classes=5, width=12, depth=2, heads=3, hidden=48),
    "swin_one": SwinConfig(image=(28, 28), patch=2, channels=3, classes=5, width=8, depths=(2, 2), heads=(2, 4), window=7),
}


@pytest.fixture(autouse=True)
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, config in CONFIGS.items():
        side = config.image[0]
        row = zoo.Row(name, config, Preprocess(side, side, 3, side, "bicubic", (0.5,) * 3, (0.5,) * 3))
        monkeypatch.setitem(zoo.BY_NAME, name, row)


def rejection(name: str, state: State) -> str:
    start = time.monotonic()
    with pytest.raises(FqvitError) as caught:
        load_model(name, state)
    assert time.monotonic() - start < 5
    assert "\n" not in str(caught.value)
    return str(caught.value)


NUMBER = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("changes", "without", "message"),
    [
        ({"patch_embed.proj.weight": torch.zeros(12, 3, 0, 0)}, "", "'patch_embed.proj.weight' is empty"),
        ({"pos_embed": torch.zeros(1, 1 << 40, 0)}, "", "'pos_embed' is empty"),
        ({"blocks.0.mlp.fc1.weight": torch.zeros(1 << 40, 0)}, "", "'blocks.0.mlp.fc1.weight' is empty"),
        ({"blocks.0.attn.qkv.weight": NUMBER}, "attn.qkv.bias", "qkv_bias is False, expected True"),
        ({"blocks.0.ls1.gamma": torch.ones(12), "blocks.0.attn.proj.bias": NUMBER}, "", "LayerScale is True, expected False"),
        ({"blocks.99999999.norm1.weight": NUMBER}, "", "'blocks.99999999.norm1.weight' has a block"),
        ({f"blocks.{'9' * 5000}.norm1.weight": NUMBER}, "", "has a block or stage number above 99"),
    ],
)
def test_a_vit_with_invalid_tensors_gives_a_one_line_error(changes: State, without: str, message: str) -> None:
    state = {k: v for k, v in build(CONFIGS["vit_one"]).state_dict().items() if not without or not k.endswith(without)}
    assert message in rejection("vit_one", {**state, **changes})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("layers.99999999.blocks.0.y", NUMBER, "'layers.99999999.blocks.0.y' has a block"),
        ("layers.0.blocks.99999999.y", NUMBER, "'layers.0.blocks.99999999.y' has a block"),
        ("layers.98.blocks.0.y", NUMBER, "1 unexpected key: 'layers.98.blocks.0.y'"),
        ("layers.0.blocks.1.attn_mask", torch.zeros(1 << 40, 0, 0), "images of 14680064 x 14680064 pixels"),
        ("layers.0.blocks.0.mlp.fc1.weight", torch.zeros(3, 8), "'layers.0.blocks.0.mlp.fc1.weight' is [3, 8]"),
    ],
)
def test_a_swin_with_invalid_tensors_gives_a_one_line_error(key: str, value: Tensor, message: str) -> None:
    assert message in rejection("swin_one", {**build(CONFIGS["swin_one"]).state_dict(), key: value})


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_scalar_instead_of_any_tensor_is_rejected(name: str) -> None:
    state = build(CONFIGS[name]).state_dict()
    for key in [key for key in state if not key.endswith(("relative_position_index", "attn_mask"))]:
        rejection(name, {**state, key: NUMBER})


def test_scalar_query_key_and_value_weights_are_rejected() -> None:
    state = {"embeddings.patch_embeddings.projection.weight": torch.zeros(12, 3, 4, 4)}
    state |= {f"encoder.layer.0.attention.attention.{part}.weight": NUMBER for part in ("query", "key", "value")}
    assert "is a single number" in rejection("vit_one", state)
