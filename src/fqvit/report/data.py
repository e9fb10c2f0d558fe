"""What the pictures show, as plain values and the figures that follow from them. numpy only; draws nothing, runs nothing.

Neighbours: collect.py (fills these from a float model and images), plots.py (draws them), answers.py (classes and accuracy).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

BINS = 16  # of 4 bits, uniform and log2
FINE = 4  # bars an octave in the histogram of attention
OCTAVES = 24  # below 2^-24 everything is in the last bar


@dataclass(frozen=True)
class ChannelRanges:
    """Of one LayerNorm's input, over all tokens of all images. lo, hi: float64 [C], least and greatest value of a channel."""

    norm: str
    lo: Floats
    hi: Floats

    @property
    def ranges(self) -> Floats:
        return self.hi - self.lo

    @property
    def ratio(self) -> float:
        """The widest channel's range over the median one's: what the paper calls inter-channel variation."""
        median = float(np.median(self.ranges))
        return float(self.ranges.max()) / median if median > 0 else math.inf


@dataclass(frozen=True)
class Box:
    """Quartiles; low and high: the outermost values within 1.5 (q3 - q1) of the box (Tukey); outliers: the values beyond."""

    low: float
    q1: float
    median: float
    q3: float
    high: float
    outliers: Floats


def box(values: Floats) -> Box:
    q1, median, q3 = (float(q) for q in np.quantile(values, (0.25, 0.5, 0.75)))
    reach = 1.5 * (q3 - q1)
    inside = (values >= q1 - reach) & (values <= q3 + reach)
    return Box(float(values[inside].min()), q1, median, q3, float(values[inside].max()), np.sort(values[~inside]))


@dataclass(frozen=True)
class AttentionCounts:
    """How many attention values (softmax outputs, masked places left out) lie where.

    fine: [FINE OCTAVES + 1], bar i has 2^(-(i+1) / FINE) < p <= 2^(-i / FINE), the last what is smaller
    uniform: [16], bin floor(16 p) (p = 1 in the last)   log2: [16], code of the paper's 4-bit Log-Int-Softmax
    below: [16], the log2 codes of the values below 1/16 alone
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
        """Of all values, those below 1/16: exactly the first uniform bin."""
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
    """Bins with anything in them."""
    return int(np.count_nonzero(counts))


def entropy(counts: Counts) -> float:
    """Bits of information in a code: -sum p log2 p. At most 4 for 16 bins; 0 where one bin has everything."""
    shares = counts[counts > 0] / max(int(counts.sum()), 1)
    return float(-(shares * np.log2(shares)).sum()) + 0.0  # -0.0 reads badly


def fine_bins(p: NDArray[np.float32]) -> Counts:
    """The histogram AttentionCounts.fine of any array of values in 0..1."""
    last = FINE * OCTAVES
    place = np.floor(-FINE * np.log2(np.maximum(p, 2.0**-40, dtype=np.float32))).astype(np.int64)
    return np.bincount(np.clip(place, 0, last).ravel(), minlength=last + 1)


def uniform_bins(p: NDArray[np.float32]) -> Counts:
    return np.bincount(np.clip((p * BINS).astype(np.int64), 0, BINS - 1).ravel(), minlength=BINS)


@dataclass(frozen=True)
class QuantizedMap:
    """One way to store attention. map: float32 [rows, columns]; decibels: of all attention in the layer, against float."""

    method: str
    bits: int
    map: NDArray[np.float32]
    decibels: float


@dataclass(frozen=True)
class AttentionMaps:
    """What one image's tokens look at, in float and stored in other ways. exact: float32 [rows, columns] of patches.

    kind: "class token" (what the class token looks at, mean over heads) or "received" (how much each patch is looked at, mean
    over heads and over the queries of its window, for models without a class token).
    """

    site: str
    kind: str
    pixels: NDArray[np.uint8]
    exact: NDArray[np.float32]
    stored: Sequence[QuantizedMap]


# The paper prints the first, its code has the second; only the second has the gap that the paper quotes (1.9e-3).
POLYNOMIALS = {
    "paper": (0.3585, 2 * 0.3585 * 1.353, 0.3585 * 1.353**2 + 0.344),
    "code": (0.35815147, 0.96963238, 1.0),
}


def i_exp(x: Floats, kind: str) -> Floats:
    """I-Exp for x <= 0: L(p) 2^-z with z = floor(-x / ln 2), p = x + z ln 2 in (-ln 2, 0], L(p) = a p^2 + b p + c."""
    a, b, c = POLYNOMIALS[kind]
    z = np.floor(-x / math.log(2))
    p = x + z * math.log(2)
    found: Floats = (a * p * p + b * p + c) * np.exp2(-z)
    return found


@dataclass(frozen=True)
class ExpCurves:
    """x: float64 [P], from 0 down; curves: {polynomial: I-Exp [P]}; gaps: {polynomial: largest |I-Exp - exp| over all x <= 0}.

    tables: {kind: largest |table - exp|} of the integer tables (quant/exptable.py) at the scores' step `step`.
    """

    x: Floats
    curves: dict[str, Floats]
    gaps: dict[str, float]
    step: float
    tables: dict[str, float]


def exp_curves(step: float, codes: int = 256, tokens: int = 197) -> ExpCurves:
    """step: what one code of the scores is worth."""
    x = np.linspace(-4, 0, 401)
    dense = np.linspace(-math.log(2), 0, 200_001)  # later pieces are this one, halved again and again
    gaps = {kind: float(np.abs(i_exp(dense, kind) - np.exp(dense)).max()) for kind in POLYNOMIALS}
    tables = {kind: table_gap(kind, step, codes, tokens) for kind in ("table", "polynomial", "coarse")}
    return ExpCurves(x, {kind: i_exp(x, kind) for kind in POLYNOMIALS}, gaps, step, tables)


def table_gap(kind: str, step: float, codes: int, tokens: int) -> float:
    """The largest |entry / 2^one - exp(-step d)| over d = 0 .. codes - 1."""
    from fqvit.quant.exptable import EXP_TABLES, one_bits  # late: it brings in torch

    table = EXP_TABLES[kind](step, codes, tokens)
    entries = table[np.minimum(np.arange(codes), len(table) - 1)] / 2.0 ** one_bits(tokens)
    return float(np.abs(entries - np.exp(-step * np.arange(codes))).max())
