"""The known models: names, sizes and preprocessing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fqvit.errors import FqvitError
from fqvit.models import zoo
from fqvit.models.config import SwinConfig, ViTConfig


def test_names_and_aliases_are_unique() -> None:
    names = [name for row in zoo.ROWS for name in (row.name, *row.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("deit_tiny", "deit_tiny_patch16_224"),
        ("vit_base", "vit_base_patch16_224"),
        ("vit_base_384", "vit_base_patch16_384"),
        ("swin_tiny", "swin_tiny_patch4_window7_224"),
        ("swin_base_384", "swin_base_patch4_window12_384"),
        ("deit_small_distilled", "deit_small_distilled_patch16_224"),
        ("deit_base_distilled_384", "deit_base_distilled_patch16_384"),
        ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", "vit_tiny_patch16_224"),
        ("fmnist_vit", "fmnist_vit"),
    ],
)
def test_aliases_and_timm_tags_are_resolved(typed: str, name: str) -> None:
    assert zoo.find(typed).name == name


@pytest.mark.parametrize(
    ("name", "width", "patch", "side", "resize"),
    [
        ("vit_base_patch32_224", 768, 32, 224, 248),
        ("vit_base_patch8_224.augreg_in21k_ft_in1k", 768, 8, 224, 248),
        ("vit_small_patch32_384", 384, 32, 384, 384),
        ("deit3_small_patch16_224", 384, 16, 224, 248),
        ("deit3_base_patch16_384.fb_in22k_ft_in1k", 768, 16, 384, 384),
        ("deit_small_patch16_384", 384, 16, 384, 384),
    ],
)
def test_other_patch_and_image_sizes_of_a_known_model_are_resolved(
    name: str, width: int, patch: int, side: int, resize: int
) -> None:
    row = zoo.find(name)
    assert row.name == name.split(".")[0]
    assert isinstance(row.config, ViTConfig)
    assert (row.config.width, row.config.patch, row.config.image) == (width, patch, (side, side))
    assert (row.preprocess.height, row.preprocess.resize) == (side, resize)


@pytest.mark.parametrize("name", ["vit_giant_patch14_224", "deit3_medium_patch16_224", "vit_base_patch16_gap_224"])
def test_timm_models_of_other_widths_are_resolved(name: str, timm: object) -> None:
    config, model = zoo.find(name).config, timm.create_model(name, device="meta")  # type: ignore[attr-defined]
    assert isinstance(config, ViTConfig)
    assert (config.width, config.heads, config.patch) == (
        model.embed_dim,
        model.blocks[0].attn.num_heads,
        model.patch_embed.patch_size[0],
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_base_patch0_224", "not a name that fqvit knows"),
        ("vit_base_patch16_rope_224", "rotary positions .*Build it with timm and pass the module"),
        ("vit_base_patch16_rpn_224", "blocks with another structure"),
        ("vit_base_patch16_clip_224", "not a ViT, DeiT or Swin classifier"),
    ],
)
def test_unsupported_names_are_rejected_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(FqvitError, match=message):
        zoo.find(name)


def test_the_tag_of_a_name_decides_the_preprocessing() -> None:
    assert zoo.find("vit_tiny_patch16_224").preprocess.mean[0] == 0.5
    assert zoo.find("vit_small_patch8_224.dino").preprocess.mean[0] == 0.485
    assert zoo.find("deit3_small_patch16_224.fb_in1k").preprocess.resize == 248
    assert zoo.find("deit3_small_patch16_224.fb_in22k_ft_in1k").preprocess.resize == 224


def test_the_error_for_an_unknown_name_suggests_similar_ones() -> None:
    with pytest.raises(FqvitError, match="not a name that fqvit knows.*deit_tiny"):
        zoo.find("diet_tiny")
    with pytest.raises(FqvitError, match="fqvit models"):
        zoo.find("qqqqqq")


def test_names_of_timm_are_never_called_unknown() -> None:
    with pytest.raises(
        FqvitError, match=r"resnet50: has another architecture \(resnet\).*Build it with timm and pass the module"
    ):
        zoo.find("resnet50")


@pytest.mark.parametrize(
    ("name", "resize", "mean"),
    [
        ("deit_tiny", 256, 0.485),
        ("deit_base_384", 384, 0.485),
        ("vit_tiny", 248, 0.5),
        ("vit_large_384", 384, 0.5),
        ("swin_small", 248, 0.485),
        ("swin_base_384", 384, 0.485),
    ],
)
def test_rows_have_the_preprocessing_of_their_family(name: str, resize: int, mean: float) -> None:
    p = zoo.find(name).preprocess
    assert (p.resize, p.mean[0], p.interpolation) == (resize, mean, "bicubic")


def test_preprocessing_matches_the_config_and_epsilon_matches_the_family() -> None:
    for row in zoo.ROWS:
        assert row.config.image == (row.preprocess.height, row.preprocess.width)
        assert row.config.channels == row.preprocess.channels
        assert row.config.eps == (1e-5 if isinstance(row.config, SwinConfig) else 1e-6)


def test_sizes_match_timm(timm: object) -> None:
    for row in zoo.ROWS:
        if row.embedded:
            continue
        model = timm.create_model(row.name, device="meta")  # type: ignore[attr-defined]
        c = row.config
        if isinstance(c, ViTConfig):
            block = model.blocks[0]
            assert (model.embed_dim, len(model.blocks), model.num_prefix_tokens) == (c.width, c.depth, c.prefix)
            assert (block.attn.num_heads, block.mlp.fc1.out_features) == (c.heads, c.hidden)
            assert block.norm1.eps == c.eps
        else:
            assert model.embed_dim == c.width
            assert tuple(len(stage.blocks) for stage in model.layers) == c.depths
            assert tuple(stage.blocks[0].attn.num_heads for stage in model.layers) == c.heads
            assert model.norm.eps == c.eps
        assert tuple(model.patch_embed.img_size) == c.image


def test_the_zoo_does_not_import_torch() -> None:
    code = "import sys; from fqvit.models import zoo; assert zoo.ROWS; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
