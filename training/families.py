"""Small classifiers of four families for Fashion-MNIST, in plain torch: no module of fqvit is used.

| name | architecture |
|---|---|
| rotary | rotary position embeddings, SwiGLU, RMS norm, mean pooling |
| registers | class token and registers, LayerNorm of queries and keys per head, LayerScale |
| cosine | cosine attention with clipped scale, norms after the branches, shifted windows, position bias from a small MLP |
| hybrid | depthwise and pointwise convolutions with batch norm, squeeze-and-excite, pooling, then attention |

All take normalized images [N, 1, 28, 28] and return logits [N, 10]. See also: train_families.py, benchmarks/families.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

SIDE, CLASSES = 28, 10


def sine_positions(side: int, width: int) -> Tensor:
    """Return [side^2, width]: sines and cosines of row and column, with wavelengths of 28 to 2.8 patches."""
    frequency = torch.logspace(0, 1, width // 4) * math.pi / 14
    position = torch.arange(side * side)
    row, column = (position // side)[:, None] * frequency, (position % side)[:, None] * frequency
    return 0.5 * torch.cat([row.sin(), row.cos(), column.sin(), column.cos()], 1)


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


# Rotary position embeddings, SwiGLU, RMS norm


def rotary_tables(side: int, width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [side^2, width] of angles: half of them are proportional to the row, half to the column."""
    frequency = 10.0 ** -torch.linspace(0, 1, width // 4)
    position = torch.arange(side * side)
    angles = [(p[:, None] * frequency).repeat_interleave(2, 1) for p in (position // side, position % side)]
    angle = torch.cat(angles, 1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of neighbouring channels by its angle."""
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    return x * cos + turned * sin


class RotaryAttention(nn.Module):
    def __init__(self, width: int, heads: int, side: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)
        cos, sin = rotary_tables(side, width // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(n, t, c))


class SwiGlu(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(width, 2 * hidden)
        self.w3 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).chunk(2, -1)
        return self.w3(F.silu(gate) * value)


class RotaryBlock(nn.Module):
    def __init__(self, width: int, heads: int, side: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width, eps=1e-6)
        self.attn = RotaryAttention(width, heads, side)
        self.norm2 = nn.RMSNorm(width, eps=1e-6)
        self.mlp = SwiGlu(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class RotaryViT(nn.Module):
    """Patches of 4 pixels. The rotary embedding is the only position information."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, width, 4, 4)
        self.blocks = nn.ModuleList(RotaryBlock(width, heads, SIDE // 4) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


# Registers, norms of queries and keys, LayerScale


class NormedAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm = nn.LayerNorm(width // heads)
        self.k_norm = nn.LayerNorm(width // heads)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        attention = (self.scale * q @ k.transpose(-2, -1)).softmax(-1)
        return self.proj((attention @ v).transpose(1, 2).reshape(n, t, c))


class LayerScale(nn.Module):
    def __init__(self, width: int, value: float = 0.3) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class RegisterBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = NormedAttention(width, heads)
        self.ls1 = LayerScale(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, 3 * width)
        self.ls2 = LayerScale(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class RegisterViT(nn.Module):
    """Patches of 4 pixels, a class token and four registers; only the patches have position embeddings."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 3, registers: int = 4) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, width, 4, 4)
        self.cls_token = nn.Parameter(0.1 * torch.randn(1, 1, width))
        self.reg_token = nn.Parameter(0.1 * torch.randn(1, registers, width))
        self.pos_embed = nn.Parameter(sine_positions(SIDE // 4, width)[None])
        self.blocks = nn.ModuleList(RegisterBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed
        n = len(x)
        x = torch.cat([self.cls_token.expand(n, -1, -1), self.reg_token.expand(n, -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


# Cosine attention in shifted windows, norms after the branches


class CosineAttention(nn.Module):
    """Attention in windows [N, T, C]: cosine similarity of Q and K, times a clipped factor per head, plus position bias."""

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads = heads
        self.logit_scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10.0)))
        self.cpb_mlp = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, heads, bias=False))
        offset = torch.arange(1.0 - window, window) * 8 / (window - 1)
        offset = offset.sign() * torch.log2(offset.abs() + 1) / 3
        table = torch.stack(torch.meshgrid(offset, offset, indexing="ij"), -1)
        self.register_buffer("relative_coords_table", table.view(-1, 2), persistent=False)
        position = torch.arange(window * window)
        row, column = position // window, position % window
        down, right = (p[:, None] - p[None, :] + window - 1 for p in (row, column))
        self.register_buffer("relative_position_index", down * (2 * window - 1) + right, persistent=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        scores = scores * self.logit_scale.clamp(max=math.log(100.0)).exp()
        bias = 16 * torch.sigmoid(self.cpb_mlp(self.relative_coords_table))
        scores = scores + bias[self.relative_position_index].permute(2, 0, 1)
        if mask is not None:
            windows = len(mask)
            scores = scores.view(n // windows, windows, self.heads, t, t) + mask[:, None]
            scores = scores.view(n, self.heads, t, t)
        x = scores.softmax(-1) @ v
        return self.proj(x.transpose(1, 2).reshape(n, t, c))


def to_windows(x: Tensor, window: int) -> Tensor:
    """[N, H, W, C] -> [N * windows, window^2, C]"""
    n, height, width, c = x.shape
    x = x.view(n, height // window, window, width // window, window, c)
    return x.transpose(2, 3).reshape(-1, window * window, c)


def from_windows(x: Tensor, window: int, side: int) -> Tensor:
    """[N * windows, window^2, C] -> [N, side, side, C]"""
    count = side // window
    x = x.view(-1, count, count, window, window, x.shape[-1])
    return x.transpose(2, 3).reshape(-1, side, side, x.shape[-1])


def shift_mask(side: int, window: int, shift: int) -> Tensor:
    """Return [windows, T, T]: -100 between tokens that a cyclic shift brought into the same window from opposite edges."""
    edge = torch.zeros(side)
    edge[-window:], edge[-shift:] = 1, 2
    region = to_windows((3 * edge[:, None] + edge)[None, :, :, None], window)[..., 0]
    return (region[:, :, None] != region[:, None, :]) * -100.0


class CosineBlock(nn.Module):
    def __init__(self, width: int, heads: int, side: int, window: int, shift: int) -> None:
        super().__init__()
        self.side, self.window, self.shift = side, window, shift
        self.attn = CosineAttention(width, heads, window)
        self.norm1 = nn.LayerNorm(width)
        self.mlp = Mlp(width, 2 * width)
        self.norm2 = nn.LayerNorm(width)
        self.register_buffer("mask", shift_mask(side, window, shift) if shift else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.roll(x, (-self.shift, -self.shift), (1, 2)) if self.shift else x
        y = from_windows(self.attn(to_windows(y, self.window), self.mask), self.window, self.side)
        y = torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y
        x = x + self.norm1(y)
        return x + self.norm2(self.mlp(x))


class PatchMerging(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)
        self.norm = nn.LayerNorm(2 * width)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.norm(self.reduction(torch.cat(parts, -1)))


class CosineSwin(nn.Module):
    """Two stages, 14 x 14 and 7 x 7 tokens, in windows of 7 x 7; the second block has shifted windows."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, width, 2, 2)
        self.norm0 = nn.LayerNorm(width)
        self.stage1 = nn.Sequential(CosineBlock(width, 2, 14, 7, 0), CosineBlock(width, 2, 14, 7, 3))
        self.merge = PatchMerging(width)
        self.stage2 = nn.Sequential(CosineBlock(2 * width, 4, 7, 7, 0), CosineBlock(2 * width, 4, 7, 7, 0))
        self.norm = nn.LayerNorm(2 * width)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm0(self.patch_embed(x).permute(0, 2, 3, 1))
        x = self.stage2(self.merge(self.stage1(x)))
        return self.head(self.norm(x).mean((1, 2)))


# Convolutions, then attention


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class SqueezeExcite(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(width, hidden, 1)
        self.fc2 = nn.Conv2d(hidden, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.fc2(F.relu(self.fc1(F.adaptive_avg_pool2d(x, 1))))
        return x * torch.sigmoid(gate)


class InvertedResidual(nn.Module):
    """Pointwise, depthwise, squeeze-and-excite, pointwise. With stride 2, the shortcut is pooled and projected."""

    def __init__(self, width: int, outputs: int, stride: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        hidden = 2 * width
        self.expand = nn.Sequential(conv_norm(width, hidden, 1), activation())
        self.depthwise = nn.Sequential(conv_norm(hidden, hidden, 3, stride, hidden), activation())
        self.se = SqueezeExcite(hidden, hidden // 4)
        self.project = conv_norm(hidden, outputs, 1)
        self.shortcut = (
            nn.Identity() if stride == 1 else nn.Sequential(nn.AvgPool2d(2, 2), nn.Conv2d(width, outputs, 1, bias=False))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.project(self.se(self.depthwise(self.expand(x))))


class AttentionBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c))
        return x + self.mlp(self.norm2(x))


class HybridNet(nn.Module):
    """Convolutions from 28 x 28 to 7 x 7 positions with SiLU and hardswish, two attention blocks, average pooling."""

    def __init__(self, width: int = 16, tokens: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(1, width, 3), nn.SiLU(), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.Sequential(
            InvertedResidual(width, width, 1, nn.Hardswish),
            InvertedResidual(width, 2 * width, 2, nn.Hardswish),
            InvertedResidual(2 * width, 2 * width, 1, nn.SiLU),
        )
        self.widen = conv_norm(2 * width, tokens, 1)
        self.blocks = nn.Sequential(AttentionBlock(tokens, heads), AttentionBlock(tokens, heads))
        self.norm = nn.LayerNorm(tokens)
        self.head = nn.Linear(tokens, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.widen(self.stages(self.stem(x)))
        x = self.blocks(x.flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(1))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "rotary": RotaryViT,
    "registers": RegisterViT,
    "cosine": CosineSwin,
    "hybrid": HybridNet,
}


def load(name: str, path: Path) -> nn.Module:
    """Return a family's model in eval mode, with the weights that train_families.py wrote."""
    model = FAMILIES[name]()
    state = {key: value.float() for key, value in load_file(path).items()}
    counters = {key: value for key, value in model.state_dict().items() if key.endswith("num_batches_tracked")}
    model.load_state_dict({**counters, **state})
    return model.eval()
