"""Fixed-point primitives: the only arithmetic that integer programs use.

The code uses only operators that numpy arrays and torch tensors share, so it runs on both. Arrays are int64.
`multiplier` encodes a real ratio as integers at lowering time; no other function here takes a float.
"""

from __future__ import annotations

import math
from typing import Any

# An int64 numpy array or torch tensor. A function returns the kind that it was given.
Array = Any

MULT_BITS = 31
MAX_SHIFT = 62


def requantize(acc: Array, mult: Array, shift: Array) -> Array:
    """floor(acc * mult / 2^shift + 1/2): one rounding, ties up.

    |acc| < 2^31, 0 <= mult < 2^31 and 1 <= shift <= 62, so the product plus 2^(shift - 1), the rounding term, fits in int64.
    """
    return round_shift(acc * mult, shift)


def round_shift(x: Array, shift: Array) -> Array:
    """floor(x / 2^shift + 1/2) for shift >= 1."""
    # `shift * 0 + 1` has the type of `shift`, which may be an array. >> rounds negative int64 values down.
    return (x + (shift * 0 + 1 << (shift - 1))) >> shift


def multiplier(ratio: float) -> tuple[int, int]:
    """Return (mult, shift) such that mult / 2^shift is nearest to `ratio`, with mult in [2^30, 2^31) and shift in 1..62.

    A ratio too small for shift 62 becomes (0, 62): an accumulator times that ratio is below half a code.
    """
    if not 0 <= ratio < 2.0 ** (MULT_BITS - 1):
        raise ValueError(f"ratio {ratio} is outside [0, 2^30)")
    mantissa, exponent = math.frexp(ratio)  # ratio = mantissa * 2^exponent, mantissa in [1/2, 1), or 0
    mult, shift = round(mantissa * 2**MULT_BITS), MULT_BITS - exponent
    if mult == 2**MULT_BITS:
        mult, shift = (mult // 2, shift - 1) if shift > 1 else (mult - 1, shift)
    return (0, MAX_SHIFT) if mult == 0 or shift > MAX_SHIFT else (mult, shift)


def ilog2(x: Array) -> Array:
    """floor(log2(x)) for x >= 1: the index of the highest set bit."""
    index = x * 0
    for step in (32, 16, 8, 4, 2, 1):
        high = (x >> step > 0) * step
        index = index + high
        x = x >> high
    return index


def ilog2_round(x: Array) -> Array:
    """log2 of x >= 1, rounded up if the bit below the highest set bit is 1, that is from mantissa 1.5 on: 3500 -> 12.

    This is the paper's Find_First_One plus the next bit.
    """
    top = ilog2(x)
    # x * 2 has a bit below its highest one even for x = 1, where that bit is 0.
    return top + ((x * 2 >> top) & 1)


def isqrt(x: Array) -> Array:
    """floor(sqrt(x)) for 0 <= x < 2^62, computed one bit at a time."""
    root = x * 0
    for bit in range(30, -1, -1):
        trial = root + (1 << bit)
        root = root + (trial * trial <= x) * (1 << bit)
    return root


def round_divide(numerator: Array, denominator: Array) -> Array:
    """floor(numerator / denominator + 1/2) for denominator > 0: one rounding, ties up."""
    return (numerator + denominator // 2) // denominator
