"""Swin Transformer (version 1) with timm's parameter names, built from leaf modules only.

Tokens are one row-major list [N, T, C]. Window partitioning, cyclic shifts and patch merging are row gathers, whose
indices are computed once, in this module. See also: vit.py (the MLP), zoo.py (sizes).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fqvit.models.config import SwinConfig as SwinConfig
from fqvit.models.layers import (
    Add,
    BiasedScores,
    Context,
    Heads,
    LayerNorm,
    Linear,
    Mean,
    Patches,
    Softmax,
    Take,
)
from fqvit.models.vit import Mlp


def window_index(grid: tuple[int, int], window: int, shift: int) -> Tensor:
    """Return the token at each position of each window after a cyclic shift, -1 for padding: [W, window^2]"""
    height, width = grid
    padded_height, padded_width = -(-height // window) * window, -(-width // window) * window
    numbers = torch.full((padded_height, padded_width), -1)
    numbers[:height, :width] = torch.arange(height * width).view(height, width)
    return _cut_windows(numbers.roll((-shift, -shift), (0, 1)), window)


def inverse_index(index: Tensor, tokens: int) -> Tensor:
    """Return the position of each token in window_index, so that Take(inverse) undoes Take(index): [T]"""
    return index.flatten().argsort()[index.numel() - tokens :]  # skips padding, whose -1 is sorted first


def shift_mask(grid: tuple[int, int], window: int, shift: int) -> Tensor | None:
    """Return a mask: True if two positions of a shifted window come from the same image region: [W, window^2, window^2]

    Return None without a shift.
    """
    if shift == 0:
        return None
    height, width = (-(-side // window) * window for side in grid)
    region = torch.zeros(height, width, dtype=torch.long)
    cuts = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
    for i, rows in enumerate(cuts):
        for j, columns in enumerate(cuts):
            region[rows, columns] = 3 * i + j
    regions = _cut_windows(region, window)
    return regions[:, :, None] == regions[:, None, :]


def relative_position_index(window: int) -> Tensor:
    """Return the row of the bias table for each pair of positions: [window^2, window^2]"""
    position = torch.arange(window * window)
    row, column = position // window, position % window
    d_row = row[:, None] - row[None, :] + window - 1
    d_column = column[:, None] - column[None, :] + window - 1
    return d_row * (2 * window - 1) + d_column


def merge_index(grid: tuple[int, int]) -> Tensor:
    """Return the four tokens that are merged into one, in order (0, 0), (1, 0), (0, 1), (1, 1), -1 for padding: [T / 4, 4]"""
    height, width = grid
    numbers = torch.full((height + height % 2, width + width % 2), -1)
    numbers[:height, :width] = torch.arange(height * width).view(height, width)
    corners = [numbers[i::2, j::2].flatten() for j in (0, 1) for i in (0, 1)]
    return torch.stack(corners, -1)


def _cut_windows(grid: Tensor, window: int) -> Tensor:
    """Cut a grid into windows: [height, width] -> [W, window^2]"""
    height, width = grid.shape
    split = grid.view(height // window, window, width // window, window)
    return split.transpose(1, 2).reshape(-1, window * window)


class WindowAttention(nn.Module):
    def __init__(self, width: int, heads: int, window: int, grid: tuple[int, int], shift: int) -> None:
        super().__init__()
        index = window_index(grid, window, shift)
        cut = (window, shift)
        self.windows = Take(index, move="windows", cut=cut)
        self.qkv = Linear(width, 3 * width, "qkv")
        self.q, self.k, self.v = Heads(heads, 0), Heads(heads, 1), Heads(heads, 2)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        self.scores = BiasedScores((width // heads) ** -0.5, relative_position_index(window))
        self.softmax = Softmax(shift_mask(grid, window, shift), cut)
        self.context = Context()
        self.tokens = Take(inverse_index(index, grid[0] * grid[1]), move="tokens", cut=cut)
        self.proj = Linear(width, width, "branch")

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.windows(x))
        attention = self.softmax(self.scores(self.q(qkv), self.k(qkv), self.relative_position_bias_table))
        # The projection acts on each token separately, so tokens are moved out of their windows before it, as 8-bit codes.
        return self.proj(self.tokens(self.context(attention, self.v(qkv))))  # type: ignore[no-any-return]


class SwinBlock(nn.Module):
    def __init__(self, c: SwinConfig, stage: int, shifted: bool) -> None:
        super().__init__()
        width, grid = c.width * 2**stage, c.grid(stage)
        window = c.window if c.fixed_window else min(c.window, *grid)
        shift = window // 2 if shifted and (c.fixed_window or min(grid) > window) else 0
        self.norm1 = LayerNorm(width, c.eps)
        self.attn = WindowAttention(width, c.heads[stage], window, grid, shift)
        self.add1 = Add()
        self.norm2 = LayerNorm(width, c.eps)
        self.mlp = Mlp(width, c.hidden_ratio * width)
        self.add2 = Add()

    def forward(self, x: Tensor) -> Tensor:
        x = self.add1(x, self.attn(self.norm1(x)))
        return self.add2(x, self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class Downsample(nn.Module):
    """Patch merging: concatenate 2x2 neighbouring tokens to 4 * C channels, normalise, and project to 2 * C."""

    def __init__(self, width: int, grid: tuple[int, int], eps: float) -> None:
        super().__init__()
        self.merge = Take(merge_index(grid), join=True, move="merge")
        self.norm = LayerNorm(4 * width, eps)
        self.reduction = Linear(4 * width, 2 * width, "residual", bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduction(self.norm(self.merge(x)))  # type: ignore[no-any-return]


class Stage(nn.Module):
    def __init__(self, c: SwinConfig, stage: int) -> None:
        super().__init__()
        self.downsample = Downsample(c.width * 2 ** (stage - 1), c.grid(stage - 1), c.eps) if stage else nn.Identity()
        self.blocks = nn.Sequential(*(SwinBlock(c, stage, i % 2 == 1) for i in range(c.depths[stage])))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))  # type: ignore[no-any-return]


class PatchEmbed(nn.Module):
    def __init__(self, c: SwinConfig) -> None:
        super().__init__()
        self.proj = Patches(c.channels, c.patch, c.width, "residual")
        self.norm = LayerNorm(c.width, c.eps, "residual")

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.proj(images))  # type: ignore[no-any-return]


class Head(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.fc = Linear(width, classes, "logits")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)  # type: ignore[no-any-return]


class Swin(nn.Module):
    """Normalised images [N, channels, height, width] -> logits [N, classes]; with 0 classes, the pooled features."""

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        c = self.config = config
        self.patch_embed = PatchEmbed(c)
        self.layers = nn.Sequential(*(Stage(c, i) for i in range(len(c.depths))))
        last = c.width * 2 ** (len(c.depths) - 1)
        self.norm = LayerNorm(last, c.eps)
        self.pool = Mean()
        self.head = Head(last, c.classes) if c.classes else None

    def forward(self, images: Tensor) -> Tensor:
        pooled: Tensor = self.pool(self.norm(self.layers(self.patch_embed(images))))
        return pooled if self.head is None else self.head(pooled)
