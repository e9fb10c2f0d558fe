"""Weights and positions as integers. Used by lowering and by simulation, so that they agree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fqvit.data.preprocess import Preprocess
from fqvit.ir.nibbles import MAX_EXPONENT
from fqvit.models import layers, maps
from fqvit.quant.qparams import QParams, affine
from fqvit.quant.recipe import Recipe

SCALES_IN_AN_OCTAVE = 8  # tried for groups
SHORT_BITS = 16  # of multipliers to codes of at most SHORT_CODES bits, where they lose nothing
SHORT_CODES = 10


@dataclass(frozen=True)
class QuantizedLinear:
    """w int8 [O, K]; scale float64 [O]: the value of one accumulator unit; bias int64 [O] in those units, input zeros apart.

    exponent u8 [O, G], with groups: w is a code of few bits times 2^exponent of its group.
    """

    w: NDArray[np.int8]
    scale: NDArray[np.float64]
    bias: NDArray[np.int64]
    exponent: NDArray[np.uint8] | None = None


# Leaves that are a linear map of each row, perhaps of rows that were put side by side first.
LinearLeaf = layers.Linear | maps.Conv2d | maps.Deconv


def weight_rows(leaf: LinearLeaf) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Weight [O, K] and bias [O] of the linear map that a leaf is.

    A convolution reads K = 9 C channels: of the places above, from left to right, then beside, then below. A transposed one
    writes O = 4 O' channels: of the upper left place, the upper right, the lower left and the lower right.
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


def bits_and_group(recipe: Recipe, leaf: layers.Leaf) -> tuple[int, int]:
    """The width of a linear map's codes, and how many weights share an exponent (0: none do).

    Groups are for 4 bits and less. Beside them the patch embedding and the head keep 8 bits: they are small and sensitive.
    """
    if recipe.weight_bits > 4 or recipe.weight_group == 0:
        return recipe.weight_bits, 0
    if isinstance(leaf, layers.Patches) or leaf.role in ("logits", "deltas"):
        return 8, 0
    return recipe.weight_bits, recipe.weight_group


def short_output_scales(recipe: Recipe, leaf: layers.Leaf, q: QParams | None, outputs: int) -> NDArray[np.float64] | None:
    """The steps [O] of a linear map's own codes, where its multipliers have 16 bits; None elsewhere.

    With steps by channel that makes room in the file for them. The paper's recipes keep the 31 bits of the contract, unless
    `mult` says otherwise. A convolution has so many weights a channel that its multipliers do not count; and without these
    steps its weights are the same wherever it runs, so that a detector's proposal head is stored once for all levels.
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
    """Round weight [O, K] times the inputs' steps [K] (or [1]): acc = sum codes w, worth `scale` each.

    scale = max(max|w|/(2^(bits-1) - 1), |b|/2^30), so that the bias of a channel whose weights are all (nearly) 0 fits too.
    With groups the codes of a group count 2^exponent units each; scale and exponents are those of least squared error, each
    weight's counted as often as `importance` [K] says (None: all alike). Scales are rounded up to where a multiplier of 16 bits
    leads from them to the steps `output_scales` [O] exactly, if those are given. halves: without groups max|w| is
    2^(bits-1) - 1/2 units, and the half beyond the last code is clipped.
    """
    b = np.zeros(len(weight)) if bias is None else bias
    effective = weight * input_scales
    largest = 2 ** (bits - 1) - 1
    coarsest = 2**MAX_EXPONENT if group else 1
    least = np.abs(b) / 2**30
    ends = largest * coarsest if group or not halves else largest + 0.5
    scale = np.maximum(np.abs(effective).max(1) / ends, least)
    # A channel of zeros has any scale; the smallest of the others suits those that compare channels (the logits).
    live = scale[scale > np.finfo(np.float64).tiny]
    scale = np.maximum(scale, live.min() if live.size else 1.0)
    exponent: NDArray[np.uint8] | None = None
    units: NDArray[np.float64] = np.ones((1, 1))
    if group:
        scale, exponent = _least_error(effective, scale, least, largest, group, importance)
        units = np.exp2(exponent[:, np.arange(weight.shape[1]) // group].astype(np.float64))
    if output_scales is not None:
        mantissa, power = np.frexp(scale / output_scales)
        scale = np.ldexp(np.ceil(mantissa * 2**SHORT_BITS * (1 - 1e-12)), power - SHORT_BITS) * output_scales
    w = _codes(effective / (scale[:, None] * units), largest) * units
    return QuantizedLinear(w.astype(np.int8), scale, np.floor(b / scale + 0.5).astype(np.int64), exponent)


def fits_groups(found: QuantizedLinear, bits: int, group: int) -> bool:
    """Whether the weights are codes of so many bits, times their groups' powers of two if there are groups."""
    largest, w = 2 ** (bits - 1) - 1, found.w.astype(np.int64)
    if group == 0:
        return found.exponent is None and int(np.abs(w).max()) <= largest
    if (
        found.exponent is None
        or found.exponent.shape != (len(w), -(-w.shape[1] // group))
        or found.exponent.max() > MAX_EXPONENT
    ):
        return False
    units = 1 << found.exponent[:, np.arange(w.shape[1]) // group].astype(np.int64)
    return bool((w % units == 0).all() and (np.abs(w) <= largest * units).all())


def _codes(values: NDArray[np.float64], largest: int) -> NDArray[np.float64]:
    return np.clip(np.floor(values + 0.5), -largest, largest)


def _least_error(
    values: NDArray[np.float64],
    scale: NDArray[np.float64],
    least: NDArray[np.float64],
    largest: int,
    group: int,
    importance: NDArray[np.float64] | None,
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """Scale [O] and exponents u8 [O, G]. Exponents are whole, so the scale is tried over an octave, down from the one that
    holds the largest weight at exponent 4; what then does not fit is clipped, if that costs less than it saves."""
    starts = np.arange(0, values.shape[1], group)
    best_scale, best = scale, np.full(len(values), np.inf)
    exponent = np.zeros((len(values), len(starts)), np.uint8)
    for step in range(SCALES_IN_AN_OCTAVE):
        tried = np.maximum(scale * 2 ** (-step / SCALES_IN_AN_OCTAVE), least)
        errors = []
        for e in range(MAX_EXPONENT + 1):
            unit = tried[:, None] * 2.0**e
            error = (values - _codes(values / unit, largest) * unit) ** 2
            errors.append(np.add.reduceat(error if importance is None else error * importance, starts, axis=1))
        found = np.stack(errors)
        total = found.min(0).sum(1)
        better = total < best
        best, best_scale = np.where(better, total, best), np.where(better, tried, best_scale)
        exponent = np.where(better[:, None], found.argmin(0), exponent).astype(np.uint8)
    return best_scale, exponent


def quantize_positions(positions: NDArray[np.float64], bits: int) -> tuple[NDArray[np.int16], float]:
    """Position embeddings as whole numbers of one unit, and the value of it.

    16 bits: symmetric. 8: 256 codes from the least to the greatest, 0 inside, less their zero point: the original code's.
    """
    if bits == 16:
        unit = float(np.abs(positions).max()) / (2**15 - 1) or 1.0
        return np.floor(positions / unit + 0.5).astype(np.int16), unit
    q = affine(float(positions.min()), float(positions.max()), bits)
    codes = np.clip(np.floor(positions / q.scale[0] + 0.5) + q.zero[0], 0, q.last) - q.zero[0]
    return codes.astype(np.int16), float(q.scale[0])


def pixel_zero(preprocess: Preprocess) -> int:
    """The pixel value that patch embeddings count from."""
    return round(255 * float(np.mean(preprocess.mean)))


def pixel_linear(
    weight: NDArray[np.float64], bias: NDArray[np.float64], preprocess: Preprocess
) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """The patch embedding as a linear map of raw pixels: (p / 255 - mean) / std goes into weight and bias.

    weight: [C, channels, patch, patch]. Returns weight [C, patch * patch * channels] for inputs (p - zero) / 255, bias, zero.
    Pixels count from the middle of their range, so that rounding errors of the weights do not all point the same way.
    """
    squares = weight.shape[2] * weight.shape[3]
    zero = pixel_zero(preprocess)
    flat = weight.transpose(0, 2, 3, 1).reshape(len(weight), -1) / np.tile(preprocess.std, squares)
    return flat, bias + flat @ (zero / 255 - np.tile(preprocess.mean, squares)), zero
