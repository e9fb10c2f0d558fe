"""Settings that tensors do not show: where they come from, and which combinations are rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.models import zoo
from fqvit.models.checkpoints.recognise import remedy
from fqvit.models.config import ViTConfig
from fqvit.models.load import build, load_model

State = dict[str, Tensor]
VIT = ViTConfig(image=(16, 16), patch=4, channels=3, classes=5, width=12, depth=2, heads=3, hidden=48)


@pytest.fixture(autouse=True)
def small_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = zoo.Row("vit_one", VIT, Preprocess(16, 16, 3, 18, "bicubic", (0.1, 0.2, 0.3), (0.5,) * 3))
    monkeypatch.setitem(zoo.BY_NAME, row.name, row)


def random_state(config: ViTConfig) -> State:
    generator = torch.Generator().manual_seed(0)
    return {k: 0.3 * torch.randn(v.shape, generator=generator) for k, v in build(config).state_dict().items()}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("reg_token", torch.zeros(1, 4, 12), "registers is 4, expected 0"),
        ("norm_pre.weight", torch.zeros(12), "norm before the blocks is True, expected False"),
        ("blocks.0.ls1.gamma", torch.zeros(12), "LayerScale is True, expected False"),
        ("fc_norm.weight", torch.zeros(12), "fc_norm is True, expected False"),
        ("attn_pool.latent", torch.zeros(1, 1, 12), "attention pooling is True, expected False"),
    ],
)
def test_the_settings_of_a_name_are_not_used_for_tensors_of_another_structure(key: str, value: Tensor, message: str) -> None:
    with pytest.raises(FqvitError, match=f"vit_one: {message}, in state dict.*Pass its name, or heads, pool and activation"):
        load_model("vit_one", {**random_state(VIT), key: value})


@pytest.mark.parametrize("missing", ["heads", "pool", "activation"])
def test_settings_that_a_state_dict_does_not_show_must_be_passed(missing: str) -> None:
    settings: dict[str, Any] = {"heads": 3, "pool": "token", "activation": "gelu"}
    del settings[missing]
    with pytest.raises(FqvitError, match=f"the weights do not show {missing}. Pass {missing} to load_model"):
        load_model(weights=random_state(VIT), **settings)
    with pytest.raises(FqvitError, match="heads, pool and activation, and diet_tiny is not a name .*did you mean deit_tiny"):
        load_model("diet_tiny", random_state(VIT))


def test_settings_from_the_name_are_reported() -> None:
    assert load_model("vit_one", random_state(VIT)).assumed == (
        "heads: 3, from the name vit_one",
        "pool: token, from the name vit_one",
        "activation: gelu, from the name vit_one",
        "preprocessing: that of the name vit_one",
    )


def test_a_missing_qkv_bias_must_be_confirmed() -> None:
    state = {k: v for k, v in random_state(VIT).items() if not k.endswith("qkv.bias")}
    settings: dict[str, Any] = {"heads": 3, "pool": "token", "activation": "gelu"}
    with pytest.raises(FqvitError, match=r"do not show qkv_bias. Pass qkv_bias to load_model \(commands have"):
        load_model(weights=state, **settings)
    assert load_model(weights=state, qkv_bias=False, **settings).module(torch.zeros(1, 3, 16, 16)).shape == (1, 5)


def test_settings_without_an_argument_come_from_a_name_a_config_or_the_module() -> None:
    assert remedy(["windows", "the image size"]) == "Pass the architecture's name, a folder with config.json, or the module."


def test_gamma_in_the_blocks_needs_the_name_of_deit_3() -> None:
    state = {**random_state(VIT), **{f"blocks.{i}.gamma_{j}": torch.ones(12) for i in (0, 1) for j in (1, 2)}}
    with pytest.raises(FqvitError, match="'blocks.0.gamma_1' is the LayerScale of DeiT III or of a model with rotary"):
        load_model(weights=state, heads=3, pool="token", activation="gelu")
