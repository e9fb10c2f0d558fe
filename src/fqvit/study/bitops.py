"""How many bit operations a model takes for one image, by layer, from its sizes alone: no weights, no torch.

Two conventions. `paper` gives the paper's four figures for ViT-B (1118.51, 1118.52, 1118.34 and 1117.76 G) and is a fit to
them, not the authors' statement; the patch embedding is not counted in it. `usual` is bits_w bits_a for each multiplication
of every matrix product, as most publications have it. Neighbours: models/zoo.py (sizes).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from fqvit.models.config import SwinConfig, ViTConfig

Kind = Literal["patch", "linear", "scores", "context", "norm", "softmax", "gelu"]

# The rows of the paper's ablation: (Power-of-Two Factor, Log-Int-Softmax, bits of attention).
PAPER_ROWS: dict[str, tuple[bool, bool, int]] = {
    "baseline8": (False, False, 8),
    "ptf8": (True, False, 8),
    "uniform4": (True, False, 4),
    "lis4": (True, True, 4),
}


class Layer(msgspec.Struct, frozen=True):
    """macs: multiplications of matrix products; elements: values that a norm, softmax or GELU reads. One of them is 0."""

    name: str
    kind: Kind
    macs: int = 0
    elements: int = 0


class AttentionMemory(msgspec.Struct, frozen=True):
    """Bytes of attention maps for one image, at `bits`: those of all layers together, and of the layer with most."""

    bits: int
    every_layer: int
    largest_layer: int


def layers_of(config: ViTConfig | SwinConfig) -> list[Layer]:
    """Everything that is counted, in the order of the model."""
    return list(_swin(config) if isinstance(config, SwinConfig) else _vit(config))


def _linear(name: str, rows: int, inputs: int, outputs: int) -> Layer:
    return Layer(name, "linear", macs=rows * inputs * outputs)


def _block(name: str, tokens: int, width: int, heads: int, hidden: int, windows: int, window: int) -> Iterator[Layer]:
    """A transformer block over `tokens`, whose attention looks at `windows` of `window` tokens each (ViT: one of all)."""
    rows = windows * window  # with what pads the last windows of a Swin
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
    """One layer in the paper's convention, at 8-bit weights and activations:

    64 a multiplication (patch embedding apart), a value of a norm and a value of GELU; 2 more a value of a norm with PTF;
    a value of attention 64 with LIS, else 136 + 8 attention_bits.
    """
    if layer.kind == "patch":
        return 0
    if layer.kind == "softmax":
        return layer.elements * (64 if lis else 136 + 8 * attention_bits)
    if layer.kind == "norm":
        return layer.elements * (66 if ptf else 64)
    return 64 * (layer.macs + layer.elements)


def usual_bitops(layer: Layer, weight_bits: int, activation_bits: int, attention_bits: int) -> int:
    """One layer in the usual convention: bits of one factor times bits of the other, a multiplication."""
    factor = {"scores": activation_bits, "context": attention_bits}.get(layer.kind, weight_bits)
    return layer.macs * factor * activation_bits


def paper_totals(layers: list[Layer]) -> dict[str, float]:
    """{row of the ablation: G bit operations}"""
    return {name: sum(paper_bitops(layer, *row) for layer in layers) / 1e9 for name, row in PAPER_ROWS.items()}


def usual_total(layers: list[Layer], weight_bits: int, activation_bits: int, attention_bits: int) -> float:
    """G bit operations"""
    return sum(usual_bitops(layer, weight_bits, activation_bits, attention_bits) for layer in layers) / 1e9


def giga(value: float) -> str:
    """Two decimals, as the paper has it, or as many as small models need."""
    return f"{value:.2f}" if value >= 100 else f"{value:.4f}"


def attention_memory(layers: list[Layer], bits: int) -> AttentionMemory:
    values = [layer.elements for layer in layers if layer.kind == "softmax"]
    return AttentionMemory(bits, sum(values) * bits // 8, max(values) * bits // 8)
