"""DINOv3's vision transformer, equivalent to timm's Eva: registers, LayerScale, and rotary position embeddings (RoPE).

Only patches are rotated; there are no learned position embeddings.
Only q and v have biases. The rotary tables depend only on the config, so they are buffers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fqvit.models.config import DinoV3Config
from fqvit.models.families.parts import Mlp, PatchEmbed, SwiGlu, join_heads, split_heads


def rotary_angles(grid: tuple[int, int], head_width: int, theta: float) -> Tensor:
    """Return the angle of each patch and pair of channels: [patches, D / 2], where D is head_width.

    The first D / 4 angles depend on the row, the last D / 4 on the column. Coordinates are patch centres in -1..1; the
    period of frequency i is theta^(4 * i / D).
    """
    rows, columns = (2 * (torch.arange(side, dtype=torch.float32) + 0.5) / side - 1 for side in grid)
    centres = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1)
    exponents = 2 * torch.arange(head_width // 4, dtype=torch.float32) / (head_width // 2)
    return (2 * math.pi * centres[:, :, None] / theta**exponents).flatten(1)


def rotate_half(x: Tensor) -> Tensor:
    """[a, b] -> [-b, a], two halves of the last axis"""
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


class Rotary(nn.Module):
    """Rotate the channels of all tokens after the first `prefix`: [N, H, T, D] -> [N, H, T, D]

    sin, cos: [patches, D]
    """

    sin: Tensor
    cos: Tensor

    def __init__(self, c: DinoV3Config) -> None:
        super().__init__()
        self.prefix = c.prefix
        angles = rotary_angles(c.grid, c.width // c.heads, c.theta).repeat(1, 2)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("cos", angles.cos(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        prefix, patches = x[:, :, : self.prefix], x[:, :, self.prefix :]
        return torch.cat([prefix, patches * self.cos + rotate_half(patches) * self.sin], 2)


class Attention(nn.Module):
    """Multi-head attention with rotary position embeddings: [N, T, C] -> [N, T, C]. The bias of k is always 0."""

    k_bias: Tensor

    def __init__(self, c: DinoV3Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv = nn.Linear(c.width, 3 * c.width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(c.width)) if c.qv_bias else None
        self.v_bias = nn.Parameter(torch.zeros(c.width)) if c.qv_bias else None
        self.register_buffer("k_bias", torch.zeros(c.width), persistent=False)
        self.proj = nn.Linear(c.width, c.width)

    def forward(self, x: Tensor, rope: nn.Module) -> Tensor:
        bias = None
        if self.q_bias is not None and self.v_bias is not None:
            bias = torch.cat([self.q_bias, self.k_bias, self.v_bias])
        q, k, v = split_heads(F.linear(x, self.qkv.weight, bias), self.heads)
        return self.proj(join_heads(F.scaled_dot_product_attention(rope(q), rope(k), v)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, c: DinoV3Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(c.width, c.eps)
        self.attn = Attention(c)
        self.gamma_1 = nn.Parameter(torch.ones(c.width))
        self.norm2 = nn.LayerNorm(c.width, c.eps)
        self.mlp = SwiGlu(c.width, c.hidden) if c.swiglu else Mlp(c.width, c.hidden, "gelu")
        self.gamma_2 = nn.Parameter(torch.ones(c.width))

    def forward(self, x: Tensor, rope: nn.Module) -> Tensor:
        x = x + self.gamma_1 * self.attn(self.norm1(x), rope)
        return x + self.gamma_2 * self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class DinoV3(nn.Module):
    """Normalised images [N, channels, height, width] -> features or logits [N, width or outputs]; tokens for pool "none"."""

    def __init__(self, config: DinoV3Config) -> None:
        super().__init__()
        c = self.config = config
        self.patch_embed = PatchEmbed(c.channels, c.patch, c.width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, c.width))
        self.reg_token = nn.Parameter(torch.zeros(1, c.registers, c.width)) if c.registers else None
        self.rope = Rotary(c)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.depth))
        self.norm = nn.LayerNorm(c.width, c.eps)
        self.head = nn.Linear(c.width, c.outputs) if c.outputs else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)
        prefix = [token.expand(x.shape[0], -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        x = torch.cat([*prefix, x], 1)
        for block in self.blocks:
            x = block(x, self.rope)
        x = self.norm(x)
        if self.config.pool == "token":
            x = x[:, 0]
        elif self.config.pool == "avg":
            x = x[:, self.config.prefix :].mean(1)
        return self.head(x)  # type: ignore[no-any-return]
