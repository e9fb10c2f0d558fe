"""How the real values of one site become codes: a frozen value, made by calibration, read by simulation and lowering.

Affine codes: q = clip(floor(x / (scale 2^alpha) + 1/2) + zero, 0, 2^bits - 1). Attention has two codes of its own: log2 (see
log2_encode) and relative (see relative_encode).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SCALE_GRID = 2**15  # a channel's step is a whole number of times its site's unit, and that number fits 16 bits


@dataclass(frozen=True)
class QParams:
    """scale float64 [G], zero int64 [G]: one a group of channels of equal size; G is 1, 3 (Q, K and V apart) or C.

    alpha: uint8 [C], the Power-of-Two Factor, or None. log2: the codes a mean 2^-a and scale and zero are unused; with
    zero_code the last of them means 0. levels: code a means levels[a] over the sum of its row (attention, relative).
    """

    bits: int
    scale: NDArray[np.float64]
    zero: NDArray[np.int64]
    alpha: NDArray[np.uint8] | None = None
    log2: bool = False
    zero_code: bool = False
    levels: tuple[int, ...] = ()

    @property
    def last(self) -> int:
        return (1 << self.bits) - 1

    def channel_scales(self, channels: int) -> NDArray[np.float64]:
        """The distance between two codes, a channel: [C]."""
        steps = np.repeat(self.scale, channels // len(self.scale))
        return steps if self.alpha is None else steps * np.exp2(self.alpha.astype(np.float64))

    def channel_zeros(self, channels: int) -> NDArray[np.int64]:
        return np.repeat(self.zero, channels // len(self.zero))

    def group(self, index: int) -> QParams:
        """The parameters of one third of the channels (Q, K or V), as one number where they are equal."""
        if len(self.scale) == 1:
            return QParams(self.bits, self.scale, self.zero)
        size = len(self.scale) // 3
        part = slice(size * index, size * (index + 1))
        scale, zero = self.scale[part], self.zero[part]
        if (scale == scale[0]).all() and (zero == zero[0]).all():
            scale, zero = scale[:1], zero[:1]
        return QParams(self.bits, scale, zero)

    def tiled(self, times: int) -> QParams:
        """For `times` copies of the channels side by side (patch merging)."""
        alpha = None if self.alpha is None else np.tile(self.alpha, times)
        if len(self.scale) == 1:
            return QParams(self.bits, self.scale, self.zero, alpha)
        return QParams(self.bits, np.tile(self.scale, times), np.tile(self.zero, times), alpha)

    def encode(self, x: Tensor) -> Tensor:
        """Codes as float32, channels last."""
        if self.log2:
            return log2_encode(x, self.last)
        if self.levels:
            return relative_encode(x, self.levels)
        steps, zeros = self._rows(x)
        return ((x / steps + 0.5).floor_() + zeros).clamp_(0, self.last)

    def decode(self, codes: Tensor) -> Tensor:
        if self.log2:
            values = torch.exp2(-codes)
            return values * (codes < self.last) if self.zero_code else values
        if self.levels:
            weights = torch.tensor(self.levels, dtype=codes.dtype, device=codes.device)[codes.long()]
            return weights / weights.sum(-1, keepdim=True)
        steps, zeros = self._rows(codes)
        return (codes - zeros) * steps

    def _rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        channels = x.shape[-1] if len(self.scale) > 1 else 1  # one scale broadcasts, quicker than its copies
        steps = torch.from_numpy(self.channel_scales(channels)).to(x.device, x.dtype)
        return steps, torch.from_numpy(self.channel_zeros(channels)).to(x.device, x.dtype)


def log2_encode(p: Tensor, last: int) -> Tensor:
    """clip(log2 of round(1 / p), rounded at mantissa 1.5, 0, last): what LogSoftmax computes in integers. p below 2^-30, 0 too,
    counts as 2^-30: that is last but for the wide codes that are only simulated, which end at 30."""
    r = (1 / p.clamp(min=2.0**-30) + 0.5).floor_()
    mantissa, exponent = torch.frexp(r)  # r = mantissa 2^exponent, mantissa in [1/2, 1)
    return (exponent - 1 + (mantissa >= 0.75)).clamp(0, last).to(p.dtype)


def relative_encode(p: Tensor, levels: tuple[int, ...]) -> Tensor:
    """The code of the level nearest to L p / (largest p of the row), L the largest level: what RowCodes computes."""
    codes, bounds = level_bounds(levels)
    share = p / p.amax(-1, keepdim=True)
    place = torch.bucketize(share, torch.from_numpy(bounds).to(p.device, p.dtype), right=True)
    return torch.from_numpy(codes).to(p.device)[place].to(p.dtype)


def level_bounds(levels: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The codes in order of their weights, lightest first, and the shares of the largest at which they change: the middle
    between two weights."""
    weights = np.array(levels, np.float64)
    order = np.argsort(weights, kind="stable")
    rising = weights[order] / weights.max()
    return order.astype(np.int64), (rising[1:] + rising[:-1]) / 2


def affine(lo: float, hi: float, bits: int) -> QParams:
    """Codes that cover lo..hi, 0 inside: s = (hi - lo) / (2^bits - 1), zero = clip(round(-lo / s))."""
    lo, hi = min(lo, 0.0), max(hi, 0.0)
    levels = 2**bits - 1
    scale = (hi - lo) / levels or 1.0  # a site that is always 0 needs no step in particular
    zero = min(max(round(-lo / scale), 0), levels)
    return QParams(bits, np.array([scale]), np.array([zero], np.int64))


def symmetric(lo: float, hi: float, bits: int) -> QParams:
    """Codes that cover lo..hi around a zero point in the middle: s = max(-lo, hi) / (2^(bits-1) - 1)."""
    middle = 2 ** (bits - 1)
    scale = max(-lo, hi) / (middle - 1) or 1.0
    return QParams(bits, np.array([scale]), np.array([middle], np.int64))


def concatenate(parts: list[QParams]) -> QParams:
    """Groups of channels side by side, each with its own scale and zero."""
    return QParams(parts[0].bits, np.concatenate([p.scale for p in parts]), np.concatenate([p.zero for p in parts]))


def log2(bits: int, zero_code: bool) -> QParams:
    return QParams(bits, np.ones(1), np.zeros(1, np.int64), log2=True, zero_code=zero_code)


def relative(bits: int, tokens: int) -> QParams:
    """Attention beside the largest of its row. More than 4 bits: evenly spaced. Else powers of two, from 2^15 down, and 0; with
    4 bits also the three halves between the largest four: a sum of two shifts each.

    They start lower than 2^15 where a row of `tokens` 8-bit values would pass 31 bits.
    """
    last = 2**bits - 1
    levels = list(range(last + 1))
    if bits <= 4:
        top = 2 ** min(15, (2**31 // (255 * tokens)).bit_length() - 1)
        halves = [3 * top >> k for k in (2, 3, 4)] if bits == 4 else []
        powers = [top >> k for k in range(last - len(halves))]
        levels = [*sorted(powers + halves, reverse=True), 0]
    return QParams(bits, np.ones(1), np.zeros(1, np.int64), levels=tuple(levels))
