"""Sites with a step for each channel: what is remembered of them, and how steps follow from it.

The steps cost next to nothing when the program runs: those before a linear map go into its weights, those behind one into its
requantization, LayerNorm's into its gain, and GELU has a shift for each. Attention times V keeps V's steps times
one number, so that its requantization stays one number too. Neighbours: observers.py, calibrate.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fqvit.quant.observers import Observer, channel_extremes
from fqvit.quant.plan import SitePlan
from fqvit.quant.qparams import SCALE_GRID, QParams, affine, concatenate, symmetric

Floats = NDArray[np.float64]
GELU_LEAST = 0.17  # -min GELU, rounded up
NARROWEST = 1 / 64  # of V's widest channel: narrower ones matter less than the room that they would take in proj's weights


class ChannelRange(Observer):
    """The least and greatest value of each channel over all batches, 0 included: float64 [C] each."""

    def __init__(self, site: str) -> None:
        super().__init__(site)
        self._low: Floats = np.zeros(0)
        self._high: Floats = np.zeros(0)

    def ranges(self) -> tuple[Floats, Floats]:
        self._check()
        return self._low, self._high

    def _observe(self, x: Tensor) -> bool:
        low, high = channel_extremes(x.reshape(-1, x.shape[-1]))
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            return False
        self._fold(low, high)
        return True

    def _fold(self, low: Floats, high: Floats) -> None:
        known = (self._low, self._high) if len(self._low) else (0.0, 0.0)
        self._low, self._high = np.minimum(low, known[0]), np.maximum(high, known[1])

    def _merge(self, later: Self) -> None:
        if len(later._low):  # nothing is kept of batches that are not finite
            self._fold(later._low, later._high)

    def _state(self) -> dict[str, Any]:
        return {"low": self._low, "high": self._high}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._low, self._high = state["low"], state["high"]


def qparams(site: SitePlan, low: Floats, high: Floats, value: QParams | None) -> QParams:
    """By the part that the site plays; `value` are V's parameters for attention times V."""
    if site.role == "qkv":
        return qkv(low, high, site.bits, site.symmetric)
    if site.role == "context":
        assert value is not None
        return context(low, high, value, site.bits)
    if site.role == "gelu":
        return symmetric_gelu(high, site.bits, site.k) if site.symmetric else gelu(low, high, site.bits, site.k)
    return symmetric_channels(low, high, site.bits) if site.symmetric else affine_channels(low, high, site.bits)


def on_grid(steps: Floats) -> Floats:
    """Steps rounded up to whole numbers (16 bits) of one unit, by which a file names them."""
    unit = float(steps.max()) / SCALE_GRID
    return np.maximum(np.ceil(steps / unit * (1 - 1e-12)), 1.0) * unit


def symmetric_channels(low: Floats, high: Floats, bits: int, narrowest: float = 0.0) -> QParams:
    """A step for each channel around one zero point in the middle of the codes."""
    reach = np.maximum(-low, high)
    reach = np.maximum(reach, _least(reach, max(narrowest, 1 / SCALE_GRID)))
    middle = 2 ** (bits - 1)
    return QParams(bits, on_grid(reach / (middle - 1)), np.full(len(reach), middle, np.int64))


def affine_channels(low: Floats, high: Floats, bits: int) -> QParams:
    """A step and a zero point for each channel."""
    last = 2**bits - 1
    span = high - low
    scale = on_grid(np.maximum(span, _least(span, 1 / SCALE_GRID)) / last)
    return QParams(bits, scale, np.clip(np.rint(-low / scale), 0, last).astype(np.int64))


def _least(widths: Floats, share: float) -> float:
    """A share of the widest; where all are 0, what gives steps of a usual size: they matter to nobody, but must fit."""
    return share * float(widths.max()) or 1.0


def qkv(low: Floats, high: Floats, bits: int, middle: bool = False) -> QParams:
    """Q and K: one step each, since their products are summed over channels. V: a step for each channel.

    middle: Q and K have their zero point there, as V always has.
    """
    (q_low, k_low, v_low), (q_high, k_high, v_high) = np.split(low, 3), np.split(high, 3)
    codes = symmetric if middle else affine
    pair = [codes(float(a.min()), float(b.max()), bits) for a, b in ((q_low, q_high), (k_low, k_high))]
    size = len(v_low)
    spread = [QParams(bits, np.repeat(q.scale, size), np.repeat(q.zero, size)) for q in pair]
    return concatenate([*spread, symmetric_channels(v_low, v_high, bits, NARROWEST)])


def context(low: Floats, high: Floats, v: QParams, bits: int) -> QParams:
    """Attention times V: V's steps times the one number that the widest channel needs."""
    middle = 2 ** (bits - 1)
    factor = float((np.maximum(-low, high) / v.channel_scales(len(low))).max()) / (middle - 1) or 1.0
    return QParams(bits, v.scale * factor, np.full(len(v.scale), middle, np.int64))


def gelu(low: Floats, high: Floats, bits: int, k: int) -> QParams:
    """GELU's outputs: the widest channel's step divided by 2^j, j in 0..k, as far as the channel still fits.

    Every range starts at GELU's own least value, so that channels of one step share a zero point, too.
    """
    widest = float(high.max()) + GELU_LEAST
    j = np.clip(np.floor(np.log2(widest / (high + GELU_LEAST))), 0, k)
    scale = widest / (2**bits - 1) / np.exp2(j)
    # A channel that is never above 0 fills all codes with GELU's own range, and the quotient may end a bit above the last.
    return QParams(bits, scale, np.minimum(np.ceil(GELU_LEAST / scale), 2**bits - 1).astype(np.int64))


def symmetric_gelu(high: Floats, bits: int, k: int) -> QParams:
    """The same around the middle code: what lies below 0 fits wherever GELU's own least value does."""
    middle = 2 ** (bits - 1)
    reach = np.maximum(high, GELU_LEAST)
    widest = float(reach.max())
    scale = widest / (middle - 1) / np.exp2(np.clip(np.floor(np.log2(widest / reach)), 0, k))
    return QParams(bits, scale, np.full(len(scale), middle, np.int64))
