"""Weights as integers: symmetric, one scale an output channel. Used by lowering and by simulation, so that they agree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class QuantizedLinear:
    """w int8 [O, K]; scale float64 [O]: the value of one accumulator unit; bias int64 [O] in those units, without input zeros."""

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
    scale[scale == 0] = 1.0  # a channel of zeros
    # The smallest normal float keeps 1 / scale finite; such a channel is 0 after any rounding.
    scale = np.maximum(scale, np.finfo(np.float64).tiny)
    w = np.clip(np.floor(effective / scale[:, None] + 0.5), -largest, largest).astype(np.int8)
    return QuantizedLinear(w, scale, np.floor(b / scale + 0.5).astype(np.int64))
