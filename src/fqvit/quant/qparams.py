"""Hold the quantization parameters of one site, and encode and decode values with them.

Calibration creates the parameters; simulation and lowering use them.
Affine codes: q = clip(floor(x / (scale * 2^alpha) + 1/2) + zero, 0, 2^bits - 1). Attention has two more kinds of codes: log2
(see log2_encode) and relative (see relative_encode).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FEW = 32  # with fewer levels, comparing values with every boundary is faster than a binary search
SCALE_GRID = 2**15  # per-channel scales are multiples of one unit per site; the multiples fit 16 bits


@dataclass(frozen=True)
class QParams:
    """The quantization parameters of one site with C channels.

    scale: float64 [G]   zero: int64 [G], the zero points   G: number of groups of channels, 1, 3 (Q, K and V) or C
    alpha: uint8 [C], the shifts of the Power-of-Two Factor, or None
    log2: code i means 2^-i; scale and zero are unused   zero_code: the last log2 code means 0
    octave: with log2, codes per power of two (simulated only): with 2, code i means scale * 2^(-i/2)
    levels: code i means levels[i] divided by the sum over its row (relative attention)
    grid: the only codes that occur, in ascending order (GELU outputs with few bits); () for all
    """

    bits: int
    scale: NDArray[np.float64]
    zero: NDArray[np.int64]
    alpha: NDArray[np.uint8] | None = None
    log2: bool = False
    zero_code: bool = False
    levels: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()
    octave: int = 1

    @property
    def width(self) -> int:
        """The number of bits that distinguish the codes: `bits`, or fewer if only the codes of `grid` occur."""
        return (len(self.grid) - 1).bit_length() if self.grid else self.bits

    @property
    def last(self) -> int:
        """The largest code, 2^bits - 1."""
        return (1 << self.bits) - 1

    def channel_scales(self, channels: int) -> NDArray[np.float64]:
        """Return the scale of each channel, including the Power-of-Two Factor: float64 [C]."""
        scales = np.repeat(self.scale, channels // len(self.scale))
        return scales if self.alpha is None else scales * np.exp2(self.alpha.astype(np.float64))

    def channel_zeros(self, channels: int) -> NDArray[np.int64]:
        """Return the zero point of each channel: int64 [C]."""
        return np.repeat(self.zero, channels // len(self.zero))

    def group(self, index: int) -> QParams:
        """Return the parameters of one third of the channels (0: Q, 1: K, 2: V), with one scale if its channels share it."""
        if len(self.scale) == 1:
            return QParams(self.bits, self.scale, self.zero)
        size = len(self.scale) // 3
        part = slice(size * index, size * (index + 1))
        scale, zero = self.scale[part], self.zero[part]
        if (scale == scale[0]).all() and (zero == zero[0]).all():
            scale, zero = scale[:1], zero[:1]
        return QParams(self.bits, scale, zero)

    def tiled(self, times: int) -> QParams:
        """Repeat the channels `times` times, for concatenated tokens (patch merging) and convolutions."""
        alpha = None if self.alpha is None else np.tile(self.alpha, times)
        if len(self.scale) == 1:
            return QParams(self.bits, self.scale, self.zero, alpha)
        return QParams(self.bits, np.tile(self.scale, times), np.tile(self.zero, times), alpha)

    def encode(self, x: Tensor) -> Tensor:
        """Quantize x [..., C]; returns codes in the dtype of x."""
        if self.log2 and self.octave > 1:
            # x = 0 gets the last code.
            return (0.5 - self.octave * (x / float(self.scale[0])).log2_()).floor_().clamp_(0, self.last)
        if self.log2:
            return log2_encode(x, self.last)
        if self.levels:
            return relative_encode(x, self.levels)
        scales, zeros = self._scales_and_zeros(x)
        if self.grid:
            # Boundaries between codes are multiples of 1/2, so a table of the halves is exact, and faster than a search.
            grid = torch.tensor(self.grid, dtype=x.dtype, device=x.device)
            first = 2 * self.grid[0]
            halves = torch.arange(first, 2 * self.grid[-1] + 1, dtype=x.dtype, device=x.device) / 2
            table = grid[torch.bucketize(halves, (grid[1:] + grid[:-1]) / 2, right=True)]
            index = ((x / scales + zeros) * 2).floor_().sub_(first).clamp_(0, len(table) - 1)
            return table.index_select(0, index.flatten().int()).view_as(x)
        return (x / scales).add_(0.5).floor_().add_(zeros).clamp_(0, self.last)

    def decode(self, codes: Tensor) -> Tensor:
        """Dequantize codes [..., C], given in a float dtype."""
        if self.log2:
            values = torch.exp2(-codes) if self.octave == 1 else torch.exp2(-codes / self.octave) * float(self.scale[0])
            return values * (codes < self.last) if self.zero_code else values
        if self.levels:
            weights = torch.tensor(self.levels, dtype=codes.dtype, device=codes.device)[codes.int()]
            return weights.div_(weights.sum(-1, keepdim=True))
        scales, zeros = self._scales_and_zeros(codes)
        return (codes - zeros).mul_(scales)

    def _scales_and_zeros(self, x: Tensor) -> tuple[Tensor, Tensor]:
        channels = x.shape[-1] if len(self.scale) > 1 else 1  # broadcasting one scale is faster than repeating it
        scales = torch.from_numpy(self.channel_scales(channels)).to(x.device, x.dtype)
        return scales, torch.from_numpy(self.channel_zeros(channels)).to(x.device, x.dtype)


def log2_encode(p: Tensor, last: int) -> Tensor:
    """clip(log2(round(1 / p)), 0, last), with log2 rounded up if the mantissa is at least 1.5, as in the LogSoftmax op.

    p below 2^-30, including 0, is treated as 2^-30; only simulated codes of more than 4 bits reach code 30.
    """
    r = (1 / p.clamp(min=2.0**-30) + 0.5).floor_()
    mantissa, exponent = torch.frexp(r)  # r = mantissa * 2^exponent, mantissa in [1/2, 1)
    return (exponent - 1 + (mantissa >= 0.75)).clamp(0, last).to(p.dtype)


def relative_encode(p: Tensor, levels: tuple[int, ...]) -> Tensor:
    """Return the code of the level nearest to p / max(p of the row) * max(levels), as the RowCodes op does."""
    codes, bounds = level_bounds(levels)
    share, ends = p / p.amax(-1, keepdim=True), torch.from_numpy(bounds).to(p.device, p.dtype)
    if len(bounds) < FEW:
        index = torch.zeros(share.shape, dtype=torch.uint8, device=p.device)
        for end in ends.tolist():
            index += share >= end
    else:
        index = torch.bucketize(share, ends, right=True)
    return torch.from_numpy(codes).to(p.device, p.dtype)[index.int()]


def level_bounds(levels: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the codes sorted by level, smallest first, and the boundaries between them as shares of the largest level.

    A boundary is the middle between two neighbouring levels.
    """
    weights = np.array(levels, np.float64)
    order = np.argsort(weights, kind="stable")
    rising = weights[order] / weights.max()
    return order.astype(np.int64), (rising[1:] + rising[:-1]) / 2


def affine(lo: float, hi: float, bits: int) -> QParams:
    """Return affine codes for lo..hi, with 0 included: scale = (hi - lo) / (2^bits - 1), zero = clip(round(-lo / scale))."""
    lo, hi = min(lo, 0.0), max(hi, 0.0)
    last = 2**bits - 1
    scale = (hi - lo) / last or 1.0  # for a site that is always 0 any scale is exact
    zero = min(max(round(-lo / scale), 0), last)
    return QParams(bits, np.array([scale]), np.array([zero], np.int64))


def symmetric(lo: float, hi: float, bits: int) -> QParams:
    """Return symmetric codes for lo..hi: zero is the middle code, scale = max(-lo, hi) / (2^(bits-1) - 1)."""
    middle = 2 ** (bits - 1)
    scale = max(-lo, hi) / (middle - 1) or 1.0
    return QParams(bits, np.array([scale]), np.array([middle], np.int64))


def concatenate(parts: list[QParams]) -> QParams:
    """Concatenate groups of channels, each with its own scale and zero point."""
    return QParams(parts[0].bits, np.concatenate([p.scale for p in parts]), np.concatenate([p.zero for p in parts]))


def log2(bits: int, zero_code: bool) -> QParams:
    """Return log2 codes for attention. zero_code: the last code means 0."""
    return QParams(bits, np.ones(1), np.zeros(1, np.int64), log2=True, zero_code=zero_code)


def log_sqrt2(bits: int, scale: float) -> QParams:
    """Return codes for attention (RepQ-ViT): code i means scale * 2^(-i/2), the last code means 0."""
    return QParams(bits, np.array([scale]), np.zeros(1, np.int64), log2=True, zero_code=True, octave=2)


def relative(bits: int, tokens: int, levels: Literal["powers", "curve", "curve-below-8"] = "powers") -> QParams:
    """Return codes for attention relative to the largest value of its row.

    Levels as shares of the largest:
    powers: 1, 1/2, 1/4, ... and 0; 4 bits also have the midpoints between the four largest, each a sum of two powers of two;
    with more than 4 bits the levels are evenly spaced;
    curve: (u^2 + 4 * u^4) / 5 for u = 1, ..., 0 in equal steps; less error if attention is spread over many tokens;
    curve-below-8: evenly spaced with 8 bits, otherwise as curve.
    The largest level is 2^15, or less if a weighted sum of `tokens` 8-bit values could exceed 31 bits.
    """
    last = 2**bits - 1
    if levels == "curve-below-8":
        levels = "powers" if bits == 8 else "curve"
    if bits > 4 and levels == "powers":
        return QParams(bits, np.ones(1), np.zeros(1, np.int64), levels=tuple(range(last + 1)))
    top = 2 ** min(15, (2**31 // (255 * tokens)).bit_length() - 1)
    if levels == "curve":
        u = np.arange(last, -1, -1) / last
        found = np.floor(top * (u**2 + 4 * u**4) / 5 + 0.5).astype(int).tolist()
    else:
        midpoints = [3 * top >> k for k in (2, 3, 4)] if bits == 4 else []
        powers = [top >> k for k in range(last - len(midpoints))]
        found = [*sorted(powers + midpoints, reverse=True), 0]
    return QParams(bits, np.ones(1), np.zeros(1, np.int64), levels=tuple(found))
