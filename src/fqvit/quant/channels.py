"""Observe sites with one scale per channel and compute their quantization parameters.

Per-channel scales cost almost nothing at run time: input scales of a linear layer are folded into its weights, output scales
into its requantization, the output scales of LayerNorm into its gain, and GELU has one shift per channel. The scales of
attention times V are those of V times one factor, so its requantization needs one multiplier.
See also: observers.py, calibrate.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fqvit.errors import FqvitError
from fqvit.models.layers import Role
from fqvit.quant.observers import Observer, channel_extremes
from fqvit.quant.plan import SitePlan
from fqvit.quant.qparams import SCALE_GRID, QParams, affine, concatenate, symmetric

Floats = NDArray[np.float64]
GELU_DEPTH = 0.17  # -min(gelu(x)), rounded up
# The smallest scale of V's channels, as a share of the largest. The scales are folded into proj's weights, and smaller ones
# would cost more dynamic range there than they are worth.
NARROWEST = 1 / 64
# With fewer observed rows than this, the channels of a site share one range. The range of one channel over n rows leaves out
# 2 / (n + 1) of all values on average. Sites with one row per image, such as the norm of the class token, are affected: with
# the trained model `registers` and 16 images, sharing raises the cosine similarity of the logits from 0.996 to 0.999; with 256
# images or more, it makes no difference.
FEW_ROWS = 128
# Factors on observed ranges with Recipe.extremes "balanced". Few GELU outputs are near the largest output of their neuron, and
# finer codes are worth more than these. A site with one row per image is the opposite: in new images, values beyond the
# extremes of so few rows are frequent.
GELU_REACH = 0.85
ROW_REACH = 1.2
MANY_ROWS = 4096  # with fewer rows, ROW_REACH applies


class ChannelRange(Observer):
    """Minimum and maximum of each channel over all batches, 0 included: float64 [C] each."""

    def __init__(self, site: str) -> None:
        super().__init__(site)
        self._low: Floats = np.zeros(0)
        self._high: Floats = np.zeros(0)

    def ranges(self) -> tuple[Floats, Floats]:
        self._check()
        return self._low, self._high

    @property
    def rows(self) -> int:
        """How many rows [C] were observed."""
        return self.elements // max(len(self._low), 1)

    def _observe(self, x: Tensor) -> bool:
        low, high = channel_extremes(x.reshape(-1, x.shape[-1]))
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            return False
        self._widen(low, high)
        return True

    def _widen(self, low: Floats, high: Floats) -> None:
        known = (self._low, self._high) if len(self._low) else (0.0, 0.0)
        self._low, self._high = np.minimum(low, known[0]), np.maximum(high, known[1])

    def shift(self, constant: Floats) -> None:
        """Shift the observed range of each channel by a constant [C], as if it had been added to every observed value."""
        self._low, self._high = self._low + constant, self._high + constant

    def cover(self, low: Floats, high: Floats) -> None:
        """Pretend to have observed these values [C], too."""
        self._widen(low, high)

    def _merge(self, later: Self) -> None:
        if len(later._low):  # empty if no batch of the later observer was finite
            self._widen(later._low, later._high)

    def _state(self) -> dict[str, Any]:
        return {"low": self._low, "high": self._high}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._low, self._high = state["low"], state["high"]


def qparams(site: SitePlan, low: Floats, high: Floats, value: QParams | None, gelu_floor: float = 0.0) -> QParams:
    """Compute the parameters of a site from its ranges [C], by role.

    value: the parameters of V, for attention times V   gelu_floor: see Recipe
    """
    if site.role == "qkv":
        return qkv(low, high, site.bits, site.symmetric)
    if site.role == "value":
        return symmetric_channels(low, high, site.bits, NARROWEST)
    if site.role == "context":
        assert value is not None
        return context(low, high, value, site.bits)
    if site.role == "gelu":
        high, widest = with_floor(high, gelu_floor, site.k)
        if site.symmetric:
            return symmetric_gelu(high, site.bits, site.k, widest)
        return gelu(low, high, site.bits, site.k, widest)
    return symmetric_channels(low, high, site.bits) if site.symmetric else affine_channels(low, high, site.bits)


def adjusted_range(role: Role, observed: ChannelRange, balanced: bool) -> tuple[Floats, Floats]:
    """Return the ranges of all channels: shared if few rows were observed, times a factor if balanced."""
    low, high = observed.ranges()
    if observed.rows < FEW_ROWS:
        low, high = shared_range(role, low, high)
    factor = reach(role, observed.rows) if balanced else 1.0
    return low * factor, high * factor


def reach(role: Role, rows: int) -> float:
    """Return the factor on the observed range of a site with this many observed rows, with Recipe.extremes "balanced"."""
    if role == "gelu":
        return GELU_REACH
    return ROW_REACH if rows < MANY_ROWS else 1.0


def shared_range(role: Role, low: Floats, high: Floats) -> tuple[Floats, Floats]:
    """Return the range of all channels for each channel; Q, K and V have one range each."""
    groups = 3 if role == "qkv" else 1

    def each(ends: Floats, widest: Callable[[Floats], float]) -> Floats:
        return np.concatenate([np.full(len(part), widest(part)) for part in np.split(ends, groups)])

    return each(low, np.min), each(high, np.max)


def on_grid(scales: Floats) -> Floats:
    """Round scales [C] up to multiples of one unit; a file stores the multiples as 16-bit integers."""
    unit = float(scales.max()) / SCALE_GRID
    return np.maximum(np.ceil(scales / unit * (1 - 1e-12)), 1.0) * unit


def symmetric_channels(low: Floats, high: Floats, bits: int, narrowest: float = 0.0) -> QParams:
    """One scale per channel; the zero point is the middle code.

    narrowest: a channel whose range is below this share of the widest range gets the scale for exactly this share.
    """
    reach = np.maximum(-low, high)
    reach = np.maximum(reach, _least(reach, max(narrowest, 1 / SCALE_GRID)))
    middle = 2 ** (bits - 1)
    return QParams(bits, on_grid(reach / (middle - 1)), np.full(len(reach), middle, np.int64))


def affine_channels(low: Floats, high: Floats, bits: int) -> QParams:
    """One scale and one zero point per channel."""
    last = 2**bits - 1
    span = high - low
    scale = on_grid(np.maximum(span, _least(span, 1 / SCALE_GRID)) / last)
    return QParams(bits, scale, np.clip(np.rint(-low / scale), 0, last).astype(np.int64))


def _least(widths: Floats, share: float) -> float:
    """Return the smallest width to use: a share of the widest, or 1 if all are 0, because then any positive width is exact."""
    return share * float(widths.max()) or 1.0


def qkv(low: Floats, high: Floats, bits: int, middle: bool = False) -> QParams:
    """Q and K have one scale each, because their products are summed over channels. V has one scale per channel.

    middle: Q and K have the middle code as zero point, as V always has.
    """
    (q_low, k_low, v_low), (q_high, k_high, v_high) = np.split(low, 3), np.split(high, 3)
    codes = symmetric if middle else affine
    pair = [codes(float(a.min()), float(b.max()), bits) for a, b in ((q_low, q_high), (k_low, k_high))]
    size = len(v_low)
    spread = [QParams(bits, np.repeat(q.scale, size), np.repeat(q.zero, size)) for q in pair]
    return concatenate([*spread, symmetric_channels(v_low, v_high, bits, NARROWEST)])


def context(low: Floats, high: Floats, v: QParams, bits: int) -> QParams:
    """Attention times V has the scales of V times one factor: the smallest for which no channel saturates."""
    if len(low) % len(v.scale):
        raise FqvitError(f"attention times V: {len(v.scale)} scales of V for {len(low)} channels, which is not supported.")
    middle = 2 ** (bits - 1)
    factor = float((np.maximum(-low, high) / v.channel_scales(len(low))).max()) / (middle - 1) or 1.0
    return QParams(bits, v.scale * factor, np.full(len(v.scale), middle, np.int64))


def with_floor(high: Floats, quantile: float, k: int) -> tuple[Floats, float]:
    """Return the upper ends of GELU's ranges [C], each at least a quantile of them, and the upper end for the coarsest scale.

    Scales differ by powers of two. Many channels have the raised upper end, so the coarsest scale is that of the raised upper
    end times a power of two. Without a floor (quantile 0), or if that power exceeds 2^k, the widest channel determines the
    coarsest scale.
    """
    if quantile == 0:
        return high, float(high.max())
    least = max(float(np.quantile(high, quantile)), 0.0)
    octaves = np.ceil(np.log2((float(high.max()) + GELU_DEPTH) / (least + GELU_DEPTH)))
    if octaves > k:
        return np.maximum(high, least), float(high.max())
    # Slightly more than a power of two, so that no channel loses an octave to float rounding.
    span = (least + GELU_DEPTH) * np.exp2(max(octaves, 0.0)) * (1 + 1e-9)
    return np.maximum(high, least), float(span) - GELU_DEPTH


def gelu(low: Floats, high: Floats, bits: int, k: int, widest: float | None = None) -> QParams:
    """Outputs of GELU: the scale of the widest channel divided by 2^j, with the largest j in 0..k without saturation.

    Every range starts at the minimum of GELU, so that channels with the same scale also have the same zero point.
    widest: the upper end of the range with the coarsest scale; at least, and by default, that of the widest channel
    """
    span = (float(high.max()) if widest is None else widest) + GELU_DEPTH
    j = np.clip(np.floor(np.log2(span / (high + GELU_DEPTH))), 0, k)
    scale = span / (2**bits - 1) / np.exp2(j)
    # If a channel is never positive, its range is just GELU_DEPTH, and rounding up could exceed the last code.
    return QParams(bits, scale, np.minimum(np.ceil(GELU_DEPTH / scale), 2**bits - 1).astype(np.int64))


def symmetric_gelu(high: Floats, bits: int, k: int, widest: float | None = None) -> QParams:
    """Like `gelu`, but with the middle code as zero point."""
    middle = 2 ** (bits - 1)
    reach = np.maximum(high, GELU_DEPTH)
    widest = float(reach.max()) if widest is None else max(widest, GELU_DEPTH)
    scale = widest / (middle - 1) / np.exp2(np.clip(np.floor(np.log2(widest / reach)), 0, k))
    return QParams(bits, scale, np.full(len(scale), middle, np.int64))
