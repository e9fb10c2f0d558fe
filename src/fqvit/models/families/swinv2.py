"""SwinV2, equivalent to timm's SwinTransformerV2: cosine attention in shifted windows, biases from an MLP, residual post-norm.

The grid of each stage must be a multiple of its window: where it is not, timm pads after the shift and transformers before it.
Shapes: feature maps are [N, height, width, C]; windows are [N * W, T, C], with W windows per image and T tokens per window.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fqvit.models.config import SwinV2Config
from fqvit.models.families.parts import Mlp, split_heads
from fqvit.models.swin import relative_position_index, shift_mask

MAX_SCALE = math.log(1 / 0.01)  # upper limit of logit_scale, the logarithm of the factor that scores are multiplied by
MASKED = -100.0  # added to the scores of tokens that were not neighbours before the shift


def coordinates(window: int, pretrained: int) -> Tensor:
    """Return the inputs of the position MLP: sign(d) * log2(1 + |d|) / log2(8) for distances d scaled to -8..8.

    Shape: [1, 2 * window - 1, 2 * window - 1, 2]. pretrained: side of the window in pretraining; 0: the same as `window`
    """
    reach = max((pretrained or window) - 1, 1)
    d = 8 * torch.arange(-(window - 1), window, dtype=torch.float32) / reach
    d = d.sign() * torch.log2(d.abs() + 1) / math.log2(8)
    return torch.stack(torch.meshgrid(d, d, indexing="ij"), -1).unsqueeze(0)


class WindowAttention(nn.Module):
    """Cosine attention inside windows: [N * W, T, C] -> [N * W, T, C]. mask: [W, T, T], added to the scores, or None"""

    k_bias: Tensor
    relative_coords_table: Tensor
    relative_position_index: Tensor

    def __init__(self, width: int, heads: int, window: int, pretrained: int, qv_bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.logit_scale = nn.Parameter(torch.zeros(heads, 1, 1))
        self.cpb_mlp = nn.Sequential(nn.Linear(2, 512), nn.ReLU(), nn.Linear(512, heads, bias=False))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(width)) if qv_bias else None
        self.v_bias = nn.Parameter(torch.zeros(width)) if qv_bias else None
        self.proj = nn.Linear(width, width)
        self.register_buffer("k_bias", torch.zeros(width), persistent=False)
        self.register_buffer("relative_coords_table", coordinates(window, pretrained), persistent=False)
        self.register_buffer("relative_position_index", relative_position_index(window), persistent=False)

    def bias(self) -> Tensor:
        """16 * sigmoid(mlp(distance)): [H, T, T]"""
        table = self.cpb_mlp(self.relative_coords_table).view(-1, self.heads)
        return 16 * torch.sigmoid(table[self.relative_position_index].permute(2, 0, 1))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        windows, tokens, width = x.shape
        qkv_bias = None
        if self.q_bias is not None and self.v_bias is not None:
            qkv_bias = torch.cat([self.q_bias, self.k_bias, self.v_bias])
        q, k, v = split_heads(F.linear(x, self.qkv.weight, qkv_bias), self.heads)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        scores = scores * torch.clamp(self.logit_scale, max=MAX_SCALE).exp() + self.bias().unsqueeze(0)
        if mask is not None:
            scores = scores.view(-1, mask.shape[0], self.heads, tokens, tokens) + mask.unsqueeze(1).unsqueeze(0)
            scores = scores.view(-1, self.heads, tokens, tokens)
        x = (scores.softmax(-1) @ v).transpose(1, 2).reshape(windows, tokens, width)
        return self.proj(x)  # type: ignore[no-any-return]


class Block(nn.Module):
    """x = x + norm1(attention(x)), then x = x + norm2(mlp(x)). The shape [N, height, width, C] does not change."""

    attn_mask: Tensor | None

    def __init__(self, c: SwinV2Config, stage: int, shifted: bool) -> None:
        super().__init__()
        width, self.grid = c.width * 2**stage, c.grid(stage)
        self.window = min(c.windows[stage], *self.grid)
        self.shift = self.window // 2 if shifted and min(self.grid) > self.window else 0
        self.attn = WindowAttention(width, c.heads[stage], self.window, c.pretrained_windows[stage], c.qv_bias)
        self.norm1 = nn.LayerNorm(width, c.eps)
        self.mlp = Mlp(width, int(c.hidden_ratio * width), "gelu")
        self.norm2 = nn.LayerNorm(width, c.eps)
        same = shift_mask(self.grid, self.window, self.shift)
        mask = None if same is None else torch.zeros(same.shape).masked_fill(~same, MASKED)
        self.register_buffer("attn_mask", mask, persistent=False)

    def attend(self, x: Tensor) -> Tensor:
        n, height, width, channels = x.shape
        side, shift = self.window, self.shift
        if shift:
            x = torch.roll(x, (-shift, -shift), (1, 2))
        x = x.view(n, height // side, side, width // side, side, channels).permute(0, 1, 3, 2, 4, 5)
        x = self.attn(x.reshape(-1, side * side, channels), self.attn_mask)
        x = x.view(n, height // side, width // side, side, side, channels).permute(0, 1, 3, 2, 4, 5)
        x = x.reshape(n, height, width, channels)
        return torch.roll(x, (shift, shift), (1, 2)) if shift else x

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm1(self.attend(x))
        return x + self.norm2(self.mlp(x))  # type: ignore[no-any-return]


class PatchMerging(nn.Module):
    """Concatenate 2 x 2 neighbours to 4 * C channels, project them to 2 * C, normalise. An odd side is padded with zeros."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)
        self.norm = nn.LayerNorm(2 * width, eps)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        n, height, width, channels = x.shape
        x = x.reshape(n, height // 2, 2, width // 2, 2, channels).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.norm(self.reduction(x))  # type: ignore[no-any-return]


class Stage(nn.Module):
    def __init__(self, c: SwinV2Config, stage: int) -> None:
        super().__init__()
        self.downsample = PatchMerging(c.width * 2 ** (stage - 1), c.eps) if stage else nn.Identity()
        self.blocks = nn.ModuleList(Block(c, stage, i % 2 == 1) for i in range(c.depths[stage]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        for block in self.blocks:
            x = block(x)
        return x


class PatchEmbed(nn.Module):
    """Images [N, channels, height, width] -> normalised patches [N, rows, columns, C]"""

    def __init__(self, c: SwinV2Config) -> None:
        super().__init__()
        self.proj = nn.Conv2d(c.channels, c.width, c.patch, c.patch)
        self.norm = nn.LayerNorm(c.width, c.eps)

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.proj(images).permute(0, 2, 3, 1))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Mean over the feature map, then the classifier: [N, height, width, C] -> [N, outputs or C]"""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, outputs) if outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((1, 2)))  # type: ignore[no-any-return]


class SwinV2(nn.Module):
    """Normalised images [N, channels, height, width] -> logits or features [N, outputs or width of the last stage]."""

    def __init__(self, config: SwinV2Config) -> None:
        super().__init__()
        c = self.config = config
        self.patch_embed = PatchEmbed(c)
        self.layers = nn.Sequential(*(Stage(c, i) for i in range(len(c.depths))))
        last = c.width * 2 ** (len(c.depths) - 1)
        self.norm = nn.LayerNorm(last, c.eps)
        self.head = Head(last, c.outputs)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.patch_embed(images))))  # type: ignore[no-any-return]
