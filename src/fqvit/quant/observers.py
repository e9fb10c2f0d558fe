"""Observe a site: collect statistics of bounded size, and compute its range or PTF shifts from them.

Merging the observers of consecutive batches gives exactly the state of one observer of all batches. States are plain values
that workers can exchange (state, from_state). A site without data, or with NaN or infinity, is reported by name when the result
is requested. PTF: Power-of-Two Factor, see Ptf. See also: plan.py (which site has which observer), qparams.py (from ranges to
scales).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.errors import FqvitError
from fqvit.quant.histogram import Histogram, squared_error
from fqvit.quant.qparams import affine, symmetric
from fqvit.quant.quantile import tail

PTF_BINS = 512
OMSE_BINS = 8192
OMSE_STRIDE = 13  # every 13th element is counted, fewer if the channel count is a multiple of 13
SHRINK_STEPS = 90  # ranges shrunk by 0 to 89 percent are tried


class Observer(ABC):
    """Statistics of one site. batches, elements: how many were observed."""

    kinds: ClassVar[dict[str, type[Observer]]] = {}
    settings: ClassVar[tuple[str, ...]] = ()  # constructor arguments other than the site; part of the state

    def __init_subclass__(cls) -> None:
        Observer.kinds[cls.__name__] = cls

    def __init__(self, site: str) -> None:
        self.site = site
        self.batches = 0
        self.elements = 0
        self.finite = True

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Observe one calibration batch, float [..., C]."""
        if x.numel() == 0:
            return
        self.batches += 1
        self.elements += x.numel()
        self.finite = self._observe(x.float()) and self.finite

    def merge(self, later: Self) -> None:
        """Merge an observer that has seen the batches after those of this one."""
        assert type(self) is type(later) and self._settings() == later._settings()
        if later.batches == 0:
            return
        self._merge(later)
        self.batches += later.batches
        self.elements += later.elements
        self.finite = self.finite and later.finite

    def state(self) -> dict[str, Any]:
        """Return the state as plain values: NumPy arrays, numbers, strings, and dictionaries of these."""
        own = {"batches": self.batches, "elements": self.elements, "finite": self.finite}
        return {"kind": type(self).__name__, "site": self.site, "settings": self._settings(), **own, **self._state()}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Observer:
        """Create an observer of the right class from `state()`."""
        self = Observer.kinds[state["kind"]](state["site"], **state["settings"])
        self.batches, self.elements, self.finite = state["batches"], state["elements"], state["finite"]
        self._restore(state)
        return self

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.settings}

    def _check(self) -> None:
        if self.batches == 0:
            raise FqvitError(f"{self.site}: no calibration data. Pass at least one image.")
        if not self.finite:
            raise FqvitError(
                f"{self.site}: observed NaN or infinite values, expected finite ones. Check the weights and the images."
            )

    @abstractmethod
    def _observe(self, x: Tensor) -> bool:
        """Observe x, float32, not empty. Return False and keep nothing if a value is not finite."""

    @abstractmethod
    def _merge(self, later: Self) -> None: ...

    @abstractmethod
    def _state(self) -> dict[str, Any]: ...

    @abstractmethod
    def _restore(self, state: Mapping[str, Any]) -> None: ...


class RangeObserver(Observer):
    """An observer of a whole tensor whose result is one range."""

    def range(self) -> tuple[float, float]:
        """Return (low, high) with low <= 0 <= high; (0, 0) if all values were 0."""
        self._check()
        low, high = self._range()
        return min(low, 0.0), max(high, 0.0)

    @abstractmethod
    def _range(self) -> tuple[float, float]: ...


class MinMax(RangeObserver):
    """Minimum and maximum over all batches."""

    def __init__(self, site: str) -> None:
        super().__init__(site)
        self._low, self._high = math.inf, -math.inf

    def _observe(self, x: Tensor) -> bool:
        low, high = _extremes(x)
        if not (math.isfinite(low) and math.isfinite(high)):
            return False
        self._low, self._high = min(self._low, low), max(self._high, high)
        return True

    def _range(self) -> tuple[float, float]:
        return self._low, self._high

    def _merge(self, later: Self) -> None:
        self._low, self._high = min(self._low, later._low), max(self._high, later._high)

    def _state(self) -> dict[str, Any]:
        return {"range": np.array([self._low, self._high])}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._low, self._high = map(float, state["range"])


class Attended(MinMax):
    """The range of scores [..., T, T] that attention depends on: from the smallest row maximum minus REACH to the maximum.

    A softmax reads distances from the maximum of the row, and relative codes round a weight of exp(-REACH) or less to 0, so
    lower scores may saturate. Not for masked scores: the maximum of a row may be at a masked position.
    """

    # 4-bit weights are 0 from a distance of 7.7 (levels "curve") or 8.3 ("powers"); the remainder up to 10 is a margin for
    # rows whose maximum is lower than any seen in calibration.
    REACH: ClassVar[float] = 10.0

    def __init__(self, site: str) -> None:
        super().__init__(site)
        self._least_top = math.inf

    def _observe(self, x: Tensor) -> bool:
        finite = super()._observe(x)
        if finite:
            self._least_top = min(self._least_top, float(x.amax(-1).min()))
        return finite

    def _range(self) -> tuple[float, float]:
        return max(self._low, self._least_top - self.REACH), self._high

    def replace(self, low: float, least_top: float, high: float) -> None:
        """Replace the statistics: the minimum, the smallest row maximum, and the maximum."""
        self._low, self._least_top, self._high = low, least_top, high

    def _merge(self, later: Self) -> None:
        super()._merge(later)
        self._least_top = min(self._least_top, later._least_top)

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "least_top": self._least_top}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self._least_top = float(state["least_top"])


class Ema(RangeObserver):
    """Exponential moving average of the minimum and maximum b of each batch: v = (1 - momentum) * v + momentum * b.

    Only the latest batches are kept, as many as affect a float64 result (4,414 at momentum 0.01). The average starts with the
    oldest batch kept, so that the result depends only on the sequence of batches, not on how it is split between observers.
    """

    settings: ClassVar[tuple[str, ...]] = ("momentum",)

    def __init__(self, site: str, momentum: float = 0.01) -> None:
        super().__init__(site)
        if not 0.001 <= momentum <= 1:
            raise FqvitError(f"{site}: momentum {momentum}, expected 0.001 to 1. The usual value is 0.01.")
        self.momentum = momentum
        kept = 1 if momentum == 1 else math.ceil(64 * math.log(2) / -math.log1p(-momentum))
        self._recent: deque[tuple[float, float]] = deque(maxlen=kept)

    def _observe(self, x: Tensor) -> bool:
        low, high = self._batch_range(x)
        if not (math.isfinite(low) and math.isfinite(high)):
            return False
        self._recent.append((low, high))
        return True

    def _batch_range(self, x: Tensor) -> tuple[float, float]:
        return _extremes(x)

    def _range(self) -> tuple[float, float]:
        low, high = self._recent[0]
        for batch_low, batch_high in list(self._recent)[1:]:
            low = (1 - self.momentum) * low + self.momentum * batch_low
            high = (1 - self.momentum) * high + self.momentum * batch_high
        return low, high

    def _merge(self, later: Self) -> None:
        self._recent.extend(later._recent)

    def _state(self) -> dict[str, Any]:
        return {"recent": np.array(self._recent, np.float64).reshape(-1, 2)}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._recent.extend((float(low), float(high)) for low, high in state["recent"])


class Percentile(Ema):
    """Exponential moving average of the quantiles (1 - quantile, quantile) of each batch, interpolated linearly."""

    settings: ClassVar[tuple[str, ...]] = ("quantile", "momentum")

    def __init__(self, site: str, quantile: float = 0.99999, momentum: float = 0.01) -> None:
        super().__init__(site, momentum)
        if not 0.5 < quantile <= 1:
            raise FqvitError(f"{site}: quantile {quantile}, expected above 0.5 and at most 1. The usual value is 0.99999.")
        self.quantile = quantile

    def _batch_range(self, x: Tensor) -> tuple[float, float]:
        flat = x.reshape(-1)
        return tail(flat, self.quantile, largest=False), tail(flat, self.quantile, largest=True)


class Omse(MinMax):
    """Optimal mean squared error: the MinMax range, shrunk by the 0 to 89 percent that minimize ||x - Q(x)||^2 at `bits` bits.

    The range uses all elements; the error uses a histogram of about every 13th element of all batches, or of the last one only.
    """

    settings: ClassVar[tuple[str, ...]] = ("bits", "last_batch")

    def __init__(self, site: str, bits: int = 8, last_batch: bool = False) -> None:
        super().__init__(site)
        self.bits = bits
        self.last_batch = last_batch
        self._histogram = Histogram(1, OMSE_BINS)

    def _observe(self, x: Tensor) -> bool:
        if not super()._observe(x):
            return False
        stride = OMSE_STRIDE
        while math.gcd(stride, x.shape[-1]) > 1:  # with a common factor, some channels would never be sampled
            stride += 1
        sample = x.reshape(-1)[::stride].contiguous()
        if self.last_batch:
            self._histogram = Histogram(1, OMSE_BINS)
        low, high = _extremes(sample)
        self._histogram.observe(sample[:, None], np.array([low]), np.array([high]))
        return True

    def _range(self) -> tuple[float, float]:
        low, high = min(self._low, 0.0), max(self._high, 0.0)
        if low == high:
            return low, high
        lower, upper, counts = (part[0] for part in self._histogram.edges())
        lower, upper, counts = (part[counts > 0] for part in (lower, upper, counts))
        levels = 2**self.bits - 1
        errors = []
        for percent in range(SHRINK_STEPS):
            scale = (high - low) * (1 - percent / 100) / levels
            zero = round(-low * (1 - percent / 100) / scale)
            errors.append(float(counts @ squared_error(lower, upper, scale, -zero, levels - zero)))
        shrink = 1 - int(np.argmin(errors)) / 100
        return low * shrink, high * shrink

    def _merge(self, later: Self) -> None:
        super()._merge(later)
        if self.last_batch:
            self._histogram = Histogram.from_state(later._histogram.state())
        else:
            self._histogram.merge(later._histogram)

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "histogram": self._histogram.state()}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self._histogram = Histogram.from_state(state["histogram"])


@dataclass(frozen=True)
class PtfResult:
    """x[..., c] ~ (code - zero) * 2^alpha[c] * scale   alpha: uint8 [C]"""

    scale: float
    zero: int
    alpha: NDArray[np.uint8]


class Ptf(Observer):
    """Power-of-Two Factor: one scale and zero point per tensor, one shift alpha in 0..k per channel.

    scale = (max - min) / (2^bits - 1) / 2^k and zero = clip(round(-min / (2^k * scale))) over all batches, min <= 0 <= max.
    alpha minimizes the channel's squared error including saturation, from a histogram of all batches or of the last one only.
    symmetric: scale = max |x| / (2^(bits-1) - 1) / 2^k instead, and zero is the middle code.
    """

    settings: ClassVar[tuple[str, ...]] = ("bits", "k", "last_batch", "symmetric")

    def __init__(self, site: str, bits: int = 8, k: int = 3, last_batch: bool = False, symmetric: bool = False) -> None:
        super().__init__(site)
        self.bits = bits
        self.k = k
        self.last_batch = last_batch
        self.symmetric = symmetric
        self._low, self._high = math.inf, -math.inf
        self._histogram: Histogram | None = None

    def _observe(self, x: Tensor) -> bool:
        rows = x.reshape(-1, x.shape[-1])
        low, high = channel_extremes(rows)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            return False
        self._low, self._high = min(self._low, float(low.min())), max(self._high, float(high.max()))
        if self._histogram is None or self.last_batch:
            self._histogram = Histogram(rows.shape[1], PTF_BINS)
        self._histogram.observe(rows, low, high)
        return True

    def result(self) -> PtfResult:
        """Compute scale, zero point and shifts. A site whose values are all 0 gets the range 0..1, so that scale > 0."""
        self._check()
        assert self._histogram is not None
        low, high = min(self._low, 0.0), max(self._high, 0.0)
        if low == high:
            high = 1.0
        q = (symmetric if self.symmetric else affine)(low, high, self.bits)
        scale, zero = float(q.scale[0]) / 2**self.k, int(q.zero[0])
        lower, upper, counts = self._histogram.edges()
        used = np.nonzero(counts)
        lower, upper = lower[used], upper[used]
        errors = []
        for alpha in range(self.k + 1):
            error = np.zeros(counts.shape)
            error[used] = squared_error(lower, upper, scale * 2**alpha, -zero, q.last - zero)
            errors.append((counts * error).sum(1))
        return PtfResult(scale, zero, np.argmin(errors, 0).astype(np.uint8))

    def _merge(self, later: Self) -> None:
        self._low, self._high = min(self._low, later._low), max(self._high, later._high)
        if later._histogram is None:
            return
        if self._histogram is None or self.last_batch:
            self._histogram = Histogram.from_state(later._histogram.state())
        else:
            self._histogram.merge(later._histogram)

    def _state(self) -> dict[str, Any]:
        histogram = None if self._histogram is None else self._histogram.state()
        return {"range": np.array([self._low, self._high]), "histogram": histogram}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._low, self._high = map(float, state["range"])
        self._histogram = None if state["histogram"] is None else Histogram.from_state(state["histogram"])


def channel_extremes(rows: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the minimum and maximum per channel of rows [R, C]: float64 [C] each; NaN if a channel has a NaN."""
    low, high = (part.cpu().numpy().astype(np.float64) for part in (rows.amin(0), rows.amax(0)))
    return low, high


def _extremes(x: Tensor) -> tuple[float, float]:
    """Return the minimum and maximum of all elements; NaN if there is a NaN."""
    low, high = torch.aminmax(x)
    return float(low), float(high)
