"""Pack and unpack narrow weights: codes of 2 to 7 bits, optionally with one exponent per group of weights.

    w[o, k] = code[o, k] * 2^exponent[o, k // group],   exponent in 0..8 - width; without groups, w[o, k] = code[o, k]

A code is in two's complement. Code k occupies the bits k * width .. k * width + width - 1 of its row, where bit b is bit
b mod 8 of byte b // 8; exponents are stored in the same way in 4 bits each. Every such weight fits int8. Kernels never see
packed weights: they are unpacked once, before a program runs (Program.unpacked). O outputs, K inputs, G = ceil(K / group)
groups per row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fqvit.ir.value import MAX_ELEMENTS, Scope

MIN_WIDTH, MAX_WIDTH = 2, 7
GROUP_WIDTH = 4  # bits of codes with groups if an op does not specify a width
EXPONENT_BITS = 4
MAX_GROUP = 2**16


def max_exponent(width: int) -> int:
    """Return the largest exponent: the smallest code times its power of two is -128, the smallest int8."""
    return 8 - width


def row_bytes(count: int, width: int) -> int:
    """Return the number of bytes of `count` values of `width` bits."""
    return -(-count * width // 8)


def pack(
    w: NDArray[np.int8], exponent: NDArray[np.uint8], group: int, width: int = GROUP_WIDTH
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Pack weights i8 [O, K] and exponents u8 [O, G]; both results are u8 with one row per output."""
    shift = exponent[:, _groups(w.shape[1], group)].astype(np.int8)
    codes = w >> shift
    assert int(exponent.max()) <= max_exponent(width)
    assert bool((codes * (1 << shift) == w).all())
    return pack_codes(codes, width), _join(exponent, EXPONENT_BITS)


def pack_codes(codes: NDArray[np.int8], width: int) -> NDArray[np.uint8]:
    """Pack weights without groups, i8 [O, K] -> u8 [O, ceil(K * width / 8)]."""
    assert -(2 ** (width - 1)) <= int(codes.min()) and int(codes.max()) < 2 ** (width - 1)
    return _join((codes & (2**width - 1)).astype(np.uint8), width)


def unpack(
    codes: NDArray[np.uint8], exponents: NDArray[np.uint8], inputs: int, group: int, width: int = GROUP_WIDTH
) -> NDArray[np.int8]:
    """Invert `pack`: return weights i8 [O, K]. inputs: K, which the packed shape does not determine."""
    groups = _groups(inputs, group)
    factors = np.left_shift(1, _split(exponents, int(groups[-1]) + 1, EXPONENT_BITS)).astype(np.int8)
    unpacked: NDArray[np.int8] = unpack_codes(codes, inputs, width) * factors[:, groups]
    return unpacked


def unpack_codes(codes: NDArray[np.uint8], inputs: int, width: int) -> NDArray[np.int8]:
    """Invert `pack_codes`: return weights i8 [O, K]."""
    sign = 2 ** (width - 1)
    signed: NDArray[np.int8] = (_split(codes, inputs, width) ^ np.uint8(sign)).astype(np.int8) - np.int8(sign)
    return signed


def packed_weights(scope: Scope, codes: str, exponents: str, inputs: int, group: int, width: int) -> NDArray[np.int8]:
    """Unpack the constants `codes` and, with a group, `exponents` to weights i8 [O, K].

    Rejects constants that `pack` and `pack_codes` cannot produce.
    """
    scope.check(group == 0 or 2 <= group <= MAX_GROUP, f"group is {group}, expected 0 or 2 to {MAX_GROUP}")
    scope.check(MIN_WIDTH <= width <= MAX_WIDTH, f"width is {width}, expected 0 or {MIN_WIDTH} to {MAX_WIDTH}")
    packed_codes = scope.constant(codes, ("u8",), (None, row_bytes(inputs, width)))
    outputs = len(packed_codes)
    scope.check(outputs * inputs <= MAX_ELEMENTS, f"too many weights: {outputs} x {inputs}, at most {MAX_ELEMENTS}")
    _check_padding(scope, codes, packed_codes, inputs, width)
    if group == 0:
        return unpack_codes(packed_codes, inputs, width)
    groups = -(-inputs // group)
    packed_exponents = scope.constant(exponents, ("u8",), (outputs, row_bytes(groups, EXPONENT_BITS)))
    _check_padding(scope, exponents, packed_exponents, groups, EXPONENT_BITS)
    largest, limit = int(_split(packed_exponents, groups, EXPONENT_BITS).max()), max_exponent(width)
    scope.check(largest <= limit, f"constant {exponents!r} has exponent {largest}, expected 0 to {limit}")
    return unpack(packed_codes, packed_exponents, inputs, group, width)


def _check_padding(scope: Scope, name: str, packed: np.ndarray[Any, Any], count: int, width: int) -> None:
    used = count * width % 8  # bits of the last byte that hold values; 0: all
    scope.check(used == 0 or int(packed[:, -1].max()) < 1 << used, f"constant {name!r} has a padding bit that is not 0")


def _groups(inputs: int, group: int) -> NDArray[np.intp]:
    """Return the group of each input: intp [K]."""
    return np.arange(inputs) // group


def _join(values: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Pack values below 2^width, [O, n] -> [O, ceil(n * width / 8)]: low bits first; unused bits are 0."""
    rows, count = values.shape
    periods = -(-count // 8)  # eight values fill `width` bytes
    padded = np.zeros((rows, periods * 8), np.uint16)
    padded[:, :count] = values
    joined = np.zeros((rows, periods, width + 1), np.uint8)
    for i in range(8):
        byte, bit = divmod(i * width, 8)
        both = padded[:, i::8] << np.uint16(bit)
        joined[:, :, byte] |= both.astype(np.uint8)  # the low byte
        joined[:, :, byte + 1] |= (both >> np.uint16(8)).astype(np.uint8)
    return np.ascontiguousarray(joined[:, :, :width].reshape(rows, -1)[:, : row_bytes(count, width)])


def _split(packed: np.ndarray[Any, Any], count: int, width: int) -> NDArray[np.uint8]:
    """Invert `_join`: return [O, count]."""
    rows, periods = len(packed), -(-count // 8)
    padded = np.zeros((rows, periods * width + 1), np.uint8)
    padded[:, : packed.shape[1]] = packed
    values = np.empty((rows, periods, 8), np.uint8)
    for i in range(8):
        byte, bit = divmod(i * width, 8)
        low = padded[:, byte:-1:width] >> np.uint8(bit)
        high = padded[:, byte + 1 :: width][:, :periods].astype(np.uint16) << np.uint16(8 - bit)
        values[:, :, i] = (low | high.astype(np.uint8)) & np.uint8(2**width - 1)
    return values.reshape(rows, -1)[:, :count]
