"""Leaf modules of captured graphs (frontend/), with the conventions of layers.py.

Requested outputs of any model use `Narrow` and `Signs` as well (outputs.py).

Values are [N, ..., C] with channels last. Everything that depends on the image size (rows of a convolution, positions) is
computed when the graph is captured and stored as an index or a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fqvit.models.layers import Leaf, Role


class Route(Leaf):
    """Reshape, select and permute: y = x.reshape(view)[select].transpose(perm).reshape(shape), like the op Permute.

    times: number of whole input rows [C] in the last axis of the output; 0 if that axis contains parts of rows
    """

    def __init__(
        self,
        view: Sequence[int],
        perm: Sequence[int],
        shape: Sequence[int],
        select: tuple[int, int] | None = None,
        times: int = 0,
    ) -> None:
        super().__init__("route")
        self.view, self.perm, self.shape, self.select = tuple(view), tuple(perm), tuple(shape), select
        self.times = times

    @property
    def keeps_channels(self) -> bool:
        return self.times > 0

    def forward(self, x: Tensor) -> Tensor:
        y = x.reshape(x.shape[0], *self.view)
        if self.select is not None:
            y = y.select(self.select[0] + 1, self.select[1])
        return y.permute(0, *(axis + 1 for axis in self.perm)).reshape(x.shape[0], *self.shape)


class Gather(Leaf):
    """Gather runs of `width` neighbouring elements: y = x.reshape(-1, width)[index].reshape(shape); index -1 gives zeros.

    index: [R]   shape: shape of the output, without the batch axis
    """

    index: Tensor

    def __init__(self, index: Tensor, width: int, shape: Sequence[int]) -> None:
        super().__init__("route")
        self.width, self.shape = width, tuple(shape)
        self.register_buffer("index", index, persistent=False)

    keeps_channels = False

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(x.shape[0], -1, self.width)[:, self.index.clamp(min=0)]
        if bool((self.index < 0).any()):
            rows = rows * (self.index >= 0).unsqueeze(-1)
        return rows.reshape(x.shape[0], *self.shape)


class Join(Leaf):
    """Concatenate several values and gather runs of `width` elements: y = cat(x.reshape(-1, width) for x in xs)[index]

    `width` divides the channels of every input; index: [R], -1 gives zeros; shape: shape of the output, without the batch axis.
    The output is a site of its own, because the inputs have different scales.
    """

    index: Tensor

    def __init__(self, index: Tensor, width: int, shape: Sequence[int], role: Role) -> None:
        super().__init__(role)
        self.width, self.shape = width, tuple(shape)
        self.register_buffer("index", index, persistent=False)

    def forward(self, *xs: Tensor) -> Tensor:
        rows = torch.cat([x.reshape(x.shape[0], -1, self.width) for x in xs], 1)[:, self.index.clamp(min=0)]
        if bool((self.index < 0).any()):
            rows = rows * (self.index >= 0).unsqueeze(-1)
        return rows.reshape(xs[0].shape[0], *self.shape)


class Narrow(Leaf):
    """The same values with another number of bits: at most 8 for ops that cannot read more, or as requested for an output."""

    def __init__(self) -> None:
        super().__init__("inner")

    def forward(self, x: Tensor) -> Tensor:
        return x


class Activation(Leaf):
    """y = function(x) for each element; `label` names the function."""

    def __init__(self, label: str, function: Callable[[Tensor], Tensor], role: Role = "activation") -> None:
        super().__init__(role)
        self.label, self.function = label, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Multiply(Leaf):
    """Elementwise product of a [..., C] and b, which has the shape of a or of its last axes (gates)."""

    def __init__(self, role: Role = "product") -> None:
        super().__init__(role)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b.reshape(b.shape[0], *(1,) * (a.ndim - b.ndim), *b.shape[1:])


class Rotary(Leaf):
    """Rotary position embedding: y[t, c] = x[t, c] * cos[t, p] + x[t, c - p + partner[p]] * sin[t, p], where p = c mod P

    x: [N, ..., T, C]   cos, sin: [T, P], sin includes the sign   partner: [P], values below P
    """

    cos: Tensor
    sin: Tensor
    partner: Tensor

    def __init__(self, cos: Tensor, sin: Tensor, partner: Tensor, role: Role) -> None:
        super().__init__(role)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("partner", partner, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        period = len(self.partner)
        parts = x.reshape(*x.shape[:-1], -1, period)
        y = parts * self.cos[:, None] + parts[..., self.partner] * self.sin[:, None]
        return y.flatten(-2)


class Depthwise(Leaf):
    """y[p, c] = sum_k rows[index[p, k], c] * weight[k, c] + bias[c], where rows is x viewed as [R, C]; index -1 gives 0

    A depthwise convolution, or (K = 1) one scale and one offset per channel. index: [..., K]   weight: [K, C]   bias: [C]
    """

    index: Tensor

    def __init__(self, index: Tensor, weight: Tensor, bias: Tensor, role: Role) -> None:
        super().__init__(role)
        self.register_buffer("index", index, persistent=False)
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.weighted(x, self.weight, self.bias)

    def weighted(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute the output with other weights of the same shapes."""
        rows = F.pad(x.reshape(x.shape[0], -1, x.shape[-1]), (0, 0, 1, 0))  # row 0 is the padding
        y = bias.expand(x.shape[0], *self.index.shape[:-1], -1).clone()
        for k in range(self.index.shape[-1]):
            y += rows[:, self.index[..., k] + 1] * weight[k]
        return y


class Stem(Leaf):
    """A convolution of the images: y[p, o] = sum_{k, c} pixels[index[p, k], c] * weight[o, k, c] + bias[o]; index -1 gives 0

    index: [P, K], positions in row-major order   weight: [O, K, channels]   bias: [O]
    """

    index: Tensor

    def __init__(self, index: Tensor, weight: Tensor, bias: Tensor, role: Role) -> None:
        super().__init__(role)
        self.register_buffer("index", index, persistent=False)
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def rows(self, images: Tensor) -> Tensor:
        """Gather the pixels of each position: [N, channels, height, width] -> [N, P, K * channels]"""
        pixels = images.flatten(2).transpose(1, 2)
        rows = pixels[:, self.index.clamp(min=0)] * (self.index >= 0).unsqueeze(-1)
        return rows.flatten(-2)

    def forward(self, images: Tensor) -> Tensor:
        return F.linear(self.rows(images), self.weight.flatten(1), self.bias)


class Signs(Leaf):
    """Sign bits: y[j] = sum_i 2^(7 - i) * (x[8 * j + i] > 0), as numpy.packbits packs them: [N, C] -> [N, ceil(C / 8)]"""

    def __init__(self, channels: int) -> None:
        super().__init__("signs")
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        signs = F.pad((x > 0).to(x.dtype), (0, -self.channels % 8)).view(len(x), -1, 8)
        weights: Tensor = torch.exp2(torch.arange(7, -1, -1, device=x.device, dtype=x.dtype))
        return signs @ weights


class MeanRows(Leaf):
    """Mean over the axis before the channels: [N, ..., R, C] -> [N, ..., C]"""

    def __init__(self, role: Role = "pooled") -> None:
        super().__init__(role)

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-2)


class MaxRows(Leaf):
    """y[p, c] = max_k rows[index[p, k], c], where rows is x viewed as [R, C]; index -1 is left out. index: [..., K]"""

    index: Tensor

    def __init__(self, index: Tensor) -> None:
        super().__init__("route")
        self.register_buffer("index", index, persistent=False)

    keeps_channels = True

    def forward(self, x: Tensor) -> Tensor:
        rows = F.pad(x.reshape(x.shape[0], -1, x.shape[-1]), (0, 0, 1, 0), value=float("-inf"))
        return rows[:, self.index + 1].amax(-2)


class Shift(Leaf):
    """Add a constant, such as position embeddings: y = x + values. values: the shape of x without the batch axis"""

    values: Tensor

    def __init__(self, values: Tensor) -> None:
        super().__init__("residual")
        self.register_buffer("values", values, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.values
