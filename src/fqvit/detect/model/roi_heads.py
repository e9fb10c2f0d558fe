"""The networks that run once per box, on its RoI (region of interest) features: box head (classes and deltas) and mask head.

Each head is traced to a separate graph. RoIAlign (float/roialign.py), which runs before the heads, is not part of a graph.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from fqvit.models.config import DetectorConfig
from fqvit.models.layers import Linear
from fqvit.models.maps import Conv2d, Deconv, Flatten, Relu


class ConvRelu(nn.Module):
    """A 3x3 convolution and a ReLU. Batch norms of checkpoints are folded into the convolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = Conv2d(inputs, outputs, "inner")
        self.relu = Relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.conv(x))  # type: ignore[no-any-return]


class LinearRelu(nn.Module):
    """A linear layer and a ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = Linear(inputs, outputs, "inner")
        self.relu = Relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.linear(x))  # type: ignore[no-any-return]


class BoxHead(nn.Module):
    """RoI features [R, side, side, C] -> class logits [R, classes + 1], background last; deltas [R, 4] or [R, classes * 4]."""

    def __init__(self, c: DetectorConfig) -> None:
        super().__init__()
        widths = [c.channels] + [c.box_channels] * c.box_convs
        self.convs = nn.Sequential(*(ConvRelu(a, b) for a, b in pairwise(widths)))
        self.flatten = Flatten()
        widths = [widths[-1] * c.box_side**2] + [c.box_width] * c.box_fcs
        self.fcs = nn.Sequential(*(LinearRelu(a, b) for a, b in pairwise(widths)))
        self.classes = Linear(widths[-1], c.classes + 1, "logits")
        self.deltas = Linear(widths[-1], 4 if c.agnostic else 4 * c.classes, "deltas")

    def forward(self, rois: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fcs(self.flatten(self.convs(rois)))
        return self.classes(x), self.deltas(x)


class MaskHead(nn.Module):
    """RoI features [R, side, side, C] -> mask logits [R, 2 * side, 2 * side, classes]."""

    def __init__(self, c: DetectorConfig) -> None:
        super().__init__()
        widths = [c.channels] + [c.mask_channels] * c.mask_convs
        self.convs = nn.Sequential(*(ConvRelu(a, b) for a, b in pairwise(widths)))
        self.upsample = Deconv(widths[-1], c.mask_channels, "inner")
        self.relu = Relu()
        self.logits = Linear(c.mask_channels, c.classes, "logits")

    def forward(self, rois: Tensor) -> Tensor:
        return self.logits(self.relu(self.upsample(self.convs(rois))))  # type: ignore[no-any-return]
