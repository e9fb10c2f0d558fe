"""Parts that several families share: patch embedding, MLPs, LayerScale, splitting into heads.

Names of attributes are timm's, because they are the keys of checkpoints and the names of sites.
Shapes: N images, T tokens, C channels, H heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fqvit.models.config import Activation


class QuickGelu(nn.Module):
    """x * sigmoid(1.702 * x), OpenAI's approximation of GELU."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def activation(name: Activation) -> nn.Module:
    if name == "quick_gelu":
        return QuickGelu()
    return nn.GELU(approximate="tanh" if name == "gelu_tanh" else "none")


class PatchEmbed(nn.Module):
    """Images [N, channels, height, width] -> patches [N, T, C] in row-major order."""

    def __init__(self, channels: int, patch: int, width: int, bias: bool = True) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, patch, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


class LayerScale(nn.Module):
    """Multiply the output of a branch by one factor per channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Mlp(nn.Module):
    """fc2(act(fc1(x)))"""

    def __init__(self, width: int, hidden: int, act: Activation) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = activation(act)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))  # type: ignore[no-any-return]


class PackedSwiGlu(nn.Module):
    """fc2(silu(a) * b) with [a, b] = fc1(x): DINOv2 giant. hidden: width of a and of b"""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * hidden)
        self.act = nn.SiLU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(self.act(gate) * value)  # type: ignore[no-any-return]


class SwiGlu(nn.Module):
    """fc2(silu(fc1_g(x)) * fc1_x(x)): DINOv3 S+, H+ and 7B."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1_g = nn.Linear(width, hidden)
        self.fc1_x = nn.Linear(width, hidden)
        self.act = nn.SiLU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1_g(x)) * self.fc1_x(x))  # type: ignore[no-any-return]


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[N, T, 3 * H * D] -> q, k, v, each [N, H, T, D]"""
    n, t, _ = qkv.shape
    q, k, v = qkv.reshape(n, t, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def join_heads(x: Tensor) -> Tensor:
    """[N, H, T, D] -> [N, T, H * D]"""
    n, h, t, d = x.shape
    return x.transpose(1, 2).reshape(n, t, h * d)
