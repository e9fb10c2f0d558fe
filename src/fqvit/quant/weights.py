"""Quantize weights, biases and position embeddings.

Shared by lowering and simulation, so that both use the same integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.models import general, layers, maps
from fqvit.models.graph import Graph, Node
from fqvit.quant.codebooks import LARGEST, Groups, fit_groups
from fqvit.quant.qparams import QParams, affine
from fqvit.quant.recipe import Recipe, weight_bits

MAX_PACKED = 6  # weights of at most this many bits are packed: 7-bit ones would save only an eighth, and 8-bit ones nothing
SHORT_BITS = 16  # bits of short multipliers
SHORT_CODES = 10  # outputs with at most this many bits may have short multipliers


@dataclass(frozen=True)
class QuantizedLinear:
    """The integers of a linear layer: y[o] = scale[o] * (sum_k (x[k] - z[k]) * w[o, k] + bias[o]) for codes x, zero points z.

    w: int8 [O, K]   scale: float64 [O], the value of one accumulator unit   bias: int64 [O], in accumulator units
    groups: the codebooks whose levels w consists of; None: w has evenly spaced levels
    """

    w: NDArray[np.int8]
    scale: NDArray[np.float64]
    bias: NDArray[np.int64]
    groups: Groups | None = None


# Leaves that apply a linear layer to each row; a convolution reads the rows of its 3x3 neighbourhood, concatenated.
LinearLeaf = layers.Linear | maps.Conv2d | maps.Deconv


def weight_rows(leaf: LinearLeaf) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Return the weight [O, K] and bias [O] of a leaf, as those of a linear layer.

    A 3x3 convolution reads K = 9 * C channels, position by position in row-major order. A transposed 2x2 convolution writes
    O = 4 * O' channels: upper left, upper right, lower left, lower right.
    """
    weight, bias = _double(leaf.weight), None if leaf.bias is None else _double(leaf.bias)
    if isinstance(leaf, maps.Conv2d):
        return weight.transpose(0, 2, 3, 1).reshape(len(weight), -1), bias
    if isinstance(leaf, maps.Deconv):
        assert bias is not None
        return weight.transpose(2, 3, 1, 0).reshape(-1, len(weight)), np.tile(bias, 4)
    return weight, bias


def _double(tensor: Tensor) -> NDArray[np.float64]:
    return tensor.detach().cpu().double().numpy()


def depthwise_weights(leaf: general.Depthwise, q: QParams) -> QuantizedLinear:
    """Quantize the weights of a depthwise convolution to 8 bits, with one scale per channel: w [C, K].

    q: the quantization parameters of its input
    """
    weight, channels = _double(leaf.weight).T, leaf.weight.shape[1]
    return quantize_linear(weight * q.channel_scales(channels)[:, None], _double(leaf.bias), np.ones(1), 8)


def bits_and_group(recipe: Recipe, node: Node) -> tuple[int, int]:
    """Return the number of bits of a linear layer's weights, and how many weights share a codebook (0: no groups)."""
    at_end = isinstance(node.leaf, layers.Patches | general.Stem) or node.leaf.role in ("logits", "deltas", "pooled", "output")
    return weight_bits(recipe, node.name, at_end)


def check_layers(graphs: Sequence[Graph], recipe: Recipe) -> None:
    """Raise FqvitError for a pattern of recipe.layer_bits that matches no layer with weights in any of the networks."""
    nodes = [node for graph in graphs for node in graph.nodes]
    names = [node.name for node in nodes if isinstance(node.leaf, LinearLeaf | layers.Patches | general.Stem)]
    for pattern in recipe.layer_bits:
        if not any(fnmatchcase(name, pattern) for name in names):
            problem = f"recipe {recipe.name}: layer_bits {pattern!r} matches no layer with weights"
            raise FqvitError(f"{problem}. Use names such as {names[-1]}.")


def short_output_scales(recipe: Recipe, leaf: layers.Leaf, q: QParams | None, outputs: int) -> NDArray[np.float64] | None:
    """Return the output scales [O] of a linear layer if its weights are quantized for exact 16-bit multipliers, otherwise None.

    16-bit multipliers are used with per-channel scales, to save space in the file, and with `mult = "short"`. Other recipes use
    the full 31 bits. Convolutions get no scales here: their multipliers are few compared with their weights, and without these
    scales their weights do not depend on the output, so that a detector's proposal head is stored once for all levels. Their
    multipliers have 31 bits, or are rounded to 16 bits with `mult = "short"`.
    """
    short = (recipe.channels or recipe.mult == "short") and not isinstance(leaf, maps.Conv2d)
    return None if q is None or q.bits > SHORT_CODES or not short else q.channel_scales(outputs)


def quantize_linear(
    weight: NDArray[np.float64],
    bias: NDArray[np.float64] | None,
    input_scales: NDArray[np.float64],
    bits: int,
    *,
    group: int = 0,
    importance: NDArray[np.float64] | None = None,
    output_scales: NDArray[np.float64] | None = None,
    halves: bool = False,
) -> QuantizedLinear:
    """Round weight [O, K] times input_scales [K] or [1] to integers: acc = sum_k code[k] * w[o, k], in units of scale[o].

    scale = max(max|w| / (2^(bits-1) - 1), |bias| / 2^30); the second term bounds the bias of rows with (nearly) zero weights.
    group: number of weights that share a codebook (0: no groups). Levels are up to 127, so scale is at least max|w| / 127.
    Codebooks minimize the squared error, weighted by importance [K] (None: equal weights).
    output_scales: [O], round scales up so that a 16-bit multiplier scale / output_scale is exact.
    halves: without groups, map max|w| to 2^(bits-1) - 1/2 units, and saturate.
    """
    b = np.zeros(len(weight)) if bias is None else bias
    effective = weight * input_scales
    largest = LARGEST if group else 2 ** (bits - 1) - 1
    ends = largest + 0.5 if halves and not group else largest
    scale = np.maximum(np.abs(effective).max(1) / ends, np.abs(b) / 2**30)
    # For a row of zeros any scale is exact; the smallest scale of the other rows is best if outputs are compared (logits).
    live = scale[scale > np.finfo(np.float64).tiny]
    scale = np.maximum(scale, live.min() if live.size else 1.0)
    if output_scales is not None:
        scale = to_short(scale, output_scales)
    units, groups = effective / scale[:, None], None
    if group:
        weights = scale[:, None] ** 2 * (np.ones(weight.shape[1]) if importance is None else importance)
        groups = fit_groups(units, weights, group, bits)
    w = rounded(torch.from_numpy(units), largest, groups).numpy().astype(np.int8)
    return QuantizedLinear(w, scale, np.floor(b / scale + 0.5).astype(np.int64), groups)


def rounded(units: Tensor, largest: int, groups: Groups | None, first: int = 0) -> Tensor:
    """Round weights in units of their scales, float [O, n]: to integers up to `largest`, or to the levels of their groups.

    first: the column of the layer's weights that is column 0 of units
    """
    return (units + 0.5).floor().clamp(-largest, largest) if groups is None else groups.nearest(units, first)


def to_short(scale: NDArray[np.float64], output_scales: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round scales [O] up so that 16-bit multipliers scale / output_scale are exact."""
    mantissa, power = np.frexp(scale / output_scales)
    found: NDArray[np.float64] = np.ldexp(np.ceil(mantissa * 2**SHORT_BITS * (1 - 1e-12)), power - SHORT_BITS) * output_scales
    return found


def fits_groups(found: QuantizedLinear, bits: int, group: int) -> bool:
    """Return whether the weights have `bits` bits and, if group > 0, groups of that size."""
    if group == 0:
        return found.groups is None and int(np.abs(found.w.astype(np.int64)).max()) < 2 ** (bits - 1)
    return found.groups is not None and found.groups.fits(found.w, bits, group)


def quantize_positions(positions: NDArray[np.float64], bits: int) -> tuple[NDArray[np.int16], float]:
    """Round position embeddings to multiples of one unit; returns the integers and the unit.

    16 bits: symmetric. 8 bits: affine codes from the minimum to the maximum, minus their zero point, as in the paper's code.
    """
    if bits == 16:
        unit = float(np.abs(positions).max()) / (2**15 - 1) or 1.0
        return np.floor(positions / unit + 0.5).astype(np.int16), unit
    q = affine(float(positions.min()), float(positions.max()), bits)
    codes = np.clip(np.floor(positions / q.scale[0] + 0.5) + q.zero[0], 0, q.last) - q.zero[0]
    return codes.astype(np.int16), float(q.scale[0])


def pixel_zero(preprocess: Preprocess) -> int:
    """Return the zero point of pixels in patch embeddings."""
    return round(255 * float(np.mean(preprocess.mean)))


def pixel_linear(
    weight: NDArray[np.float64], bias: NDArray[np.float64], preprocess: Preprocess
) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """Fold the normalization (p / 255 - mean) / std of pixels p into the weight and bias of the patch embedding.

    weight: [C, channels, patch, patch]. Returns weight [C, patch * patch * channels] for inputs (p - zero) / 255, bias, zero.
    The zero point is near the mean pixel, so that rounding errors of the weights do not add up to a bias.
    """
    pixels = weight.shape[2] * weight.shape[3]
    zero = pixel_zero(preprocess)
    flat = weight.transpose(0, 2, 3, 1).reshape(len(weight), -1) / np.tile(preprocess.std, pixels)
    return flat, bias + flat @ (zero / 255 - np.tile(preprocess.mean, pixels)), zero


def stem_linear(leaf: general.Stem, preprocess: Preprocess) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """Like pixel_linear, but for a convolution of the images: weight [O, K, channels] -> [O, K * channels]."""
    return pixel_linear(_double(leaf.weight).transpose(0, 2, 1)[..., None], _double(leaf.bias), preprocess)
