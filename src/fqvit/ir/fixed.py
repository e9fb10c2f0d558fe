"""Fixed-point primitives: the only arithmetic that integer programs use.

Written with operators that numpy arrays and torch tensors share, so one text serves both; arrays are int64 inside.
Encoding a real ratio as integers happens at lowering time, in `multiplier`; nothing else here sees a float.
"""

from __future__ import annotations

import math
from typing import Any

# numpy arrays or torch tensors of int64; both sides of every function use the same kind.
Array = Any

MULT_BITS = 31
MAX_SHIFT = 62


def requantize(acc: Array, mult: Array, shift: Array) -> Array:
    """floor(acc * mult / 2^shift + 1/2): one rounding, ties up.

    |acc| < 2^31 and 0 <= mult < 2^31, so the product and the half (shift <= 62) together stay inside int64.
    """
    return round_shift(acc * mult, shift)


def round_shift(x: Array, shift: Array) -> Array:
    """floor(x / 2^shift + 1/2) for shift >= 1."""
    # 1 << n is written on the shift's own type, so that arrays of shifts work too; >> of a negative int64 floors.
    return (x + (shift * 0 + 1 << (shift - 1))) >> shift


def multiplier(ratio: float) -> tuple[int, int]:
    """(mult, shift) with mult / 2^shift nearest to `ratio`, mult in [2^30, 2^31), shift in 1..62.

    A ratio too small for shift 62 becomes (0, 62): whatever it scales is below half a code.
    """
    if not 0 <= ratio < 2.0 ** (MULT_BITS - 1):
        raise ValueError(f"ratio {ratio} is outside [0, 2^30)")
    mantissa, exponent = math.frexp(ratio)  # ratio = mantissa 2^exponent, mantissa in [1/2, 1), or 0
    mult, shift = round(mantissa * 2**MULT_BITS), MULT_BITS - exponent
    if mult == 2**MULT_BITS:
        mult, shift = (mult // 2, shift - 1) if shift > 1 else (mult - 1, shift)
    return (0, MAX_SHIFT) if mult == 0 or shift > MAX_SHIFT else (mult, shift)


def ilog2(x: Array) -> Array:
    """The index of the highest set bit of x >= 1 (0 for 1): floor(log2 x)."""
    index = x * 0
    for step in (32, 16, 8, 4, 2, 1):
        high = (x >> step > 0) * step
        index = index + high
        x = x >> high
    return index


def ilog2_round(x: Array) -> Array:
    """log2 of x >= 1 rounded by the bit below the highest (at mantissa 1.5), as in the paper's Find_First_One: 3500 -> 12."""
    top = ilog2(x)
    # x * 2 gives x = 1 a lower bit of 0 without a special case.
    return top + ((x * 2 >> top) & 1)


def isqrt(x: Array) -> Array:
    """floor(sqrt(x)) for 0 <= x < 2^62, one binary digit at a time."""
    root = x * 0
    for bit in range(30, -1, -1):
        trial = root + (1 << bit)
        root = root + (trial * trial <= x) * (1 << bit)
    return root


def round_divide(numerator: Array, denominator: Array) -> Array:
    """floor(numerator / denominator + 1/2) for denominator > 0: rounded once, ties up."""
    return (numerator + denominator // 2) // denominator
