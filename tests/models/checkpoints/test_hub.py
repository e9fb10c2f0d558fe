"""Models loaded by hf:ORG/NAME, tested with a local HTTP server that serves small random models."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.models import zoo
from fqvit.models.config import ViTConfig
from fqvit.models.load import build, load_model
from tests.stand_in_hub import Hub

SMALL = ViTConfig(image=(16, 16), patch=4, channels=3, classes=3, width=12, depth=2, heads=3, hidden=48)
CONFIG: dict[str, Any] = {
    "model_type": "vit",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "image_size": 16,
    "num_attention_heads": 3,
    "id2label": {"0": "cat", "1": "dog", "2": "eel"},
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    constants = pytest.importorskip("huggingface_hub.constants")
    stand_in = Hub()
    monkeypatch.setenv("HF_ENDPOINT", stand_in.address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    row = zoo.Row("vit_small_here", SMALL, Preprocess(16, 16, 3, 18, "bicubic", (0.5,) * 3, (0.5,) * 3))
    monkeypatch.setitem(zoo.BY_NAME, row.name, row)
    monkeypatch.setattr(zoo, "ROWS", (*zoo.ROWS, row))
    yield stand_in
    stand_in.server.shutdown()
    stand_in.server.server_close()


def hugging_face_state() -> dict[str, torch.Tensor]:
    """A small random ViT with the key names of transformers."""
    renames = [
        (r"^patch_embed\.proj", "vit.embeddings.patch_embeddings.projection"),
        (r"^cls_token", "vit.embeddings.cls_token"),
        (r"^pos_embed", "vit.embeddings.position_embeddings"),
        (r"^norm", "vit.layernorm"),
        (r"^head", "classifier"),
        (r"^blocks", "vit.encoder.layer"),
        (r"\.norm1", ".layernorm_before"),
        (r"\.norm2", ".layernorm_after"),
        (r"\.mlp\.fc1", ".intermediate.dense"),
        (r"\.mlp\.fc2", ".output.dense"),
        (r"\.attn\.proj", ".attention.output.dense"),
    ]
    out = {}
    for key, value in build(SMALL).state_dict().items():
        for pattern, name in renames:
            key = re.sub(pattern, name, key)
        thirds = zip(("query", "key", "value"), value.chunk(3)) if ".qkv." in key else [("", value)]
        for part, third in thirds:
            out[key.replace("attn.qkv", f"attention.attention.{part}")] = third.clone()
    return out


def files(**changes: Any) -> dict[str, bytes]:
    state = hugging_face_state()
    return {"config.json": json.dumps({**CONFIG, **changes}).encode(), "model.safetensors": save(state)}


@pytest.mark.parametrize("address", ["hf:someone/vit-here", "hf:someone/vit-here@v1"])
def test_a_model_from_the_hub_has_the_classes_and_epsilon_of_its_config_and_records_its_source(hub: Hub, address: str) -> None:
    hub.repositories["someone/vit-here"] = files()
    for name, weights in ((address, None), ("vit_small_here", address)):
        model = load_model(name, weights)
        assert (model.name, model.classes) == ("vit_small_here", ("cat", "dog", "eel"))
        assert model.module.config.eps == 1e-12
        digest = hashlib.sha256(hub.repositories["someone/vit-here"]["model.safetensors"]).hexdigest()
        assert model.source == f"{address} model.safetensors sha256:{digest}"
        assert model.module(torch.zeros(1, 3, 16, 16)).shape == (1, 3)


def test_mean_and_std_come_from_the_preprocessor_config(hub: Hub) -> None:
    numbers = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    hub.repositories["a/b"] = {**files(), "preprocessor_config.json": json.dumps(numbers).encode()}
    p = load_model("hf:a/b").preprocess
    assert (p.mean, p.std, p.resize) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 18)


def test_repositories_with_only_a_bin_file_load(hub: Hub, tmp_path: Path) -> None:
    torch.save(hugging_face_state(), tmp_path / "w.bin")
    hub.repositories["a/b"] = {"config.json": files()["config.json"], "pytorch_model.bin": (tmp_path / "w.bin").read_bytes()}
    assert load_model("hf:a/b").source.startswith("hf:a/b pytorch_model.bin sha256:")


def test_timm_repositories_are_identified_by_their_architecture(hub: Hub) -> None:
    config = {"architecture": "vit_small_here", "pretrained_cfg": {"mean": [0.1, 0.1, 0.1], "std": [0.2, 0.2, 0.2], "tag": "x"}}
    weights = save(build(SMALL).state_dict())
    hub.repositories["timm/x"] = {"config.json": json.dumps(config).encode(), "model.safetensors": weights}
    model = load_model("hf:timm/x")
    assert (model.name, model.preprocess.mean, model.module.config.eps) == ("vit_small_here", (0.1, 0.1, 0.1), 1e-6)


def timm_files(config: dict[str, Any]) -> dict[str, bytes]:
    weights = save(build(SMALL).state_dict())
    return {"config.json": json.dumps({"architecture": "vit_small_here", **config}).encode(), "model.safetensors": weights}


def test_crop_interpolation_and_pooling_of_timm_configs_are_used(hub: Hub) -> None:
    pretrained = {"crop_pct": 0.8, "interpolation": "bilinear", "crop_mode": "center"}
    hub.repositories["timm/x"] = timm_files({"pretrained_cfg": pretrained, "global_pool": "avg"})
    model = load_model("vit_small_here", "hf:timm/x")
    assert (model.preprocess.resize, model.preprocess.interpolation, model.module.config.pool) == (20, "bilinear", "mean")


@pytest.mark.parametrize(
    ("more", "resize", "squash"),
    [
        ({"size": {"height": 16, "width": 16}}, 16, True),
        ({"size": 16}, 16, True),
        ({"size": {"height": 24, "width": 24}, "do_center_crop": True, "crop_size": {"height": 16, "width": 16}}, 24, True),
        ({"size": {"shortest_edge": 20}, "do_center_crop": True, "crop_size": 16}, 20, False),
        ({"size": 20, "image_processor_type": "CLIPImageProcessor", "do_center_crop": True, "crop_size": 16}, 20, False),
        ({"size": {"height": 8, "width": 8}}, 16, True),  # written for 8 x 8 pixels, but the model reads 16 x 16
    ],
    ids=str,
)
def test_size_and_resample_come_from_the_preprocessor_config(hub: Hub, more: dict[str, Any], resize: int, squash: bool) -> None:
    numbers = {"resample": 2, "do_resize": True, **more}
    hub.repositories["a/b"] = {**files(), "preprocessor_config.json": json.dumps(numbers).encode()}
    p = load_model("hf:a/b").preprocess
    assert (p.resize, p.interpolation, p.height, p.squash) == (resize, "bilinear", 16, squash)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"size": {"longest_edge": 20}}, "expected height and width, or shortest_edge"),
        ({"rescale_factor": 1}, "rescale_factor 1, expected 1/255"),
        ({"do_normalize": False}, "not normalised"),
        ({"do_flip": True}, "do_flip 'True' is not understood"),
        ({"resample": 1}, "interpolation 'lanczos', expected bicubic or bilinear"),
    ],
    ids=str,
)
def test_preprocessing_that_is_not_understood_is_rejected(hub: Hub, more: dict[str, Any], message: str) -> None:
    hub.repositories["a/b"] = {**files(), "preprocessor_config.json": json.dumps(more).encode()}
    with pytest.raises(FqvitError, match=message) as caught:
        load_model("hf:a/b")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"global_pool": "max"}, "global_pool 'max', expected one of 'token', 'avg', 'map', ''"),
        ({"global_pool": "map"}, "lacks .*attn_pool"),
        ({"model_args": {"act_layer": "relu"}}, "act_layer 'relu', expected one of"),
        ({"model_args": {"block_fn": "ResPostBlock"}}, "model_args has block_fn 'ResPostBlock'"),
        ({"model_args": {"norm_layer": "rmsnorm"}}, "model_args has norm_layer 'rmsnorm'"),
        ({"rope": True}, "rope 'True' is not understood"),
        ({"pretrained_cfg": {"crop_mode": "border"}}, "crop_mode 'border', expected 'center' or 'squash'"),
        ({"pretrained_cfg": {"surprise": 1}}, "pretrained_cfg has surprise '1', which is not understood"),
        ({"architecture": "vit_base_patch16_rpn_224"}, "has blocks with another structure"),
        ({"architecture": "vit_small_patch16_rope_ape_224"}, "has rotary positions"),
        ({"architecture": "vit_base_patch16_clip_quickgelu_224"}, "norm before the blocks is False, expected True"),
        ({"pretrained_cfg": {"interpolation": "lanczos"}}, "interpolation 'lanczos', expected bicubic or bilinear"),
        ({"pretrained_cfg": {"crop_pct": 0}}, "crop_pct"),
    ],
)
def test_unsupported_timm_configs_are_rejected_under_any_name(hub: Hub, config: dict[str, Any], message: str) -> None:
    hub.repositories["timm/x"] = timm_files(config)
    for name, weights in (("hf:timm/x", None), ("vit_small_here", "hf:timm/x")):
        with pytest.raises(FqvitError, match=message):
            load_model(name, weights)


def test_an_unknown_architecture_needs_the_settings_that_its_tensors_do_not_show(hub: Hub) -> None:
    config = {"architecture": "vit_mine_patch4_16"}
    weights = save(build(SMALL).state_dict())
    hub.repositories["timm/x"] = {"config.json": json.dumps(config).encode(), "model.safetensors": weights}
    with pytest.raises(FqvitError, match="do not show heads, pool and activation, and vit_mine_patch4_16 is not a name"):
        load_model("hf:timm/x")
    model = load_model("hf:timm/x", heads=3, pool="token", activation="gelu")
    assert model.name == "vit_small_here"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu', expected one of gelu"),
        ({"model_type": "segformer"}, "model_type 'segformer' has no definition in fqvit.*pass the module"),
        ({"model_type": "siglip2"}, "NaFlex"),
        ({"architectures": ["ViTForMaskedImageModeling"]}, "weights of ViTForMaskedImageModeling, expected ViTFor"),
        ({"surprise": 3}, "config.json: surprise '3' is not understood"),
        ({"hidden_size": 24}, "width 12 in the weights, expected 24 as in config.json"),
        ({"num_attention_heads": 2}, "2 heads.*expected 3"),
        ({"id2label": {"0": "cat"}}, "1 class names for 3 logits"),
        ({"id2label": {"1": "cat", "2": "dog", "3": "eel"}}, "id2label"),
        ({"image_size": "large"}, "config.json: image_size 'large', expected an integer"),
        ({"layer_norm_eps": "nan"}, "config.json: nan in layer_norm_eps, expected finite numbers"),
        ({"layer_norm_eps": "-inf"}, "config.json: -inf in layer_norm_eps, expected finite numbers"),
    ],
)
def test_unsupported_configs_are_rejected(hub: Hub, changes: dict[str, Any], message: str) -> None:
    hub.repositories["a/b"] = files(**changes)
    with pytest.raises(FqvitError, match=message) as caught:
        load_model("vit_small_here", "hf:a/b")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"image_mean": ["nan", "inf", 1]}, "preprocessor_config.json: nan in mean, expected finite numbers"),
        ({"image_std": [1, "inf", 1]}, "preprocessor_config.json: inf in std, expected finite numbers"),
    ],
)
def test_means_and_stds_must_be_finite(hub: Hub, numbers: dict[str, Any], message: str) -> None:
    hub.repositories["a/b"] = {**files(), "preprocessor_config.json": json.dumps(numbers).encode()}
    hub.repositories["timm/x"] = timm_files({"pretrained_cfg": {name[6:]: values for name, values in numbers.items()}})
    for address, said in (("hf:a/b", message), ("hf:timm/x", message.removeprefix("preprocessor_"))):
        with pytest.raises(FqvitError, match=said) as caught:
            load_model("vit_small_here", address)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_deeply_nested_config_files_are_rejected(hub: Hub, name: str) -> None:
    nested = b'{"model_type": "vit", "unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    hub.repositories["a/b"] = {**files(), name: nested}
    with pytest.raises(FqvitError, match=f"hf:a/b: {name}: .*recursion.* The file is damaged") as caught:
        load_model("vit_small_here", "hf:a/b")
    assert "\n" not in str(caught.value)


def test_missing_models_revisions_and_files_give_a_one_line_error(hub: Hub) -> None:
    hub.repositories["a/b"] = files()
    hub.repositories["a/empty"] = {"config.json": files()["config.json"]}
    for address, message in [
        ("hf:a/nothing", "no such model on the hub"),
        ("hf:a/b@v9", "no revision 'v9'"),
        ("hf:a/empty", "has no model.safetensors or pytorch_model.bin"),
        ("hf:justname", "expected hf:ORG/NAME"),
        ("hf:../../etc", "expected hf:ORG/NAME"),
    ]:
        with pytest.raises(FqvitError, match=message) as caught:
            load_model(address)
        assert "\n" not in str(caught.value)


def test_an_unreachable_hub_gives_a_one_line_error(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.server.shutdown()
    hub.server.server_close()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # huggingface_hub waits between retries
    with pytest.raises(FqvitError, match="cannot be reached") as caught:
        load_model("hf:a/b")
    assert "\n" not in str(caught.value)


def test_without_huggingface_hub_the_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FqvitError, match="pip install huggingface_hub"):
        load_model("hf:a/b")


def test_a_hub_model_with_other_weights_is_rejected() -> None:
    with pytest.raises(FqvitError, match="already selects weights"):
        load_model("hf:a/b", "other.safetensors")
