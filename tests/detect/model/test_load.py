"""Tests of detector checkpoints: both layouts give the same model, sizes come from tensor shapes, and errors name the keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fqvit.detect.model.load import load_detector, random_release, save_detector
from fqvit.detect.settings import DetectSettings
from fqvit.errors import FqvitError
from fqvit.models.checkpoints.detector_keys import DetectorLayout
from fqvit.models.config import DetectorConfig, SwinConfig

SWIN = SwinConfig((64, 64), 4, 3, 0, 8, (2, 1, 2, 1), (1, 2, 4, 8), 3, hidden_ratio=2, fixed_window=True)
MASK_RCNN = DetectorConfig(SWIN, 5, channels=16, box_channels=16, box_width=24, mask_convs=2, mask_channels=12)
CONFIGS = {
    "mask r-cnn": MASK_RCNN,
    "one class": replace(MASK_RCNN, classes=1),
    "cascade": replace(MASK_RCNN, stages=3, agnostic=True),
    "cascade of 4conv1fc": replace(MASK_RCNN, stages=3, box_convs=4, box_fcs=1, box_channels=20),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_both_layouts_give_the_same_model_with_sizes_from_shapes(name: str) -> None:
    config = CONFIGS[name]
    a, b = (load_detector(random_release(config, layout)) for layout in ("mmdetection", "swin"))
    assert a.module.config == config
    assert a.name == ("cascade_mask_rcnn" if config.stages == 3 else "mask_rcnn")
    other = b.module.state_dict()
    assert all(torch.equal(value, other[key]) for key, value in a.module.state_dict().items())


def test_key_names_are_those_of_released_checkpoints() -> None:
    new, old = random_release(CONFIGS["cascade of 4conv1fc"], "mmdetection"), random_release(MASK_RCNN, "swin")
    assert {
        "backbone.patch_embed.projection.weight",
        "backbone.stages.2.blocks.1.attn.w_msa.relative_position_bias_table",
        "backbone.stages.0.blocks.0.ffn.layers.0.0.weight",
        "backbone.stages.0.blocks.0.ffn.layers.1.bias",
        "backbone.stages.0.downsample.reduction.weight",
        "backbone.norm3.bias",
        "neck.lateral_convs.3.conv.weight",
        "neck.fpn_convs.0.conv.bias",
        "rpn_head.rpn_conv.weight",
        "rpn_head.rpn_cls.bias",
        "rpn_head.rpn_reg.weight",
        "roi_head.bbox_head.2.shared_convs.3.conv.weight",
        "roi_head.bbox_head.0.shared_fcs.0.weight",
        "roi_head.bbox_head.1.fc_cls.weight",
        "roi_head.mask_head.2.convs.1.conv.bias",
    } <= set(new)
    assert {
        "backbone.patch_embed.proj.weight",
        "backbone.layers.0.blocks.1.attn.qkv.weight",
        "backbone.layers.2.downsample.norm.bias",
        "backbone.layers.3.blocks.0.mlp.fc1.weight",
        "roi_head.bbox_head.shared_fcs.1.weight",
        "roi_head.bbox_head.fc_reg.bias",
        "roi_head.mask_head.convs.0.conv.weight",
        "roi_head.mask_head.upsample.weight",
        "roi_head.mask_head.conv_logits.weight",
    } <= set(old)
    assert new["neck.lateral_convs.3.conv.weight"].shape == (16, 64, 1, 1)


def test_patch_merging_equals_that_of_mmdetection() -> None:
    release = random_release(MASK_RCNN, "mmdetection")
    module = load_detector(release).module.pyramid.backbone.layers[1].downsample
    x = torch.randn(2, 16, 16, 8)
    rows = F.unfold(x.permute(0, 3, 1, 2), 2, stride=2).transpose(1, 2)
    norm = [release[f"backbone.stages.0.downsample.norm.{p}"] for p in ("weight", "bias")]
    expected = F.linear(F.layer_norm(rows, (32,), *norm), release["backbone.stages.0.downsample.reduction.weight"])
    with torch.no_grad():
        assert torch.allclose(module(x.flatten(1, 2)), expected, atol=1e-5)


def test_box_head_weights_are_converted_from_channels_first() -> None:
    release = random_release(CONFIGS["cascade of 4conv1fc"], "mmdetection")
    for i in range(4):  # batch norm instead of a bias in the convolution
        stem = f"roi_head.bbox_head.1.shared_convs.{i}"
        norm = nn.BatchNorm2d(20)
        del release[f"{stem}.conv.bias"]
        with torch.no_grad():
            for part in (norm.weight, norm.bias, norm.running_mean):
                part.copy_(torch.randn(20))
            norm.running_var.copy_(torch.rand(20) + 0.1)
        release.update({f"{stem}.bn.{key}": value for key, value in norm.state_dict().items()})
    head = load_detector(release).module.box_heads[1]
    rois = torch.randn(3, 16, 7, 7)

    def part(name: str) -> Tensor:
        return release[f"roi_head.bbox_head.1.{name}"]

    x = rois
    for i in range(4):
        x = F.conv2d(x, part(f"shared_convs.{i}.conv.weight"), padding=1)
        mean, var, weight, bias = (part(f"shared_convs.{i}.bn.{p}") for p in ("running_mean", "running_var", "weight", "bias"))
        x = F.relu(F.batch_norm(x, mean, var, weight, bias))
    x = F.relu(F.linear(x.flatten(1), part("shared_fcs.0.weight"), part("shared_fcs.0.bias")))
    with torch.no_grad():
        classes, deltas = head(rois.permute(0, 2, 3, 1))
    assert torch.allclose(classes, F.linear(x, part("fc_cls.weight"), part("fc_cls.bias")), rtol=1e-3, atol=1e-3)
    assert torch.allclose(deltas, F.linear(x, part("fc_reg.weight"), part("fc_reg.bias")), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", ["mmdetection", "swin"])
def test_training_checkpoints_load_and_derived_tensors_are_ignored(tmp_path: Path, layout: DetectorLayout) -> None:
    release = random_release(MASK_RCNN, layout)
    table = next(key for key in release if key.endswith("relative_position_bias_table"))
    release[table.replace("bias_table", "index")] = torch.zeros(9, 9, dtype=torch.long)
    path = tmp_path / "epoch_36.pth"
    torch.save({"meta": {"epoch": 36, "CLASSES": ("a", "b")}, "state_dict": release}, path)
    loaded = load_detector(path)
    assert loaded.module.config == MASK_RCNN
    assert loaded.source.startswith("epoch_36.pth sha256:")
    assert not loaded.module.training


def test_saved_detectors_keep_their_settings(tmp_path: Path) -> None:
    loaded = load_detector(random_release(MASK_RCNN, "swin"))
    settings = DetectSettings(short=128, long=128, anchor_scale=4.0, classes=tuple("abcde"))
    save_detector(tmp_path / "a.safetensors", loaded.module, settings)
    again = load_detector(tmp_path / "a.safetensors")
    assert again.settings == settings
    state = again.module.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in loaded.module.state_dict().items())
    save_detector(tmp_path / "half.safetensors", loaded.module, settings, half=True)
    assert (tmp_path / "half.safetensors").stat().st_size < 0.6 * (tmp_path / "a.safetensors").stat().st_size
    assert load_detector(tmp_path / "half.safetensors").module.config == MASK_RCNN


def test_80_classes_get_the_names_of_coco() -> None:
    settings = load_detector(random_release(replace(MASK_RCNN, classes=80), "swin")).settings
    assert (settings.classes[79], settings.category(79), settings.category(0)) == ("toothbrush", 90, 1)


def broken(**changes: Tensor | None) -> dict[str, Tensor]:
    release = random_release(MASK_RCNN, "mmdetection")
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del release[name]
        else:
            release[name] = value
    return release


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"neck__fpn_convs__2__conv__bias": None}, "lacks 1 key: 'neck.fpn_convs.2.conv.bias'"),
        ({"rpn_head__rpn_cls__weight": None}, "lacks 'rpn_head.rpn_cls.weight'"),
        ({"roi_head__bbox_head__fc_cls__weight": None}, "lacks 'roi_head.bbox_head.fc_cls.weight'"),
        ({"roi_head__mask_head__extra": torch.zeros(1)}, "1 unexpected key: 'roi_head.mask_head.extra'"),
        ({"backbone__norm1__bias": torch.zeros(5)}, r"'backbone.norm1.bias' is \[5\], expected \[16\]"),
        ({"rpn_head__rpn_cls__weight": torch.zeros(3)}, "'rpn_head.rpn_cls.weight' is .3., expected 2 axes"),
        ({"backbone__stages__0__downsample__norm__bias": torch.zeros(30)}, "expected a last axis divisible by 4"),
        ({"backbone__stages__0__downsample__norm__bias": torch.tensor(1.0)}, "expected a last axis divisible by 4"),
        ({"backbone__stages__100__blocks__0__norm1__bias": torch.zeros(1)}, "above 99"),
        (
            {"backbone__stages__1__blocks__0__attn__w_msa__relative_position_bias_table": torch.zeros(24, 2)},
            "heads that divide 16",
        ),
        ({"roi_head__bbox_head__shared_fcs__0__weight": torch.zeros(24, 100)}, r"expected 16 \* side\^2 inputs"),
        ({"neck__fpn_convs__0__bn__weight": torch.zeros(16)}, "lacks 'neck.fpn_convs.0.bn.bias'"),
        ({"roi_head__bbox_head__0__fc_cls__bias": torch.zeros(6)}, "under two names"),
    ],
)
def test_errors_for_faulty_checkpoints_name_the_tensor(changes: dict[str, Tensor | None], said: str) -> None:
    with pytest.raises(FqvitError, match=said):
        load_detector(broken(**changes))


def test_other_models_are_rejected() -> None:
    with pytest.raises(FqvitError, match="not a Swin-based detector"):
        load_detector({"backbone.conv1.weight": torch.zeros(1)})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (DetectSettings(classes=("a",)), "1 class names for 5 classes"),
        (DetectSettings(anchor_ratios=(1.0,)), "1 anchor_ratios"),
        (DetectSettings(strides=(4, 8)), "2 strides"),
        (DetectSettings(stds=()), "stds of 0 stages"),
    ],
)
def test_settings_that_do_not_fit_the_weights_are_rejected(settings: DetectSettings, said: str) -> None:
    with pytest.raises(FqvitError, match=said):
        load_detector(random_release(MASK_RCNN, "swin"), settings)


def test_the_error_for_damaged_settings_in_metadata_names_the_field(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    text = msgspec.json.encode(DetectSettings()).decode().replace("800", '"wide"')
    save_file(random_release(MASK_RCNN, "swin"), tmp_path / "a.safetensors", {"fqvit.detector": text})
    with pytest.raises(FqvitError, match="a.safetensors: fqvit.detector .*short"):
        load_detector(tmp_path / "a.safetensors")
