"""BEiT, equivalent to timm's Beit: relative position biases, LayerScale, biases of q and v only, usually mean pooling."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fqvit.models.config import BeitConfig
from fqvit.models.families.parts import Mlp, PatchEmbed, join_heads, split_heads


def relative_position_index(grid: tuple[int, int]) -> Tensor:
    """Return the row of the bias table for each pair of tokens, the class token first: [T, T]

    The table has (2 * height - 1) * (2 * width - 1) rows for pairs of patches, then one row each for class to patch, patch to
    class and class to class.
    """
    height, width = grid
    distances = (2 * height - 1) * (2 * width - 1)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    down = rows.flatten()[:, None] - rows.flatten()[None] + height - 1
    right = columns.flatten()[:, None] - columns.flatten()[None] + width - 1
    index = torch.empty(height * width + 1, height * width + 1, dtype=torch.long)
    index[1:, 1:] = down * (2 * width - 1) + right
    index[0, :], index[:, 0], index[0, 0] = distances, distances + 1, distances + 2
    return index


class RelativePositionBias(nn.Module):
    """The bias of all heads: [H, T, T]"""

    relative_position_index: Tensor

    def __init__(self, grid: tuple[int, int], heads: int) -> None:
        super().__init__()
        index = relative_position_index(grid)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(int(index.max()) + 1, heads))
        self.register_buffer("relative_position_index", index, persistent=False)

    def forward(self) -> Tensor:
        return self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1).contiguous()


class Attention(nn.Module):
    """Multi-head attention: [N, T, C] -> [N, T, C]. The bias of k is always 0.

    shared: relative position bias that all blocks share [H, T, T], added to the scores, or None
    """

    k_bias: Tensor
    relative_position_index: Tensor

    def __init__(self, c: BeitConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv = nn.Linear(c.width, 3 * c.width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(c.width)) if c.qv_bias else None
        self.v_bias = nn.Parameter(torch.zeros(c.width)) if c.qv_bias else None
        self.register_buffer("k_bias", torch.zeros(c.width), persistent=False)
        self.relative_position_bias_table = None
        if c.block_bias:
            index = relative_position_index(c.grid)
            self.relative_position_bias_table = nn.Parameter(torch.zeros(int(index.max()) + 1, c.heads))
            self.register_buffer("relative_position_index", index, persistent=False)
        self.proj = nn.Linear(c.width, c.width)

    def forward(self, x: Tensor, shared: Tensor | None) -> Tensor:
        qkv_bias = None
        if self.q_bias is not None and self.v_bias is not None:
            qkv_bias = torch.cat([self.q_bias, self.k_bias, self.v_bias])
        q, k, v = split_heads(F.linear(x, self.qkv.weight, qkv_bias), self.heads)
        bias = shared
        if self.relative_position_bias_table is not None:
            own = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1).contiguous()
            bias = own.unsqueeze(0) if shared is None else own.unsqueeze(0) + shared
        context = F.scaled_dot_product_attention(q, k, v, bias)
        return self.proj(join_heads(context))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, c: BeitConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(c.width, c.eps)
        self.attn = Attention(c)
        self.norm2 = nn.LayerNorm(c.width, c.eps)
        self.mlp = Mlp(c.width, c.hidden, "gelu")
        self.gamma_1 = nn.Parameter(torch.ones(c.width)) if c.layer_scale else None
        self.gamma_2 = nn.Parameter(torch.ones(c.width)) if c.layer_scale else None

    def forward(self, x: Tensor, shared: Tensor | None) -> Tensor:
        branch = self.attn(self.norm1(x), shared)
        x = x + (branch if self.gamma_1 is None else self.gamma_1 * branch)
        branch = self.mlp(self.norm2(x))
        return x + (branch if self.gamma_2 is None else self.gamma_2 * branch)  # type: ignore[no-any-return]


class Beit(nn.Module):
    """Normalised images [N, channels, height, width] -> logits or features [N, outputs or width]; tokens for pool "none"."""

    def __init__(self, config: BeitConfig) -> None:
        super().__init__()
        c = self.config = config
        self.patch_embed = PatchEmbed(c.channels, c.patch, c.width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, c.width))
        tokens = c.grid[0] * c.grid[1] + 1
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, c.width)) if c.positions else None
        self.rel_pos_bias = RelativePositionBias(c.grid, c.heads) if c.shared_bias else None
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.depth))
        self.norm = nn.LayerNorm(c.width, c.eps) if c.norm else nn.Identity()
        self.fc_norm = nn.LayerNorm(c.width, c.eps) if c.fc_norm else nn.Identity()
        self.head = nn.Linear(c.width, c.outputs) if c.outputs else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1)
        if self.pos_embed is not None:
            x = x + self.pos_embed
        shared = None if self.rel_pos_bias is None else self.rel_pos_bias()
        for block in self.blocks:
            x = block(x, shared)
        x = self.norm(x)
        if self.config.pool == "token":
            x = x[:, 0]
        elif self.config.pool == "avg":
            x = x[:, 1:].mean(1)
        return self.head(self.fc_norm(x))  # type: ignore[no-any-return]
