"""Checkpoints of timm and of the original releases load into plain modules: layouts, names, sizes and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fqvit.errors import FqvitError
from fqvit.models import live
from fqvit.models.config import BeitConfig, DinoV3Config, VisionConfig
from fqvit.models.families.build import FamilyConfig, build_family
from fqvit.models.load import is_plain, load_model

State = dict[str, Tensor]
SIZES: dict[str, Any] = {"image": (32, 32), "patch": 8, "channels": 3, "width": 24, "depth": 2, "heads": 3, "hidden": 96}
CLIP = VisionConfig(**SIZES, outputs=10, norm_pre=True, patch_bias=False, activation="quick_gelu", head_bias=False, eps=1e-5)
SETTINGS: dict[str, Any] = {"heads": 3, "pool": "token", "activation": "gelu"}


def random_state(config: FamilyConfig) -> State:
    generator = torch.Generator().manual_seed(0)
    return {k: 0.3 * torch.randn(v.shape, generator=generator) for k, v in build_family(config).state_dict().items()}


def expected(config: FamilyConfig, state: State, images: Tensor) -> Tensor:
    module = build_family(config).eval()
    module.load_state_dict(state)
    with torch.no_grad():
        return module(images)  # type: ignore[no-any-return]


def run(module: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return module(images)  # type: ignore[no-any-return]


def to_openai(state: State) -> State:
    renames = [
        (r"^patch_embed\.proj", "conv1"),
        (r"^cls_token", "class_embedding"),
        (r"^pos_embed", "positional_embedding"),
        (r"^norm_pre", "ln_pre"),
        (r"^norm\.", "ln_post."),
        (r"^head\.weight", "proj"),
        (r"^blocks\.", "transformer.resblocks."),
        (r"\.norm([12])\.", r".ln_\1."),
        (r"\.qkv\.", ".in_proj_"),
        (r"\.attn\.proj\.", ".attn.out_proj."),
        (r"\.mlp\.fc1", ".mlp.c_fc"),
        (r"\.mlp\.fc2", ".mlp.c_proj"),
    ]
    out = {}
    for key, value in state.items():
        for pattern, new in renames:
            key = re.sub(pattern, new, key)
        value = value.T if key == "proj" else value
        out[f"visual.{key}"] = (
            value.flatten() if key == "class_embedding" else value[0] if key.startswith("positional") else value
        )
    text = {
        "transformer.resblocks.0.ln_1.weight": torch.ones(3),
        "token_embedding.weight": torch.ones(3),
        "logit_scale": torch.ones(()),
    }
    return {**out, **text, "positional_embedding": torch.ones(3, 3)}


@pytest.mark.parametrize("prefix", ["visual.", ""])
def test_openai_clip_loads_with_and_without_its_text_tower(prefix: str) -> None:
    state, images = random_state(CLIP), torch.randn(2, 3, 32, 32)
    theirs = to_openai(state)
    if not prefix:
        theirs = {key.removeprefix("visual."): value for key, value in theirs.items() if key.startswith("visual.")}
    model = load_model(weights=theirs, **{**SETTINGS, "activation": "quick_gelu"})
    assert is_plain(model.module) and model.module.config == CLIP
    assert torch.equal(run(model.module, images), expected(CLIP, state, images))
    with pytest.raises(FqvitError, match="do not show activation"):
        load_model(weights=theirs, heads=3, pool="token")


def test_the_config_of_an_openclip_folder_decides_the_settings(tmp_path: Path) -> None:
    state, images = random_state(CLIP), torch.randn(2, 3, 32, 32)
    vision = {"image_size": 32, "layers": 2, "width": 24, "head_width": 8, "patch_size": 8}
    preprocess = {
        "size": [32, 32],
        "mean": [0.1, 0.2, 0.3],
        "std": [0.4, 0.5, 0.6],
        "resize_mode": "squash",
        "interpolation": "bicubic",
    }
    config = {"model_cfg": {"embed_dim": 10, "quick_gelu": True, "vision_cfg": vision}, "preprocess_cfg": preprocess}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in to_openai(state).items()}, tmp_path / "open_clip_model.safetensors")
    model = load_model(weights=tmp_path)
    assert torch.equal(run(model.module, images), expected(CLIP, state, images))
    assert (model.preprocess.squash, model.preprocess.mean[0], model.assumed) == (True, 0.1, ())
    config["model_cfg"]["vision_cfg"] = {**vision, "attentional_pool": True}  # type: ignore[index]
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(FqvitError, match="vision_cfg has attentional_pool 'True', which is not understood"):
        load_model(weights=tmp_path)


@pytest.mark.parametrize("swiglu", [False, True])
def test_the_original_dinov2_with_registers_loads(swiglu: bool) -> None:
    config = VisionConfig(**SIZES, outputs=0, registers=4, prefix_positions=False, layer_scale=True, swiglu=swiglu)
    state, images = random_state(config), torch.randn(2, 3, 32, 32)
    theirs = {**state, "register_tokens": state["reg_token"], "mask_token": torch.zeros(1, 24)}
    del theirs["reg_token"]
    shift = torch.randn(1, 1, 24)  # the original adds a position embedding to the class token
    theirs["cls_token"], theirs["pos_embed"] = state["cls_token"] - shift, torch.cat([shift, state["pos_embed"]], 1)
    if swiglu:
        theirs = {k.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3"): v for k, v in theirs.items()}
    model = load_model(weights=theirs, **{**SETTINGS, **({"activation": None} if swiglu else {})})
    assert model.module.config == config
    torch.testing.assert_close(run(model.module, images), expected(config, state, images), rtol=1e-5, atol=1e-5)


def test_the_original_dinov3_loads() -> None:
    config = DinoV3Config(**SIZES, outputs=0)
    state, images = random_state(config), torch.randn(2, 3, 32, 32)
    theirs: State = {"rope_embed.periods": torch.ones(2), "mask_token": torch.zeros(1, 24)}
    for key, value in state.items():
        if key.endswith("q_bias"):
            masked = torch.full((24,), 7.0)  # the bias of k is masked
            theirs[key.replace("q_bias", "qkv.bias")] = torch.cat([value, masked, state[key.replace("q_bias", "v_bias")]])
            theirs[key.replace("q_bias", "qkv.bias_mask")] = torch.full((72,), torch.nan)
        elif not key.endswith("v_bias"):
            theirs[re.sub(r"gamma_([12])", r"ls\1.gamma", key).replace("reg_token", "storage_tokens")] = value
    model = load_model(weights=theirs, size=32, heads=3, pool="token")
    assert torch.equal(run(model.module, images), expected(config, state, images))


def test_the_tensors_of_a_beit_show_its_heads_and_image_size() -> None:
    config = BeitConfig(**SIZES, outputs=7)
    state, images = random_state(config), torch.randn(2, 3, 32, 32)
    model = load_model(weights={**state, "blocks.0.attn.relative_position_index": torch.zeros(17, 17)}, pool="avg")
    assert model.module.config == config
    assert torch.equal(run(model.module, images), expected(config, state, images))
    with pytest.raises(FqvitError, match="relative positions of BEiT are for 32 x 32"):
        load_model(weights=state, pool="avg", size=48)


def test_a_checkpoint_without_a_classifier_is_a_feature_extractor() -> None:
    config = VisionConfig(**SIZES, outputs=0)
    state, images = random_state(config), torch.randn(2, 3, 32, 32)
    model = load_model(weights=state, **SETTINGS)
    assert torch.equal(run(model.module, images), expected(config, state, images)) and model.classes is None
    with pytest.raises(FqvitError, match="2 class names for 0 logits"):
        load_model(weights=state, classes=["a", "b"], **SETTINGS)


def test_a_classifier_loads_as_a_feature_extractor() -> None:
    state, images = random_state(VisionConfig(**SIZES, outputs=5)), torch.randn(2, 3, 32, 32)
    model = load_model(weights=state, features=True, **SETTINGS)
    headless = {k: v for k, v in state.items() if not k.startswith("head.")}
    assert torch.equal(run(model.module, images), expected(VisionConfig(**SIZES, outputs=0), headless, images))


def test_position_embeddings_are_resampled_as_in_timm(timm: ModuleType) -> None:
    options: dict[str, Any] = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 0}
    oracle = timm.models.VisionTransformer(img_size=56, **options).eval()
    model = load_model(weights=oracle.state_dict(), size=(32, 48), **SETTINGS)
    oracle.set_input_size((32, 48))
    images = torch.randn(2, 3, 32, 48)
    assert torch.equal(run(model.module, images), run(oracle, images))
    assert (model.preprocess.height, model.preprocess.width) == (32, 48)
    classifier = timm.models.VisionTransformer(img_size=56, **{**options, "num_classes": 5}).eval()
    leaves = load_model(weights=classifier.state_dict(), size=(32, 48), **SETTINGS)
    classifier.set_input_size((32, 48))
    assert not is_plain(leaves.module)
    torch.testing.assert_close(run(leaves.module, images), run(classifier, images), rtol=1e-5, atol=1e-6)


NAMES: list[tuple[str, dict[str, Any]]] = [
    ("vit_base_patch32_clip_quickgelu_224", {"num_classes": 10}),
    ("vit_base_patch16_siglip_gap_224", {}),
    ("vit_base_patch16_siglip_224", {}),
    ("vit_small_patch14_reg4_dinov2", {"img_size": 56}),
    ("vit_small_patch16_dinov3_qkvb", {"img_size": 64}),
    ("vit_base_patch16_gap_224", {}),
    ("beit_base_patch16_224", {}),
    ("swinv2_tiny_window8_256", {}),
    ("vit_small_patch16_224", {"num_classes": 0}),
]


@pytest.mark.parametrize(("name", "options"), NAMES)
def test_timm_folders_and_modules_in_memory_agree(timm: ModuleType, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    depth = {"depths": (1, 2, 1, 1)} if "swin" in name else {"depth": 2}
    oracle = timm.create_model(name, **depth, **options).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in oracle.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    cfg = {key: value for key, value in oracle.pretrained_cfg.items() if key not in ("architecture", "label_names")}
    config = {
        "architecture": name,
        "num_classes": oracle.num_classes,
        "global_pool": oracle.global_pool,
        "model_args": {**options, **depth},
        "pretrained_cfg": cfg,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in oracle.state_dict().items()}, tmp_path / "model.safetensors")
    model = load_model(weights=tmp_path)
    height, width = model.preprocess.height, model.preprocess.width
    images = torch.randn(2, 3, height, width)
    want, got = run(oracle, images), run(model.module, images)
    assert float((want - got).abs().max() / want.abs().max()) < 2e-6
    described = live.describe(oracle)
    assert (described.name, described.image) == (name, (height, width))
    assert described.preprocess() == (model.preprocess, ())
    assert model.assumed == ()


def test_timm_folders_must_have_the_structure_of_their_architecture(timm: ModuleType, tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1, class_token=False, global_pool="avg")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224", "global_pool": "token"}))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(FqvitError, match="class_token is False, expected True"):
        load_model(weights=tmp_path)


def test_modules_from_neither_timm_nor_transformers_need_a_size() -> None:
    described = live.describe(nn.Sequential(nn.Conv2d(1, 2, 3)))
    assert (described.name, described.channels) == ("Sequential", 1)
    with pytest.raises(FqvitError, match="the image size of the module is unknown. Pass size"):
        described.preprocess()
    preprocess, assumed = described.preprocess((28, 28))
    assert preprocess.channels == 1 and len(assumed) == 3


def test_real_dinov2_weights_of_both_layouts_give_the_same_bits_as_timm(timm: ModuleType, shared_data: Path) -> None:
    folder = shared_data / "weights"
    model = load_model("vit_small_patch14_dinov2", folder / "dinov2_vits14.safetensors", size=224)
    oracle = timm.create_model("vit_small_patch14_dinov2", img_size=224).eval()
    # The file is float16. In float32, timm does not round the resampled position embeddings.
    state = {k: v.float() for k, v in load_file(folder / "dinov2_vits14.safetensors").items()}
    oracle.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(dict(state), oracle))
    images = torch.randn(1, 3, 224, 224)
    assert torch.equal(run(model.module, images), run(oracle, images))
    assert model.preprocess.mean[0] == 0.485 and model.preprocess.resize == 224
    assert any("timm's vit_small_patch14_dinov2.lvd142m" in sentence for sentence in model.assumed)

    registers = load_model("dinov2_vits14_reg", folder / "dinov2_vits14_reg4_mri.safetensors", size=224)
    oracle = timm.create_model("vit_small_patch14_reg4_dinov2", img_size=224).eval()
    state = {k: v.float() for k, v in load_file(folder / "dinov2_vits14_reg4_mri.safetensors").items()}
    converted = timm.models.vision_transformer.checkpoint_filter_fn({**state, "mask_token": torch.zeros(1)}, oracle)
    oracle.load_state_dict(converted)
    assert torch.equal(run(registers.module, images), run(oracle, images))


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("vit_small_patch16_224", "vit_small_patch16_rope_ape_224", "LayerScale|gamma_1|class_token"),
        ("deit3_small_patch16_224", "vit_small_patch16_rope_224", "family 'beit'|positions|pos_embed"),
        ("vit_base_patch16_224", "vit_base_patch16_gap_224", "class_token is False, expected True"),
        ("vit_base_patch16_224", "vit_base_patch16_rpn_224", "class_token is False, expected True"),
        ("vit_base_patch16_224", "vit_base_patch16_siglip_224", "class_token is False, expected True"),
        ("vit_base_patch16_gap_224", "vit_base_patch16_rpn_224", "qkv_bias is False, expected True"),
    ],
)
def test_other_models_of_timm_do_not_load_under_a_similar_name(timm: ModuleType, name: str, other: str, message: str) -> None:
    """With the settings of the name, they would load, but logits would be off by up to 70 % of the largest logit."""
    state = timm.create_model(other, depth=1).state_dict()
    with pytest.raises(FqvitError, match=message):
        load_model(name, state)
    with pytest.raises(FqvitError):
        load_model(weights=state)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("vit_small_patch16_rope_ape_224", "has rotary positions"), ("nest_tiny", "has another architecture (nest)")],
)
def test_names_of_undefined_architectures_are_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(FqvitError, match=re.escape(f"{name}: {reason}") + ".*Build it with timm and pass the module"):
        load_model(name, random_state(VisionConfig(**SIZES, outputs=5)))


@pytest.mark.parametrize(("setting", "value"), [("pool", "mean"), ("activation", "relu")])
def test_settings_with_unknown_values_are_refused(setting: str, value: str) -> None:
    settings: dict[str, Any] = {setting: value}
    with pytest.raises(FqvitError, match=f"{setting}: '{value}', expected one of "):
        load_model(weights={}, **settings)
