"""Compare the modules of detectors with torch's functions, and window attention with the released code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fqvit.detect.model.detector import at_size, build_detector
from fqvit.detect.model.pyramid import FeaturePyramid, ProposalHead, SwinBackbone, split_outputs
from fqvit.detect.model.roi_heads import BoxHead, MaskHead
from fqvit.errors import FqvitError
from fqvit.models.config import DetectorConfig, SwinConfig
from fqvit.models.graph import trace
from fqvit.models.maps import Conv2d, Deconv, Subsample, Upsample
from fqvit.models.swin import SwinBlock, relative_position_index

SWIN = SwinConfig((64, 96), 4, 3, 0, 8, (2, 2, 2, 2), (1, 2, 4, 8), 3, hidden_ratio=2, fixed_window=True)
CONFIG = DetectorConfig(SWIN, 5, channels=16, box_width=24, mask_convs=2, mask_channels=12)


def nchw(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def shake(module: torch.nn.Module) -> None:
    """Move parameters away from 0, where errors would not show."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)


def test_convolutions_match_torch() -> None:
    x, conv, deconv = torch.randn(2, 5, 7, 4), Conv2d(4, 6, "inner"), Deconv(4, 3, "inner")
    shake(conv)
    shake(deconv)
    assert torch.allclose(nchw(conv(x)), F.conv2d(nchw(x), conv.weight, conv.bias, padding=1), atol=1e-6)
    assert torch.allclose(nchw(deconv(x)), F.conv_transpose2d(nchw(x), deconv.weight, deconv.bias, stride=2), atol=1e-6)


@pytest.mark.parametrize("size", [(4, 6), (5, 7), (3, 11)])
def test_upsampling_gives_the_size_of_the_other_level(size: tuple[int, int]) -> None:
    small, large = torch.randn(1, 2, 3, 4), torch.zeros(1, *size, 4)
    rows = [i * 2 // size[0] for i in range(size[0])]
    columns = [i * 3 // size[1] for i in range(size[1])]
    assert torch.equal(Upsample()(small, large), small[:, rows][:, :, columns])


@pytest.mark.parametrize("size", [(4, 6), (5, 7), (1, 1)])
def test_the_extra_level_equals_max_pooling_of_size_1_and_stride_2(size: tuple[int, int]) -> None:
    x = torch.randn(1, *size, 4)
    assert torch.equal(nchw(Subsample()(x)), F.max_pool2d(nchw(x), 1, stride=2))


def released_attention(block: SwinBlock, x: Tensor, grid: tuple[int, int], window: int, shift: int) -> Tensor:
    """Compute norm1 to proj as in released detectors: zero padding, a cyclic shift, -100 added between different regions."""
    attn, (height, width) = block.attn, grid
    heads = attn.q.heads
    x = block.norm1(x).view(len(x), height, width, -1)
    x = F.pad(x, (0, 0, 0, -width % window, 0, -height % window))
    rows, columns = x.shape[1:3]
    x = torch.roll(x, (-shift, -shift), (1, 2))
    cut = x.view(len(x), rows // window, window, columns // window, window, -1).transpose(2, 3)
    tokens = cut.reshape(-1, window * window, x.shape[-1])
    q, k, v = F.linear(tokens, attn.qkv.weight, attn.qkv.bias).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    scores = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)
    scores = scores + attn.relative_position_bias_table[relative_position_index(window)].permute(2, 0, 1)
    if shift:
        region = torch.zeros(rows, columns)
        parts = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
        for i, a in enumerate(parts):
            for j, b in enumerate(parts):
                region[a, b] = 3 * i + j
        region = region.view(rows // window, window, columns // window, window).transpose(1, 2).reshape(-1, window * window)
        mask = torch.where(region[:, :, None] == region[:, None, :], 0.0, -100.0)
        scores = scores + mask.repeat(len(x), 1, 1)[:, None]
    tokens = F.linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), attn.proj.weight, attn.proj.bias)
    back = tokens.view(len(x), rows // window, columns // window, window, window, -1).transpose(2, 3)
    back = torch.roll(back.reshape(len(x), rows, columns, -1), (shift, shift), (1, 2))
    return back[:, :height, :width].reshape(len(x), height * width, -1)


@pytest.mark.parametrize("image", [(64, 96), (32, 32), (32, 160)])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("shifted", [False, True])
def test_window_attention_equals_released_code_on_grids_of_any_size(image: tuple[int, int], stage: int, shifted: bool) -> None:
    config = replace(SWIN, image=image)
    block, grid = SwinBlock(config, stage, shifted), config.grid(stage)
    shake(block)
    x = torch.randn(2, grid[0] * grid[1], SWIN.width * 2**stage)
    with torch.no_grad():
        expected = released_attention(block, x, grid, SWIN.window, SWIN.window // 2 if shifted else 0)
        assert torch.allclose(block.attn(block.norm1(x)), expected, atol=1e-5)


def test_norms_apply_to_the_outputs_only() -> None:
    backbone = SwinBackbone(SWIN)
    shake(backbone)
    with torch.no_grad():
        maps = backbone(torch.randn(1, 3, 64, 96))
        before = [tuple(x.shape) for x in maps]
        for i in range(4):
            backbone.get_submodule(f"norm{i}").weight.zero_()
        assert before == [(1, 16, 24, 8), (1, 8, 12, 16), (1, 4, 6, 32), (1, 2, 3, 64)]
        images = torch.randn(1, 3, 64, 96)
        bias = backbone.get_submodule("norm3").bias
        assert torch.equal(backbone(images)[3], bias.expand(1, 2, 3, 64)), "nothing else reads norm3"


def test_the_feature_pyramid_adds_from_the_top_down() -> None:
    neck, maps = FeaturePyramid([3, 5, 7], 4), [torch.randn(1, 8, 12, 3), torch.randn(1, 4, 6, 5), torch.randn(1, 2, 3, 7)]
    shake(neck)
    levels = neck(maps)
    inner = [F.conv2d(nchw(x), a.weight[:, :, None, None], a.bias) for x, a in zip(maps, neck.lateral, strict=True)]
    inner[1] = inner[1] + F.interpolate(inner[2], scale_factor=2)
    inner[0] = inner[0] + F.interpolate(inner[1], scale_factor=2)
    expected = [F.conv2d(x, conv.weight, conv.bias, padding=1) for x, conv in zip(inner, neck.output, strict=True)]
    expected.append(F.max_pool2d(expected[-1], 1, stride=2))
    assert len(levels) == 4
    assert all(torch.allclose(nchw(a), b, atol=1e-5) for a, b in zip(levels, expected, strict=True))


def test_heads_have_outputs_per_anchor_class_and_pixel() -> None:
    objectness, deltas = ProposalHead(16, 3)(torch.randn(2, 4, 6, 16))
    assert (objectness.shape, deltas.shape) == ((2, 4, 6, 3), (2, 4, 6, 12))
    classes, deltas = BoxHead(CONFIG)(torch.randn(9, 7, 7, 16))
    assert (classes.shape, deltas.shape) == ((9, 6), (9, 20))
    assert BoxHead(replace(CONFIG, agnostic=True, box_convs=2, box_fcs=1))(torch.randn(9, 7, 7, 16))[1].shape == (9, 4)
    assert MaskHead(CONFIG)(torch.randn(9, 14, 14, 16)).shape == (9, 28, 28, 5)


def test_graphs_equal_modules_and_name_each_call_uniquely() -> None:
    detector, images = build_detector(CONFIG).eval(), torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        graph, expected = trace(detector.pyramid), detector.pyramid(images)
        assert all(torch.equal(a, b) for a, b in zip(graph.run_all(images), expected, strict=True))
        assert torch.equal(graph.run(images), expected[-1])
        names = [node.name for node in graph.nodes]
        assert len(set(names)) == len(names)
        assert [name for name in names if name.startswith("rpn_head.conv")] == [
            "rpn_head.conv", *(f"rpn_head.conv@{i}" for i in range(1, 5))
        ]  # fmt: skip
        assert [len(part) for part in split_outputs(expected)] == [4, 5, 5]
        for head, side in ((detector.box_heads[0], 7), (detector.mask_heads[0], 14)):
            rois = torch.randn(3, side, side, 16)
            found, want = trace(head).run_all(rois), head(rois)
            assert all(torch.equal(a, b) for a, b in zip(found, want if isinstance(want, tuple) else (want,), strict=True))


def test_pyramids_of_different_sizes_share_their_parameters() -> None:
    detector = build_detector(CONFIG)
    other = at_size(detector.pyramid, CONFIG, 32, 160)
    assert {id(p) for p in other.parameters()} == {id(p) for p in detector.pyramid.parameters()}
    assert split_outputs(other(torch.randn(1, 3, 32, 160))).levels[0].shape == (1, 8, 40, 16)
    with pytest.raises(FqvitError, match="multiples of 32"):
        at_size(detector.pyramid, CONFIG, 32, 100)
