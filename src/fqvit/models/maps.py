"""Leaf modules of detectors, on feature maps [N, height, width, C]. The conventions of layers.py apply.

Channels come last, as in tokens, so that a 1x1 convolution is a Linear and a map is a list of tokens with a shape. Only Grid
has a fixed size: all other leaves accept maps of any size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fqvit.models.layers import Leaf, Role


class Grid(Leaf):
    """Reshape tokens to a feature map: [N, height * width, C] -> [N, height, width, C]"""

    def __init__(self, grid: tuple[int, int]) -> None:
        super().__init__("route")
        self.grid = grid

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.view(tokens.shape[0], *self.grid, tokens.shape[2])


class Conv2d(Leaf):
    """y[n, i, j, o] = sum_{a, b, c} x[n, i + a - 1, j + b - 1, c] * weight[o, c, a, b] + bias[o]; x is 0 outside the map.

    3x3 convolution, stride 1, zero padding: [N, height, width, C] -> [N, height, width, O].
    """

    def __init__(self, inputs: int, outputs: int, role: Role) -> None:
        super().__init__(role)
        self.weight = nn.Parameter(torch.empty(outputs, inputs, 3, 3))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x.permute(0, 3, 1, 2), self.weight, self.bias, padding=1).permute(0, 2, 3, 1)


class Deconv(Leaf):
    """y[n, 2 * i + a, 2 * j + b, o] = sum_c x[n, i, j, c] * weight[c, o, a, b] + bias[o]: [N, h, w, C] -> [N, 2h, 2w, O].

    Transposed 2x2 convolution, stride 2: outputs do not overlap, so each input position is mapped linearly to four outputs.
    """

    def __init__(self, inputs: int, outputs: int, role: Role) -> None:
        super().__init__(role)
        self.weight = nn.Parameter(torch.empty(inputs, outputs, 2, 2))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        channels = x.shape[-1]
        return depth_to_space(x @ self.weight.permute(0, 2, 3, 1).reshape(channels, -1)) + self.bias


def depth_to_space(four: Tensor) -> Tensor:
    """Distribute four groups of channels over 2x2 positions: [N, h, w, 2 * 2 * O] -> [N, 2h, 2w, O]"""
    n, height, width = four.shape[:3]
    return four.view(n, height, width, 2, 2, -1).transpose(2, 3).reshape(n, 2 * height, 2 * width, -1)


class Relu(Leaf):
    """max(x, 0)"""

    def __init__(self) -> None:
        super().__init__("relu")

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


class Upsample(Leaf):
    """Nearest-neighbour resize of the smaller map to the size of the larger one: y[i] = x[floor(i * small / large)] per axis.

    If image sizes are multiples of 32, every level has exactly twice the size of the next.
    """

    def __init__(self) -> None:
        super().__init__("route")

    def forward(self, small: Tensor, large: Tensor) -> Tensor:
        return F.interpolate(small.permute(0, 3, 1, 2), (large.shape[1], large.shape[2])).permute(0, 2, 3, 1)


class Subsample(Leaf):
    """Every second column of every second row (1x1 max pooling, stride 2): [N, h, w, C] -> [N, ceil(h/2), ceil(w/2), C]"""

    def __init__(self) -> None:
        super().__init__("route")

    def forward(self, x: Tensor) -> Tensor:
        return x[:, ::2, ::2]


class Flatten(Leaf):
    """[N, h, w, C] -> [N, h * w * C]"""

    def __init__(self) -> None:
        super().__init__("route")

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)
