"""Count the bit operations of a model per image and layer, from its sizes only: no weights, no torch.

There are two conventions. `paper` reproduces the paper's four numbers for ViT-B (1118.51, 1118.52, 1118.34 and 1117.76 G); it
is a fit to them, not the authors' statement, and does not count the patch embedding. `usual` counts bits_w * bits_a per
multiplication of every matrix product, as most publications do. See also: models/zoo.py (sizes).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from fqvit.models.config import SwinConfig, ViTConfig
from fqvit.quant.recipe import Recipe, weight_bits

Kind = Literal["patch", "linear", "scores", "context", "norm", "softmax", "gelu"]

# Rows of the paper's ablation: (Power-of-Two Factor, Log-Int-Softmax, bits of attention).
PAPER_ROWS: dict[str, tuple[bool, bool, int]] = {
    "baseline8": (False, False, 8),
    "ptf8": (True, False, 8),
    "uniform4": (True, False, 4),
    "lis4": (True, True, 4),
}


class Layer(msgspec.Struct, frozen=True):
    """A layer with its cost. macs: multiplications of a matrix product; elements: inputs of a norm, softmax or GELU, or 0."""

    name: str
    kind: Kind
    macs: int = 0
    elements: int = 0


class AttentionMemory(msgspec.Struct, frozen=True):
    """Bytes of the attention maps of one image at `bits` per value: all layers together, and the largest layer."""

    bits: int
    every_layer: int
    largest_layer: int


def layers_of(config: ViTConfig | SwinConfig) -> list[Layer]:
    """List all counted layers in model order."""
    return list(_swin(config) if isinstance(config, SwinConfig) else _vit(config))


def _linear(name: str, rows: int, inputs: int, outputs: int) -> Layer:
    return Layer(name, "linear", macs=rows * inputs * outputs)


def _block(name: str, tokens: int, width: int, heads: int, hidden: int, windows: int, window: int) -> Iterator[Layer]:
    """Yield a transformer block over `tokens` whose attention has `windows` windows of `window` tokens (ViT: one window)."""
    rows = windows * window  # includes the padding of Swin's last windows
    yield Layer(f"{name}.norm1", "norm", elements=tokens * width)
    yield _linear(f"{name}.attn.qkv", rows, width, 3 * width)
    yield Layer(f"{name}.attn.scores", "scores", macs=rows * window * width)
    yield Layer(f"{name}.attn.softmax", "softmax", elements=heads * rows * window)
    yield Layer(f"{name}.attn.context", "context", macs=rows * window * width)
    yield _linear(f"{name}.attn.proj", tokens, width, width)
    yield Layer(f"{name}.norm2", "norm", elements=tokens * width)
    yield _linear(f"{name}.mlp.fc1", tokens, width, hidden)
    yield Layer(f"{name}.mlp.act", "gelu", elements=tokens * hidden)
    yield _linear(f"{name}.mlp.fc2", tokens, hidden, width)


def _vit(c: ViTConfig) -> Iterator[Layer]:
    tokens = c.patches + c.prefix
    yield Layer("patch_embed.proj", "patch", macs=c.patches * c.patch**2 * c.channels * c.width)
    for i in range(c.depth):
        yield from _block(f"blocks.{i}", tokens, c.width, c.heads, c.hidden, 1, tokens)
    if c.norm_first:
        yield Layer("norm", "norm", elements=tokens * c.width)
    if c.norm_last:
        yield Layer("fc_norm", "norm", elements=c.width)
    yield _linear("head", 1, c.width * (c.prefix if c.pool == "token" else 1), c.classes)


def _swin(c: SwinConfig) -> Iterator[Layer]:
    height, width = c.grid(0)
    yield Layer("patch_embed.proj", "patch", macs=height * width * c.patch**2 * c.channels * c.width)
    yield Layer("patch_embed.norm", "norm", elements=height * width * c.width)
    for stage, (depth, heads) in enumerate(zip(c.depths, c.heads, strict=True)):
        channels = c.width * 2**stage
        height, width = c.grid(stage)
        if stage:
            yield Layer(f"layers.{stage}.downsample.norm", "norm", elements=height * width * 2 * channels)
            yield _linear(f"layers.{stage}.downsample.reduction", height * width, 2 * channels, channels)
        window = min(c.window, height, width)
        windows = -(-height // window) * -(-width // window)
        for i in range(depth):
            name = f"layers.{stage}.blocks.{i}"
            yield from _block(name, height * width, channels, heads, c.hidden_ratio * channels, windows, window**2)
    yield Layer("norm", "norm", elements=height * width * channels)
    yield _linear("head.fc", 1, channels, c.classes)


def paper_bitops(layer: Layer, ptf: bool, lis: bool, attention_bits: int) -> int:
    """Count one layer in the paper's convention, with 8-bit weights and activations:

    64 per multiplication (except in the patch embedding) and per input of a norm or GELU; with PTF, 2 more per input of a
    norm; 64 per attention value with LIS, otherwise 136 + 8 * attention_bits.
    """
    if layer.kind == "patch":
        return 0
    if layer.kind == "softmax":
        return layer.elements * (64 if lis else 136 + 8 * attention_bits)
    if layer.kind == "norm":
        return layer.elements * (66 if ptf else 64)
    return 64 * (layer.macs + layer.elements)


def usual_bitops(layer: Layer, weight_bits: int, activation_bits: int, attention_bits: int) -> int:
    """Count one layer in the usual convention: bits of one factor times bits of the other, per multiplication."""
    factor = {"scores": activation_bits, "context": attention_bits}.get(layer.kind, weight_bits)
    return layer.macs * factor * activation_bits


def recipe_bitops(layer: Layer, recipe: Recipe) -> int:
    """Count one layer in the usual convention with the widths of a recipe, where layers may differ. Pixels have 8 bits."""
    if layer.kind in ("scores", "context"):
        return usual_bitops(layer, 8, recipe.activation_bits, recipe.attention_bits)
    at_end = layer.kind == "patch" or layer.name.partition(".")[0] == "head"
    bits, _ = weight_bits(recipe, layer.name, at_end)
    return layer.macs * bits * (8 if layer.kind == "patch" else recipe.activation_bits)


def recipe_total(layers: list[Layer], recipe: Recipe) -> float:
    """Return the bit operations of all layers in G, with the widths of a recipe."""
    return sum(recipe_bitops(layer, recipe) for layer in layers) / 1e9


def paper_totals(layers: list[Layer]) -> dict[str, float]:
    """Return {row of the ablation: bit operations in G}."""
    return {name: sum(paper_bitops(layer, *row) for layer in layers) / 1e9 for name, row in PAPER_ROWS.items()}


def usual_total(layers: list[Layer], weight_bits: int, activation_bits: int, attention_bits: int) -> float:
    """Return the bit operations of all layers in G."""
    return sum(usual_bitops(layer, weight_bits, activation_bits, attention_bits) for layer in layers) / 1e9


def giga(value: float) -> str:
    """Format bit operations in G with two decimals, as in the paper, or with four below 100, for small models."""
    return f"{value:.2f}" if value >= 100 else f"{value:.4f}"


def attention_memory(layers: list[Layer], bits: int) -> AttentionMemory:
    """Return the bytes of the attention maps at `bits` per value."""
    values = [layer.elements for layer in layers if layer.kind == "softmax"]
    return AttentionMemory(bits, sum(values) * bits // 8, max(values, default=0) * bits // 8)
