"""Compute the tables of the exponential that softmax reads.

A score x of b bits has one of 2^b distances max - x from the largest score of its row, so exp is a table of at most 2^b
integers: 256 for 8-bit scores.
The variants run as the same op: "table" rounds the exact exponential, "polynomial" evaluates the paper's I-Exp in integers at
these distances, and "coarse" evaluates I-Exp as the paper's code does.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fqvit.quant.qparams import level_bounds

Table = TypeVar("Table", NDArray[np.int32], NDArray[np.uint8])

ONE_BITS = 20  # exp(0) = 2^20: the last two log2 codes meet at a probability of about 2^-14.5, so 20 bits leave 5 to spare


def one_bits(tokens: int) -> int:
    """Return n such that exp(0) = 2^n: 20, or less if the sum of a row of `tokens` could exceed 2^30."""
    return min(ONE_BITS, 30 - math.ceil(math.log2(tokens)))


def exp_table(scale: float, codes: int, tokens: int) -> NDArray[np.int32]:
    """round(2^n * exp(-scale * d)) for d = 0 .. codes - 1, with n = one_bits(tokens)."""
    exact = np.exp(-scale * np.arange(codes)) * 2.0 ** one_bits(tokens)
    return _trimmed(np.floor(exact + 0.5).astype(np.int32))


def polynomial_table(scale: float, codes: int, tokens: int) -> NDArray[np.int32]:
    """The paper's I-Exp: exp(-p) = L(p') * 2^-z with L(x) = 0.3585 * (x + 1.353)^2 + 0.344.

    p = scale * d for d = 0 .. codes - 1, z = floor(p / ln 2), and p' = z * ln 2 - p, which is in (-ln 2, 0].
    Evaluated in integers: the scores are first shifted left so that ln 2 / scale is at least 2^15.
    See docs/explanation/numerics.md.
    """
    shift = max(0, math.ceil(math.log2(2**15 * scale / math.log(2))))
    fine = scale / 2**shift
    q = -np.arange(codes, dtype=np.int64) * 2**shift
    q_ln2, q_b, q_c = math.floor(math.log(2) / fine), math.floor(1.353 / fine), math.floor(0.344 / (0.3585 * fine * fine))
    z = -q // q_ln2
    p = q + z * q_ln2
    unit = q_b * q_b + q_c  # L at p = 0 in units of 0.3585 * fine^2
    values = [((int(p_) + q_b) ** 2 + q_c) * 2 ** one_bits(tokens) // unit >> int(z_) for p_, z_ in zip(p, z, strict=True)]
    return _trimmed(np.array(values, np.int32))


def coarse_table(scale: float, codes: int, tokens: int) -> NDArray[np.int32]:
    """I-Exp as the paper's code evaluates it: ln 2 and the coefficients are rounded to integer multiples of the score scale.

    exp(-p) = L(p') * 2^-z with L(x) = 0.35815147 * x^2 + 0.96963238 * x + 1, and p, z and p' as in polynomial_table, but with
    ceil(0.6931 / scale) * scale instead of ln 2: the paper's code rounds -0.6931 / scale down, and floor(-x) = -ceil(x).
    """
    a, b, c = 0.35815147, 0.96963238, 1.0
    q_ln2, q_b = -math.floor(-0.6931 / scale), math.floor(b / a / scale)
    # L at p = 0. The paper's code rounds it to 0 for scales above 1.67 and then returns NaN.
    q_c = max(1, math.floor(c / a / scale**2))
    values = []
    for d in range(codes):
        z, rest = divmod(d, q_ln2)
        values.append((rest * (rest - q_b) + q_c) * 2 ** one_bits(tokens) // q_c >> z)
    return _trimmed(np.array(values, np.int32))


EXP_TABLES = {"table": exp_table, "polynomial": polynomial_table, "coarse": coarse_table}  # keys: Recipe.exp


def level_table(scale: float, codes: int, levels: tuple[int, ...], masked: bool) -> NDArray[np.uint8]:
    """Return the code of the level nearest to exp(-scale * d) times the largest level, for d = 0 .. codes - 1.

    masked: append the code of the smallest level, which only masked positions read.
    """
    order, bounds = level_bounds(levels)
    table = order[np.searchsorted(bounds, np.exp(-scale * np.arange(codes)), side="right")]
    if masked:
        table = np.append(table, order[0])
    return _trimmed(table.astype(np.uint8))


def _trimmed(table: Table) -> Table:
    """Remove repetitions of the last entry: softmax reads the last entry for every distance beyond the table."""
    return table[: int(np.argmax(table == table[-1])) + 1]
