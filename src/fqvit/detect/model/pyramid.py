"""The networks that run once per image: Swin backbone, feature pyramid (FPN) and proposal head (RPN).

`Pyramid` combines them in one module, which is traced to one graph. Only the backbone depends on the image size, through row
indices: detector.py makes one module per size, all with the same weights.
See also: roi_heads.py, the networks that run once per box.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from fqvit.models.config import DetectorConfig, SwinConfig
from fqvit.models.layers import Add, LayerNorm, Linear
from fqvit.models.maps import Conv2d, Grid, Relu, Subsample, Upsample
from fqvit.models.swin import PatchEmbed, Stage


class SwinBackbone(nn.Module):
    """Normalised images [N, 3, height, width] -> one map per stage i, [N, height / 2^(2+i), width / 2^(2+i), C * 2^i].

    norm0, norm1, ... apply to the outputs only: the next stage takes the tokens before the norm.
    """

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        c = self.config = config
        self.patch_embed = PatchEmbed(c)
        self.layers = nn.ModuleList(Stage(c, i) for i in range(len(c.depths)))
        self.grids = nn.ModuleList(Grid(c.grid(i)) for i in range(len(c.depths)))
        for i in range(len(c.depths)):
            self.add_module(f"norm{i}", LayerNorm(c.width * 2**i, c.eps))

    def forward(self, images: Tensor) -> list[Tensor]:
        x, maps = self.patch_embed(images), []
        for i, (stage, grid) in enumerate(zip(self.layers, self.grids, strict=True)):
            x = stage(x)
            maps.append(grid(self.get_submodule(f"norm{i}")(x)))
        return maps


class FeaturePyramid(nn.Module):
    """FPN: maps of decreasing size -> one level per map with `channels` channels, plus one level of half the last one's size.

    inner_i = lateral_i(x_i) + upsample(inner_{i+1});  P_i = output_i(inner_i), a 3x3 convolution;  the extra level has
    every second row and column of the last P. There are no activation functions.
    """

    def __init__(self, widths: list[int], channels: int) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(Linear(width, channels, "pyramid") for width in widths)
        self.enlarge = nn.ModuleList(Upsample() for _ in widths[1:])
        self.add = nn.ModuleList(Add("pyramid") for _ in widths[1:])
        self.output = nn.ModuleList(Conv2d(channels, channels, "pyramid") for _ in widths)
        self.extra = Subsample()

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        inner = [lateral(x) for lateral, x in zip(self.lateral, maps, strict=True)]
        for i in reversed(range(len(inner) - 1)):
            inner[i] = self.add[i](inner[i], self.enlarge[i](inner[i + 1], inner[i]))
        levels = [output(x) for output, x in zip(self.output, inner, strict=True)]
        return [*levels, self.extra(levels[-1])]


class ProposalHead(nn.Module):
    """RPN: a level [N, h, w, C] -> objectness logits [N, h, w, A] and deltas [N, h, w, 4 * A], with A anchors per position."""

    def __init__(self, channels: int, anchors: int) -> None:
        super().__init__()
        self.conv = Conv2d(channels, channels, "inner")
        self.relu = Relu()
        self.objectness = Linear(channels, anchors, "logits")
        self.deltas = Linear(channels, 4 * anchors, "deltas")

    def forward(self, level: Tensor) -> tuple[Tensor, Tensor]:
        x = self.relu(self.conv(level))
        return self.objectness(x), self.deltas(x)


class PyramidOutputs(NamedTuple):
    """levels: P2..P5, for RoIAlign   objectness, deltas: one tensor per level, P2..P6"""

    levels: tuple[Tensor, ...]
    objectness: tuple[Tensor, ...]
    deltas: tuple[Tensor, ...]


class Pyramid(nn.Module):
    """Normalised images [N, 3, height, width], sides multiples of 32 -> levels, objectness and deltas, see split_outputs."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        swin = config.backbone
        self.backbone = SwinBackbone(swin)
        self.neck = FeaturePyramid([swin.width * 2**i for i in range(len(swin.depths))], config.channels)
        self.rpn_head = ProposalHead(config.channels, config.anchors)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        levels = self.neck(self.backbone(images))
        pairs = [self.rpn_head(level) for level in levels]
        return (*levels[:-1], *(objectness for objectness, _ in pairs), *(deltas for _, deltas in pairs))


def split_outputs(outputs: tuple[Tensor, ...]) -> PyramidOutputs:
    """Split the outputs of a Pyramid or its graph: L levels, then L + 1 objectness maps, then L + 1 maps of deltas."""
    levels = (len(outputs) - 2) // 3
    return PyramidOutputs(outputs[:levels], outputs[levels : 2 * levels + 1], outputs[2 * levels + 1 :])
