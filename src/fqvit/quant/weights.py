"""Weights and positions as integers. Used by lowering and by simulation, so that they agree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fqvit.preprocess import Preprocess


@dataclass(frozen=True)
class QuantizedLinear:
    """w int8 [O, K]; scale float64 [O]: the value of one accumulator unit; bias int64 [O] in those units, input zeros apart."""

    w: NDArray[np.int8]
    scale: NDArray[np.float64]
    bias: NDArray[np.int64]


def quantize_linear(
    weight: NDArray[np.float64], bias: NDArray[np.float64] | None, steps: NDArray[np.float64], bits: int
) -> QuantizedLinear:
    """Round weight [O, K] times the inputs' steps [K] (or [1]): acc = sum codes w, worth `scale` each.

    scale = max(max|w|/(2^(bits-1) - 1), |b|/2^30), so that the bias of a channel whose weights are all (nearly) 0 fits too.
    """
    b = np.zeros(len(weight)) if bias is None else bias
    effective = weight * steps
    largest = 2 ** (bits - 1) - 1
    scale = np.maximum(np.abs(effective).max(1) / largest, np.abs(b) / 2**30)
    # A channel of zeros has any scale; the smallest of the others suits those that compare channels (the logits).
    live = scale[scale > np.finfo(np.float64).tiny]
    scale = np.maximum(scale, live.min() if live.size else 1.0)
    w = np.clip(np.floor(effective / scale[:, None] + 0.5), -largest, largest).astype(np.int8)
    return QuantizedLinear(w, scale, np.floor(b / scale + 0.5).astype(np.int64))


def quantize_positions(positions: NDArray[np.float64], bits: int) -> tuple[NDArray[np.int16], float]:
    """Position embeddings as symmetric codes of at most 16 bits, and the value of one: one scale for all."""
    unit = float(np.abs(positions).max()) / (2 ** (bits - 1) - 1) or 1.0
    return np.floor(positions / unit + 0.5).astype(np.int16), unit


def pixel_linear(
    weight: NDArray[np.float64], bias: NDArray[np.float64], preprocess: Preprocess
) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """The patch embedding as a linear map of raw pixels: (p / 255 - mean) / std goes into weight and bias.

    weight: [C, channels, patch, patch]. Returns weight [C, patch * patch * channels] for inputs (p - zero) / 255, bias, zero.
    Pixels count from the middle of their range, so that rounding errors of the weights do not all point the same way.
    """
    squares = weight.shape[2] * weight.shape[3]
    zero = round(255 * float(np.mean(preprocess.mean)))
    flat = weight.transpose(0, 2, 3, 1).reshape(len(weight), -1) / np.tile(preprocess.std, squares)
    return flat, bias + flat @ (zero / 255 - np.tile(preprocess.mean, squares)), zero
