"""Twin uniform codes (PTQ4ViT, Yuan 2022): one bit selects one of two ranges, whose scales differ by a power of two.

With k bits each range has 2^(k-1) evenly spaced codes, in units of the finer scale:
  attention   0, 1, .. 2^(k-1) - 1 and, for larger values, these times 2^m; the coarse scale is 1 / 2^(k-1);
  GELU        fine codes below 0, coarse ones from 0 on; the fine range covers the most negative output of GELU.
A value gets the nearest code.
"""

from __future__ import annotations

import math

import numpy as np

from fqvit.quant.channels import GELU_DEPTH
from fqvit.quant.qparams import QParams

MAX_BITS = 16  # of a code in units of the finer scale


def exponents(bits: int) -> range:
    """Return the values of m for which every code fits MAX_BITS."""
    return range(MAX_BITS - bits + 1)


def twin_attention(bits: int, m: int) -> QParams:
    """Return codes for 0..1 with the scales 2^-(bits-1) and 2^-(bits-1+m)."""
    half = 2 ** (bits - 1)
    codes = np.arange(half)
    return _codes(1 / half / 2**m, 0, np.concatenate([codes, codes << m]))


def twin_gelu(bits: int, scale: float) -> QParams:
    """Return codes for outputs of GELU with this scale above 0, and below 0 the smallest scale / 2^m that covers GELU_DEPTH."""
    half = 2 ** (bits - 1)
    m = min(max(math.floor(math.log2(scale * half / GELU_DEPTH)), 0), exponents(bits)[-1])
    codes = np.arange(half)
    return _codes(scale / 2**m, half, np.concatenate([codes, half + (codes << m)]))


def _codes(scale: float, zero: int, codes: np.ndarray) -> QParams:
    grid = np.unique(codes).tolist()
    width = max(int(grid[-1]).bit_length(), 1)
    return QParams(width, np.array([scale]), np.array([zero], np.int64), grid=tuple(grid))
