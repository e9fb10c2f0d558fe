"""Encode real numbers in fixed point: multipliers and shifts, LayerNorm's gamma and beta."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fqvit.errors import FqvitError
from fqvit.ir.fixed import multiplier
from fqvit.ir.ops import MAX_FRACTION
from fqvit.quant.qparams import QParams

# Bits of LayerNorm's g: a relative error of 2^-22 is far below one code, and t * g is below 2^53 (t < 2^31 in ir/ops.py).
G_BITS = 22
B_FRACTION = 20  # fraction bits of LayerNorm's b, or fewer if beta is very large
DROPPED_BITS = 15  # a 31-bit multiplier without its lowest 15 bits has 16 bits


def encode_ratio(name: str, ratio: float, short: bool) -> tuple[int, int]:
    """Return (mult, shift) with mult / 2^shift nearest to `ratio`. short: mult has 16 bits instead of 31."""
    try:
        return _shortened(*multiplier(ratio)) if short else multiplier(ratio)
    except (ValueError, OverflowError):
        raise FqvitError(
            f"{name}: the ratio of its scales is {ratio:g}, which no multiplier can represent. Check the checkpoint's values."
        ) from None


def _shortened(mult: int, shift: int) -> tuple[int, int]:
    """Round a 31-bit multiplier to 16 bits; return it unchanged if it is 0 or its shift is too small."""
    if shift <= DROPPED_BITS or mult == 0:
        return mult, shift
    short, shift = (mult + (1 << (DROPPED_BITS - 1))) >> DROPPED_BITS, shift - DROPPED_BITS
    if short < 1 << 16:
        return short, shift
    return (short >> 1, shift - 1) if shift > 1 else (short - 1, shift)


def shared_shift(name: str, ratios: Sequence[NDArray[np.float64]], short: bool) -> tuple[list[NDArray[np.int64]], int]:
    """Encode ratios float64 [1] or [C] as multipliers with one common shift: ratio = mult / 2^shift.

    Multipliers are below 2^30, or have 16 bits if short. The shift is at most 47, which leaves room for alpha up to 15.
    """
    largest = max(float(r.max()) for r in ratios)
    shift = min((15 if short else 29) - math.frexp(largest)[1], 47)
    if shift < 1:
        raise FqvitError(
            f"{name}: the ratio of its scales is {largest:g}, which no multiplier can represent. Check the checkpoint's values."
        )
    return [np.floor(r * 2.0**shift + 0.5).astype(np.int64) for r in ratios], shift


def quotient_fraction(channels: int) -> int:
    """Return the fraction bits of LayerNorm's t for C channels: the most, up to 24, with (isqrt(C) + 1) * 2^fraction < 2^31."""
    return min(MAX_FRACTION, 31 - (math.isqrt(channels) + 1).bit_length())


def encode_affine(
    name: str, gain: NDArray[np.float64], offset: NDArray[np.float64], fraction: int
) -> tuple[NDArray[np.int32], int, int]:
    """Encode gain and offset float64 [C] of a LayerNorm; return (affine, shift, b_shift). affine: i32 [2, C], the rows g and b.

    gain = g / 2^(shift - fraction),   offset = b / 2^(shift - b_shift)
    """
    g_fraction = min(max(G_BITS - math.frexp(float(np.abs(gain).max()) or 1.0)[1], 0), 28)
    b_fraction = min(B_FRACTION, 30 - math.frexp(float(np.abs(offset).max()) or 1.0)[1])
    both = np.stack([gain * 2.0**g_fraction, offset * 2.0**b_fraction])
    shift = fraction + g_fraction
    return to_int32(name, "gamma or beta", np.floor(both + 0.5).astype(np.int64)), shift, shift - b_fraction


def to_int32(name: str, what: str, values: NDArray[np.int64]) -> NDArray[np.int32]:
    """Convert to int32. Raises FqvitError if |value| >= 2^31."""
    if np.abs(values).max() >= 2**31:
        raise FqvitError(f"{name}: {what} does not fit 32 bits. Check the checkpoint's values.")
    return values.astype(np.int32)


def powers(q: QParams) -> tuple[float, NDArray[np.uint8], tuple[int, ...]]:
    """Split per-channel scales into the finest scale and powers of two: scale[c] = finest * 2^alpha[c].

    Returns finest, alpha u8 [C], and the zero point of each value of alpha. The scales must differ by powers of two.
    """
    finest = float(q.scale.min())
    alpha = np.rint(np.log2(q.scale / finest)).astype(np.uint8)
    zeros = [int(q.zero[alpha == a][0]) if (alpha == a).any() else 0 for a in range(int(alpha.max()) + 1)]
    return finest, alpha, tuple(zeros)
