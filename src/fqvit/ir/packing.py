"""Pack and unpack narrow weights: codes of 2 to 7 bits, optionally with one exponent or one codebook per group of weights.

    w[o, k] = code[o, k]                                           without groups
    w[o, k] = code[o, k] * 2^exponent[o, k // group]               with exponents in 0..8 - width
    w[o, k] = codebooks[choice[o, k // group], code[o, k]]         with codebooks, which list the i8 value of every code

A code is in two's complement; with codebooks it is unsigned. Code k occupies the bits k * width .. k * width + width - 1 of its
row, where bit b is bit b mod 8 of byte b // 8; exponents and choices are stored in the same way in 4 bits each. Every such
weight fits int8. Kernels never see packed weights: they are unpacked once, before a program runs (Program.unpacked).
O outputs, K inputs, G = ceil(K / group) groups per row, B codebooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fqvit.ir.value import MAX_ELEMENTS, Scope

MIN_WIDTH, MAX_WIDTH = 2, 7
GROUP_WIDTH = 4  # bits of codes with groups if an op does not specify a width
GROUP_BITS = 4  # bits per group: its exponent, or the index of its codebook
MAX_CODEBOOKS = 1 << GROUP_BITS
MAX_GROUP = 2**16
BLOCK = 2**20  # weights that are looked up in codebooks at a time, because numpy widens indices to 8 bytes


def exponent_levels(width: int) -> NDArray[np.int8]:
    """Return the codebooks that are equivalent to exponents: row e has the weight of every code, i8 [9 - width, 2^width].

    The smallest code times the largest power of two is -128, the smallest int8.
    """
    half = 2 ** (width - 1)
    codes = (np.arange(2**width) ^ half) - half
    levels: NDArray[np.int8] = (codes << np.arange(9 - width)[:, None]).astype(np.int8)
    return levels


def row_bytes(count: int, width: int) -> int:
    """Return the number of bytes of `count` values of `width` bits."""
    return -(-count * width // 8)


def pack_codes(codes: NDArray[np.int8], width: int) -> NDArray[np.uint8]:
    """Pack weights without groups, i8 [O, K] -> u8 [O, ceil(K * width / 8)]."""
    assert -(2 ** (width - 1)) <= int(codes.min()) and int(codes.max()) < 2 ** (width - 1)
    return _join((codes & (2**width - 1)).astype(np.uint8), width)


def pack_codebooks(
    w: NDArray[np.int8], choice: NDArray[np.uint8], codebooks: NDArray[np.int8], group: int, width: int = GROUP_WIDTH
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Pack weights i8 [O, K], each of which is a level of its group's codebook, and choices u8 [O, G].

    codebooks: i8 [B, 2^width], or exponent_levels(width). Of equal levels, the first one is used. Both results are u8 with one
    row per output.
    """
    books, levels = codebooks.shape
    assert 1 <= books <= MAX_CODEBOOKS and levels == 2**width and int(choice.max()) < books
    inverse = np.full((books, 2**8), -1, np.int8)  # the code of every i8, which is viewed as u8; -1: not a level
    for code in reversed(range(levels)):
        inverse[np.arange(books), codebooks[:, code].view(np.uint8)] = code
    codes = _look_up(inverse, choice[:, _groups(w.shape[1], group)], w.view(np.uint8))
    assert int(codes.min()) >= 0, "a weight is not a level of its codebook"
    return _join(codes.view(np.uint8), width), _join(choice, GROUP_BITS)


def unpack_codes(codes: NDArray[np.uint8], inputs: int, width: int) -> NDArray[np.int8]:
    """Invert `pack_codes`: return weights i8 [O, K]."""
    sign = 2 ** (width - 1)
    signed: NDArray[np.int8] = (_split(codes, inputs, width) ^ np.uint8(sign)).astype(np.int8) - np.int8(sign)
    return signed


def unpack_codebooks(
    codes: NDArray[np.uint8],
    choices: NDArray[np.uint8],
    codebooks: NDArray[np.int8],
    inputs: int,
    group: int,
    width: int = GROUP_WIDTH,
) -> NDArray[np.int8]:
    """Invert `pack_codebooks`: return weights i8 [O, K]. inputs: K, which the packed shape does not determine."""
    groups = _groups(inputs, group)
    choice = _split(choices, int(groups[-1]) + 1, GROUP_BITS)
    return _look_up(codebooks, choice[:, groups], _split(codes, inputs, width))


def packed_weights(
    scope: Scope, part: Callable[[str], str], inputs: int, group: int, width: int, codebooks: int
) -> NDArray[np.int8]:
    """Unpack the constants of an op to weights i8 [O, K]. part: returns the full name of one of the op's constants

    Rejects constants that `pack_codes` and `pack_codebooks` cannot produce.
    """
    scope.check(0 <= codebooks <= MAX_CODEBOOKS, f"codebooks is {codebooks}, expected 0 to {MAX_CODEBOOKS}")
    scope.check(codebooks == 0 or group != 0, f"codebooks is {codebooks}, but group is 0, expected 2 to {MAX_GROUP}")
    scope.check(group == 0 or 2 <= group <= MAX_GROUP, f"group is {group}, expected 0 or 2 to {MAX_GROUP}")
    scope.check(MIN_WIDTH <= width <= MAX_WIDTH, f"width is {width}, expected 0 or {MIN_WIDTH} to {MAX_WIDTH}")
    codes = scope.constant(part("w"), ("u8",), (None, row_bytes(inputs, width)))
    outputs = len(codes)
    scope.check(outputs * inputs <= MAX_ELEMENTS, f"too many weights: {outputs} x {inputs}, at most {MAX_ELEMENTS}")
    _check_padding(scope, part("w"), codes, inputs, width)
    if group == 0:
        return unpack_codes(codes, inputs, width)
    if codebooks == 0:
        levels, name, what = exponent_levels(width), part("exponent"), "exponent"
    else:
        levels, name, what = scope.constant(part("codebooks"), ("i8",), (codebooks, 2**width)), part("choice"), "codebook"
    groups = -(-inputs // group)
    choices = scope.constant(name, ("u8",), (outputs, row_bytes(groups, GROUP_BITS)))
    _check_padding(scope, name, choices, groups, GROUP_BITS)
    largest = int(_split(choices, groups, GROUP_BITS).max())
    scope.check(largest < len(levels), f"constant {name!r} has {what} {largest}, expected 0 to {len(levels) - 1}")
    return unpack_codebooks(codes, choices, levels, inputs, group, width)


def _check_padding(scope: Scope, name: str, packed: np.ndarray[Any, Any], count: int, width: int) -> None:
    used = count * width % 8  # bits of the last byte that hold values; 0: all
    scope.check(used == 0 or int(packed[:, -1].max()) < 1 << used, f"constant {name!r} has a padding bit that is not 0")


def _groups(inputs: int, group: int) -> NDArray[np.intp]:
    """Return the group of each input: intp [K]."""
    return np.arange(inputs) // group


def _look_up(table: NDArray[np.int8], rows: NDArray[np.uint8], columns: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Return table[rows, columns]; all arrays have two axes."""
    out = np.empty(rows.shape, np.int8)
    step = -(-BLOCK // rows.shape[1])
    for start in range(0, len(rows), step):
        block = slice(start, start + step)
        out[block] = table[rows[block], columns[block]]
    return out


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
