"""Per-channel histograms whose counts do not depend on the order or batching of the data.

A channel's bins are 2^e wide and anchored at 0: value x has index trunc(x / 2^e), so bin i > 0 is [i, i + 1) * 2^e, bin -i
is (-i - 1, -i] * 2^e, and bin 0 is (-2^e, 2^e). Because of truncation (not floor), index i becomes trunc(i / 2) when the width
doubles, even if x / 2^e underflows. e is the smallest exponent for which `bins` consecutive indices cover the channel;
it depends only on the channel's minimum and maximum. Values must be finite, which observers.py checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEAST_EXPONENT = -100  # 2^100 is representable in float32, so that x / 2^e is one exact multiplication
INDEX_BITS = 22  # |index| < 2^22 even for nearly constant channels: exact in float32 and int32

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Histogram:
    """Counts of `channels` channels with `bins` bins each (a power of two).

    counts: int64 [C, bins], index i is stored at i mod bins   low, high: float64 [C]   exponent: int64 [C]
    """

    def __init__(self, channels: int, bins: int) -> None:
        assert channels > 0 and bins >= 8 and bins & (bins - 1) == 0
        self.channels = channels
        self.bins = bins
        self.low: Floats = np.full(channels, np.inf)
        self.high: Floats = np.full(channels, -np.inf)
        self.exponent: Ints = np.full(channels, LEAST_EXPONENT, np.int64)
        self._counts = torch.zeros(channels * bins, dtype=torch.int64)
        self._place(torch.device("cpu"))

    @property
    def counts(self) -> Ints:
        counts: Ints = self._counts.cpu().numpy().reshape(self.channels, self.bins)
        return counts

    def observe(self, rows: Tensor, low: Floats, high: Floats) -> None:
        """Count rows: float32 [R, C], finite; low, high: minimum and maximum per channel [C]."""
        self._cover(low, high)
        if rows.device != self._counts.device:
            self._place(rows.device)
        index = (rows * self._inverse).to(torch.int32).bitwise_and_(self.bins - 1).add_(self._first)
        self._counts += torch.bincount(index.reshape(-1), minlength=self.channels * self.bins)

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram."""
        assert (self.channels, self.bins) == (other.channels, other.bins)
        if not other.counts.any():
            return
        self._cover(other.low, other.high)
        widened = _widened(other.counts, other.low, other.exponent, self.exponent)
        self._counts += torch.from_numpy(widened.reshape(-1)).to(self._counts.device)

    def edges(self) -> tuple[Floats, Floats, Ints]:
        """Return lower and upper edges (float64) and counts (int64) of all bins, each [C, bins], in ascending order.

        Edges are clipped to the channel's minimum and maximum.
        """
        width = np.ldexp(1.0, self.exponent)[:, None]
        index = _window(self.low, self.exponent, self.bins)
        lower = np.where(index > 0, index, index - 1.0) * width
        upper = np.where(index < 0, index, index + 1.0) * width
        counts = np.take_along_axis(self.counts, index & (self.bins - 1), 1)
        low, high = self.low[:, None], self.high[:, None]
        return np.clip(lower, low, high), np.clip(upper, low, high), counts

    def state(self) -> dict[str, Any]:
        return {"bins": self.bins, "low": self.low.copy(), "high": self.high.copy(), "counts": self.counts.copy()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Histogram:
        low, high, counts = (np.asarray(state[key]) for key in ("low", "high", "counts"))
        self = cls(len(low), int(state["bins"]))
        self._cover(low, high)
        self._counts = torch.from_numpy(counts.astype(np.int64).reshape(-1))
        return self

    def _cover(self, low: Floats, high: Floats) -> None:
        """Widen the bins until they cover low..high [C] and all values counted before."""
        if bool(np.all(low >= self.low)) and bool(np.all(high <= self.high)):
            return
        low, high = np.minimum(low, self.low), np.maximum(high, self.high)
        exponent = _exponents(low, high, self.bins)
        if bool(np.any(exponent != self.exponent)):
            if bool(self._counts.any()):
                widened = _widened(self.counts, self.low, self.exponent, exponent)
                self._counts = torch.from_numpy(widened.reshape(-1)).to(self._counts.device)
            self.exponent = exponent
            self._place(self._counts.device)
        self.low, self.high = low, high

    def _place(self, device: torch.device) -> None:
        self._counts = self._counts.to(device)
        self._inverse = torch.from_numpy(np.ldexp(1.0, -self.exponent).astype(np.float32)).to(device)
        self._first = (torch.arange(self.channels, dtype=torch.int32) * self.bins).to(device)


def _exponents(low: Floats, high: Floats, bins: int) -> Ints:
    """Return the least e >= LEAST_EXPONENT with trunc(high / 2^e) - trunc(low / 2^e) < bins and |index| < 2^INDEX_BITS: [C]"""
    span, size = high - low, np.maximum(np.abs(low), np.abs(high))
    # If e suffices, low..high spans less than bins + 1 widths. The search starts lower, in case the quotient is rounded up.
    from_span = np.where(span > 0, np.frexp(span / (bins + 1))[1] - 2, LEAST_EXPONENT)
    from_size = np.where(size > 0, np.frexp(size)[1] - INDEX_BITS, LEAST_EXPONENT)
    exponent = np.maximum(np.maximum(from_span, from_size), LEAST_EXPONENT).astype(np.int64)
    while True:
        wide = _index(high, exponent) - _index(low, exponent) >= bins
        if not wide.any():
            return exponent
        exponent = exponent + wide


def _index(x: Floats, exponent: Ints) -> Ints:
    index: Ints = np.trunc(np.ldexp(x, -exponent)).astype(np.int64)
    return index


def _window(low: Floats, exponent: Ints, bins: int) -> Ints:
    """Return the `bins` consecutive indices that start at the index of `low`: [C, bins]"""
    return _index(low, exponent)[:, None] + np.arange(bins)


def _widened(counts: Ints, low: Floats, before: Ints, after: Ints) -> Ints:
    """Merge counts [C, bins] of bins 2^before wide into bins 2^after wide (after >= before)."""
    channels, bins = counts.shape
    index = _window(low, before, bins)
    # A shift by 62 bits already makes every index 0.
    doublings = np.minimum(after - before, 62)[:, None]
    wider = np.sign(index) * (np.abs(index) >> doublings)
    position = (wider & (bins - 1)) + np.arange(channels)[:, None] * bins
    merged = np.zeros(channels * bins, np.int64)
    np.add.at(merged, position.reshape(-1), np.take_along_axis(counts, index & (bins - 1), 1).reshape(-1))
    return merged.reshape(channels, bins)


def squared_error(lower: Floats, upper: Floats, scale: float, lowest: int, highest: int) -> Floats:
    """Return the mean of (x - Q(x))^2 for x uniform in lower..upper, Q(x) = scale * clip(round(x / scale), lowest, highest).

    With u = x / scale and r its code, an antiderivative is r / 12 + (u - r)^3 / 3. It is continuous across codes and beyond
    the first and last one, so the result is exact for bins that span any number of codes. For a bin within one code the
    difference of cubes would lose precision, so the formula about the bin's middle is used instead.
    """
    a, b = lower / scale, upper / scale
    code_a, code_b = np.clip(np.rint(a), lowest, highest), np.clip(np.rint(b), lowest, highest)
    error: Floats = ((a + b) / 2 - code_a) ** 2 + (b - a) ** 2 / 12
    across = code_a != code_b  # few bins; the cubes are the slowest part
    a, b, code_a, code_b = a[across], b[across], code_a[across], code_b[across]
    error[across] = ((code_b - code_a) / 12 + ((b - code_b) ** 3 - (a - code_a) ** 3) / 3) / (b - a)
    error *= scale**2
    return error
