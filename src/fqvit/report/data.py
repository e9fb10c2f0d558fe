"""Data of the report's figures as plain values, and the statistics computed from them. Only exp_curves needs torch.

See also: collect.py (fills them from a float model and images), plots.py (draws them), predictions.py (classes and accuracy).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

BINS = 16  # number of 4-bit codes, both uniform and log2
FINE = 4  # bars per octave in the histogram of attention values
OCTAVES = 24  # values below 2^-24 are counted in the last bar


@dataclass(frozen=True)
class ChannelRanges:
    """Input of one LayerNorm over all tokens of all images. lo, hi: float64 [C], minimum and maximum of each channel."""

    norm: str
    lo: Floats
    hi: Floats

    @property
    def ranges(self) -> Floats:
        return self.hi - self.lo

    @property
    def ratio(self) -> float:
        """The widest range over the median range of all channels: the paper's measure of inter-channel variation."""
        median = float(np.median(self.ranges))
        return float(self.ranges.max()) / median if median > 0 else math.inf


@dataclass(frozen=True)
class Box:
    """A box plot: quartiles; low, high: the outermost values within 1.5 * (q3 - q1) of the box (Tukey); outliers: the rest."""

    low: float
    q1: float
    median: float
    q3: float
    high: float
    outliers: Floats


def box(values: Floats) -> Box:
    """Summarize values [n], n >= 1."""
    q1, median, q3 = (float(q) for q in np.quantile(values, (0.25, 0.5, 0.75)))
    reach = 1.5 * (q3 - q1)
    inside = (values >= q1 - reach) & (values <= q3 + reach)
    return Box(float(values[inside].min()), q1, median, q3, float(values[inside].max()), np.sort(values[~inside]))


@dataclass(frozen=True)
class AttentionCounts:
    """Histograms of attention values p (softmax outputs without masked positions).

    fine: [FINE * OCTAVES + 1], bar i counts 2^(-(i+1) / FINE) < p <= 2^(-i / FINE), the last bar counts all smaller values
    uniform: [16], bin floor(16 * p), with p = 1 in the last bin   log2: [16], code of the paper's 4-bit Log-Int-Softmax
    below: [16], log2 codes of the values below 1/16 only
    """

    fine: Counts
    uniform: Counts
    log2: Counts
    below: Counts
    images: int

    @property
    def total(self) -> int:
        return int(self.uniform.sum())

    @property
    def share_below(self) -> float:
        """The share of values below 1/16, that is, in the first uniform bin."""
        return float(self.uniform[0]) / max(self.total, 1)

    def __add__(self, other: AttentionCounts) -> AttentionCounts:
        return AttentionCounts(
            self.fine + other.fine,
            self.uniform + other.uniform,
            self.log2 + other.log2,
            self.below + other.below,
            self.images + other.images,
        )


def used(counts: Counts) -> int:
    """Return the number of bins that are not empty."""
    return int(np.count_nonzero(counts))


def entropy(counts: Counts) -> float:
    """Return the entropy of a code in bits: -sum(p * log2(p)). At most 4 for 16 bins; 0 if all values are in one bin."""
    shares = counts[counts > 0] / max(int(counts.sum()), 1)
    return float(-(shares * np.log2(shares)).sum()) + 0.0  # avoids printing -0.0


def fine_bins(p: NDArray[np.float32]) -> Counts:
    """Count values in 0..1, of any shape, in the bars of AttentionCounts.fine."""
    last = FINE * OCTAVES
    index = np.floor(-FINE * np.log2(np.maximum(p, 2.0**-40, dtype=np.float32))).astype(np.int64)
    return np.bincount(np.clip(index, 0, last).ravel(), minlength=last + 1)


def uniform_bins(p: NDArray[np.float32]) -> Counts:
    """Count values in 0..1, of any shape, in the bins of AttentionCounts.uniform."""
    return np.bincount(np.clip((p * BINS).astype(np.int64), 0, BINS - 1).ravel(), minlength=BINS)


@dataclass(frozen=True)
class QuantizedMap:
    """An attention map in one integer format, decoded to float32 [rows, columns].

    decibels: signal-to-noise ratio of the whole layer against float
    """

    method: str
    bits: int
    map: NDArray[np.float32]
    decibels: float


@dataclass(frozen=True)
class AttentionMaps:
    """Attention of one image in float and in several integer formats.

    pixels: u8 [H, W, C]   float_map: float32 [rows, columns] of patches   stored: the same map in integer formats
    kind: "class token" or "first token" (attention of this token, averaged over heads) or "received" (attention that each
    patch receives, averaged over heads and summed over the queries of its window; if no token precedes the patches)
    """

    site: str
    kind: str
    pixels: NDArray[np.uint8]
    float_map: NDArray[np.float32]
    stored: Sequence[QuantizedMap]


# Coefficients as printed in the paper, and as in its code. Only the latter have the error that the paper quotes (1.9e-3).
POLYNOMIALS = {
    "paper": (0.3585, 2 * 0.3585 * 1.353, 0.3585 * 1.353**2 + 0.344),
    "code": (0.35815147, 0.96963238, 1.0),
}


def i_exp(x: Floats, kind: str) -> Floats:
    """Evaluate I-Exp for x <= 0: L(p) * 2^-z, where L(p) = a * p^2 + b * p + c.

    z = floor(-x / ln 2), and p = x + z * ln 2 is in (-ln 2, 0].
    """
    a, b, c = POLYNOMIALS[kind]
    z = np.floor(-x / math.log(2))
    p = x + z * math.log(2)
    found: Floats = (a * p * p + b * p + c) * np.exp2(-z)
    return found


@dataclass(frozen=True)
class ExpCurves:
    """I-Exp next to exp. x: float64 [P], increasing to 0; curves: {polynomial: I-Exp(x) [P]}.

    gaps: {polynomial: largest |I-Exp - exp| over all x <= 0}
    tables: {kind: largest |table - exp|} of the integer tables in quant/exptable.py
    scale: scale of the scores
    """

    x: Floats
    curves: dict[str, Floats]
    gaps: dict[str, float]
    scale: float
    tables: dict[str, float]


def exp_curves(scale: float, codes: int = 256, tokens: int = 197) -> ExpCurves:
    """Evaluate the curves. scale: scale of the scores; codes: entries per table; tokens: length of a softmax row."""
    x = np.linspace(-4, 0, 401)
    dense = np.linspace(-math.log(2), 0, 200_001)  # for smaller x, errors repeat with factors 1/2, 1/4, ...
    gaps = {kind: float(np.abs(i_exp(dense, kind) - np.exp(dense)).max()) for kind in POLYNOMIALS}
    tables = {kind: table_gap(kind, scale, codes, tokens) for kind in ("table", "polynomial", "coarse")}
    return ExpCurves(x, {kind: i_exp(x, kind) for kind in POLYNOMIALS}, gaps, scale, tables)


def table_gap(kind: str, scale: float, codes: int, tokens: int) -> float:
    """Return the largest |table[d] / 2^one_bits(tokens) - exp(-scale * d)| over d = 0 .. codes - 1."""
    from fqvit.quant.exptable import EXP_TABLES, one_bits  # imports torch

    table = EXP_TABLES[kind](scale, codes, tokens)
    entries = table[np.minimum(np.arange(codes), len(table) - 1)] / 2.0 ** one_bits(tokens)
    return float(np.abs(entries - np.exp(-scale * np.arange(codes))).max())
