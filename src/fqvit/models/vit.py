"""ViT and DeiT with timm's parameter names, built from leaf modules only.

See also: config.py and zoo.py (sizes), load.py (loads checkpoints of every layout into these names).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fqvit.models.config import ViTConfig as ViTConfig
from fqvit.models.layers import (
    Add,
    Context,
    Embed,
    Gelu,
    Heads,
    LayerNorm,
    Linear,
    Mean,
    Patches,
    Scores,
    Softmax,
    Take,
)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = Linear(width, 3 * width, "qkv")
        self.q, self.k, self.v = Heads(heads, 0), Heads(heads, 1), Heads(heads, 2)
        self.scores = Scores((width // heads) ** -0.5)
        self.softmax = Softmax()
        self.context = Context()
        self.proj = Linear(width, width, "branch")

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        attention = self.softmax(self.scores(self.q(qkv), self.k(qkv)))
        return self.proj(self.context(attention, self.v(qkv)))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = Linear(width, hidden, "hidden")
        self.act = Gelu()
        self.fc2 = Linear(hidden, width, "branch")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.norm1 = LayerNorm(c.width, c.eps)
        self.attn = Attention(c.width, c.heads)
        self.add1 = Add()
        self.norm2 = LayerNorm(c.width, c.eps)
        self.mlp = Mlp(c.width, c.hidden)
        self.add2 = Add()

    def forward(self, x: Tensor) -> Tensor:
        x = self.add1(x, self.attn(self.norm1(x)))
        return self.add2(x, self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class PatchEmbed(nn.Module):
    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.proj = Patches(channels, patch, width)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images)  # type: ignore[no-any-return]


class ViT(nn.Module):
    """Normalised images [N, channels, height, width] -> logits [N, classes]."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        c = self.config = config
        self.cls_token = nn.Parameter(torch.zeros(1, c.prefix, c.width))
        self.pos_embed = nn.Parameter(torch.empty(1, c.prefix + c.patches, c.width))
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        self.patch_embed = PatchEmbed(c.channels, c.patch, c.width)
        self.embed = Embed()
        self.blocks = nn.Sequential(*(Block(c) for _ in range(c.depth)))
        self.norm = LayerNorm(c.width, c.eps) if c.norm_first else None
        self.pool = Take(torch.arange(c.prefix), join=True) if c.pool == "token" else Mean(skip=c.prefix)
        self.fc_norm = LayerNorm(c.width, c.eps) if c.norm_last else None
        self.head = Linear(c.width * (c.prefix if c.pool == "token" else 1), c.classes, "logits")

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.embed(self.patch_embed(images), self.cls_token, self.pos_embed))
        if self.norm is not None:
            x = self.norm(x)
        x = self.pool(x)
        if self.fc_norm is not None:
            x = self.fc_norm(x)
        return self.head(x)  # type: ignore[no-any-return]
