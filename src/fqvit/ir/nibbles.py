"""4-bit weights, two a byte: how a Linear with `group` stores them, and the int8 weights that they are.

A weight is code * 2^exponent, the code 4-bit two's complement, one exponent for `group` weights of a row in turn. That is
always an int8, so kernels never see packed weights: they are unpacked once, before a program runs (Program.unpacked).

Letters: O outputs, K inputs, G = ceil(K / group).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fqvit.ir.value import Scope

MAX_EXPONENT = 4  # -8 * 2^4 is the last one in an int8
MAX_GROUP = 2**16


def pack(w: NDArray[np.int8], exponent: NDArray[np.uint8], group: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """w i8 [O, K], each code * 2^exponent, and exponent u8 [O, G] -> u8 [O, ceil(K / 2)] and u8 [O, ceil(G / 2)]."""
    shift = exponent[:, _groups(w.shape[1], group)].astype(np.int8)
    codes = w >> shift
    assert int(exponent.max()) <= MAX_EXPONENT and -8 <= int(codes.min()) and int(codes.max()) <= 7
    assert bool((codes * (1 << shift) == w).all())
    return _join((codes & 15).astype(np.uint8)), _join(exponent)


def unpack(codes: NDArray[np.uint8], exponents: NDArray[np.uint8], inputs: int, group: int) -> NDArray[np.int8]:
    """The inverse of pack: i8 [O, K]. K is given, because an odd one leaves no trace in the packed shape."""
    groups = _groups(inputs, group)
    signed = (_split(codes, inputs) ^ 8).astype(np.int8) - np.int8(8)  # two's complement
    factors = np.left_shift(1, _split(exponents, int(groups[-1]) + 1)).astype(np.int8)
    unpacked: NDArray[np.int8] = signed * factors[:, groups]
    return unpacked


def packed_weights(scope: Scope, codes: str, exponents: str, inputs: int, group: int) -> NDArray[np.int8]:
    """The weights in two constants of a program, i8 [O, K]; refuses what pack would not write."""
    scope.check(2 <= group <= MAX_GROUP, f"group is {group}, expected 0 or 2 to {MAX_GROUP}")
    groups = -(-inputs // group)
    low = scope.constant(codes, ("u8",), (None, -(-inputs // 2)))
    high = scope.constant(exponents, ("u8",), (len(low), -(-groups // 2)))
    for name, array, count in ((codes, low, inputs), (exponents, high, groups)):
        scope.check(count % 2 == 0 or int(array[:, -1].max()) < 16, f"constant {name!r} has a spare nibble that is not 0")
    largest = int(_split(high, groups).max())
    scope.check(largest <= MAX_EXPONENT, f"constant {exponents!r} has exponent {largest}, expected 0 to {MAX_EXPONENT}")
    return unpack(low, high, inputs, group)


def _groups(inputs: int, group: int) -> NDArray[np.intp]:
    """The group of every input."""
    return np.arange(inputs) // group


def _join(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[O, n], each below 16 -> [O, ceil(n / 2)]: even places in the low nibble, a spare last one 0."""
    even = np.pad(values, ((0, 0), (0, values.shape[1] % 2)))
    joined: NDArray[np.uint8] = even[:, ::2] | even[:, 1::2] << np.uint8(4)
    return joined


def _split(packed: np.ndarray[Any, Any], count: int) -> NDArray[np.uint8]:
    """The inverse of _join, of `count` values a row."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)[:, :count]
