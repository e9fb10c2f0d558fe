"""The leaf modules that ViT, DeiT and Swin are built from, and the base class of all leaf modules.

Tracing stops at a leaf, so each leaf is a node of the graph. Its output is a *site*: a tensor that may be quantized.
Each class of leaves has exactly one lowering rule (lowering/rules/). A leaf computes in float, without quantization. Its `role`
names the purpose of its output; recipes refer to roles.

Shapes: N images, T tokens, C channels, H heads, D head width, W windows. `...` stands for N in a ViT and for N, W inside Swin's
attention. See also: maps.py (leaf modules of detectors, on feature maps), general.py (those of captured graphs).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Role = Literal[
    "patch",  # patch embedding, before position embeddings are added
    "residual",  # the residual stream: embeddings and every sum
    "norm",  # LayerNorm outputs that feed a matrix product
    "qkv",
    "scores",
    "attention",  # softmax outputs
    "context",  # attention times V
    "branch",  # outputs that a block adds to the residual stream (proj, fc2)
    "hidden",  # fc1 outputs, before GELU or another function of one variable
    "gelu",
    "pooled",
    "logits",
    "pyramid",  # feature maps of detectors: laterals, their sums, outputs
    "inner",  # other values that a matrix product reads; convolutions and linear layers before a ReLU
    "relu",
    "deltas",  # box regressions
    "query",  # Q, K or V where they are not parts of one linear layer
    "key",
    "value",
    "activation",  # functions of one variable other than GELU
    "product",  # elementwise products: gated MLPs, squeeze-and-excite
    "probability",  # softmax outputs that are not multiplied by V
    "route",  # data movement: the output has the codes of the input
    "output",  # an output that a user asked for: codes with one scale and one zero point (outputs.py)
    "signs",  # sign bits of an output
]


class Leaf(nn.Module):
    """Base class of the modules that become nodes of the graph. `role` names the purpose of the output.

    For the role `output` only:   bits: bits per code (None: as in the recipe)   symmetric: the zero point is the middle code
    """

    role: Role
    bits: int | None = None
    symmetric = False

    def __init__(self, role: Role) -> None:
        super().__init__()
        self.role = role


class Linear(Leaf):
    """y[..., o] = sum_k x[..., k] * weight[o, k] + bias[o]"""

    def __init__(self, inputs: int, outputs: int, role: Role, bias: bool = True) -> None:
        super().__init__(role)
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Patches(Leaf):
    """Patch embedding: images [N, channels, height, width] -> patches [N, T, C] in row-major order.

    weight: [C, channels, patch, patch]   bias: [C]
    """

    def __init__(self, channels: int, patch: int, width: int, role: Role = "patch") -> None:
        super().__init__(role)
        self.patch = patch
        self.weight = nn.Parameter(torch.empty(width, channels, patch, patch))
        self.bias = nn.Parameter(torch.zeros(width))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        return F.conv2d(images, self.weight, self.bias, self.patch).flatten(2).transpose(1, 2)


class Embed(Leaf):
    """Prepend prefix tokens to the patches, then add position embeddings: [N, T, C] -> [N, P + T, C].

    prefix: [1, P, C], class token, distillation token or registers; P may be 0   positions: [1, P + T, C]
    """

    def __init__(self) -> None:
        super().__init__("residual")

    def forward(self, patches: Tensor, prefix: Tensor, positions: Tensor) -> Tensor:
        return torch.cat([prefix.expand(patches.shape[0], -1, -1), patches], 1) + positions


class LayerNorm(Leaf):
    """LayerNorm over the last axis, with affine parameters: weight, bias [C].

    center False: the mean is not subtracted (RMS and L2 normalisation).
    """

    def __init__(self, channels: int, eps: float, role: Role = "norm", center: bool = True) -> None:
        super().__init__(role)
        self.eps, self.center = eps, center
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.center:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


def gelu(x: float) -> float:
    """Return x * Phi(x) for one number, where Phi is the cumulative normal distribution."""
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


class Gelu(Leaf):
    """x * Phi(x), with the exact error function."""

    def __init__(self) -> None:
        super().__init__("gelu")

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class Heads(Leaf):
    """Select Q, K or V (part 0, 1 or 2) and split it into heads: [..., T, 3 * H * D] -> [..., H, T, D]."""

    def __init__(self, heads: int, part: int) -> None:
        super().__init__("route")
        self.heads = heads
        self.part = part

    def forward(self, qkv: Tensor) -> Tensor:
        channels = qkv.shape[-1] // 3
        x = qkv[..., self.part * channels : (self.part + 1) * channels]
        return x.reshape(*x.shape[:-1], self.heads, channels // self.heads).transpose(-2, -3)


class Scores(Leaf):
    """Q K^T * scale * factors[h]: Q and K, each [..., H, T, D] -> [..., H, T, T]

    factors: [H], one factor per head (cosine attention), or None
    """

    factors: Tensor | None

    def __init__(self, scale: float, factors: Tensor | None = None) -> None:
        super().__init__("scores")
        self.scale = scale
        self.register_buffer("factors", factors, persistent=False)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        scores = (q * self.scale) @ k.transpose(-2, -1)
        return scores if self.factors is None else scores * self.factors[:, None, None]


class BiasedScores(Scores):
    """Q K^T * scale * factors[h] + table[index]: Swin's scores with its relative position bias.

    table: [R, H], one row per relative position   index: [T, T], values below R
    """

    index: Tensor

    def __init__(self, scale: float, index: Tensor, factors: Tensor | None = None) -> None:
        super().__init__(scale, factors)
        self.register_buffer("index", index, persistent=False)

    def forward(self, q: Tensor, k: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(q, k) + table[self.index].permute(2, 0, 1)


class Softmax(Leaf):
    """Softmax over the last axis of [..., H, T, T]; where `mask` [W, T, T] is False, the result is 0."""

    mask: Tensor | None

    def __init__(self, mask: Tensor | None = None, cut: tuple[int, int] = (0, 0)) -> None:
        """cut: window size and shift, which determine the mask"""
        super().__init__("attention")
        self.cut = cut
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, scores: Tensor) -> Tensor:
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask[:, None], float("-inf"))
        return scores.softmax(-1)


class Context(Leaf):
    """Attention times V, heads concatenated: [..., H, T, T] x [..., H, T, D] -> [..., T, H * D]"""

    def __init__(self) -> None:
        super().__init__("context")

    def forward(self, attention: Tensor, v: Tensor) -> Tensor:
        return (attention @ v).transpose(-2, -3).flatten(-2)


class Add(Leaf):
    """Residual sum: stream + branch."""

    def __init__(self, role: Role = "residual") -> None:
        super().__init__(role)

    def forward(self, stream: Tensor, branch: Tensor) -> Tensor:
        return stream + branch


class Take(Leaf):
    """Gather rows: x [N, ..., C], viewed as [N, R, C] -> [N, *index.shape, C]; index -1 gives zeros.

    join: concatenate the last index axis into the channels: index [..., 4] -> [N, ..., 4 * C] (patch merging)
    move: the kind of index, so that the index can be computed for feature maps of other sizes (lowering/grids.py)
    cut: window size and shift, which determine the index
    """

    index: Tensor

    def __init__(
        self,
        index: Tensor,
        join: bool = False,
        move: Literal["windows", "tokens", "merge"] | None = None,
        cut: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__("route")
        self.join, self.move, self.cut = join, move, cut
        self.register_buffer("index", index, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1, -2)
        y = rows[:, self.index.clamp(min=0)]
        if bool((self.index < 0).any()):
            y = y * (self.index >= 0).unsqueeze(-1)
        return y.flatten(-2) if self.join else y


class Mean(Leaf):
    """Mean over all tokens except the first `skip`: [N, T, C] -> [N, C]"""

    def __init__(self, skip: int = 0) -> None:
        super().__init__("pooled")
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.skip :].mean(1)
