"""Powers of two in fixed point, from three integer tables; softmax and sigmoid of base-2 logits.

No floats are used: the tables are computed from integer square roots with 120 fraction bits.
See also: float/proposals.py, the same in float.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.fixed.constants import LOG_FRACTION, MASK_FRACTION, SCORE_FRACTION
from fqvit.ir.fixed import round_divide, round_shift

Integers = NDArray[np.int64]
MANTISSA_FRACTION = 30  # mantissas are in units of 2^-30
TABLE_BITS = LOG_FRACTION // 3  # each of the three tables is indexed by a third of the fraction bits
LOWEST = -64 << LOG_FRACTION  # lower exponents are clamped to this one, whose power rounds to 0 in units of 2^-30


def _table(bits: int) -> Integers:
    """Return 2^(i / 2^bits) for i < 512 in units of 2^-30, i64 [512], rounded to nearest."""
    exact = 120
    step = 2 << exact
    for _ in range(bits):
        step = math.isqrt(step << exact)
    power, values = 1 << exact, []
    for _ in range(1 << TABLE_BITS):
        values.append(int(round_shift(power, exact - MANTISSA_FRACTION)))
        power = power * step >> exact
    return np.array(values, np.int64)


HIGH, MIDDLE, LOW = _table(TABLE_BITS), _table(2 * TABLE_BITS), _table(3 * TABLE_BITS)


def power_of_two(x: Integers) -> tuple[Integers, Integers]:
    """Return (mantissa, exponent) with 2^x = mantissa * 2^exponent and 1 <= mantissa < 2.

    x: in units of 2^-27   mantissa: in units of 2^-30
    The relative error is below 5 units of 2^-31: three table entries and two roundings, each off by at most half a unit of
    2^-30 relative to a number of at least 1. Products of two mantissas are below 2^62.
    """
    mask = (1 << TABLE_BITS) - 1
    mantissa = round_shift(HIGH[x >> 2 * TABLE_BITS & mask] * MIDDLE[x >> TABLE_BITS & mask], MANTISSA_FRACTION)
    mantissa = round_shift(mantissa * LOW[x & mask], MANTISSA_FRACTION)
    return np.minimum(mantissa, (2 << MANTISSA_FRACTION) - 1), x >> LOG_FRACTION


def power_below_one(x: Integers) -> Integers:
    """Return 2^x in units of 2^-30, for x <= 0 in units of 2^-27, with an error of at most 3.5 units."""
    mantissa, exponent = power_of_two(np.maximum(x, LOWEST))
    # round_shift needs a shift of at least 1. The mantissa is below 2^31, so it can be doubled.
    return np.asarray(round_shift(mantissa * 2, np.minimum(1 - exponent, 62)))


def softmax(logits: Integers) -> Integers:
    """Softmax of base-2 logits over the last axis. Logits are in units of 2^-27, scores in units of 2^-24.

    Requires |logits| < 2^61 and fewer than 2^32 logits per row.
    """
    power = power_below_one(logits - logits.max(-1, keepdims=True))
    return np.asarray(round_divide(power << SCORE_FRACTION, power.sum(-1, keepdims=True)))


def sigmoid(logits: Integers) -> Integers:
    """Sigmoid of base-2 logits. Logits are in units of 2^-27, results in units of 2^-15. Requires |logits| <= 2^62.

    sigmoid(-x) = 1 - sigmoid(x) except for rounding ties.
    """
    power = power_below_one(-np.abs(logits))
    top = np.where(logits < 0, power, 1 << MANTISSA_FRACTION)
    return np.asarray(round_divide(top << MASK_FRACTION, power + (1 << MANTISSA_FRACTION)))
