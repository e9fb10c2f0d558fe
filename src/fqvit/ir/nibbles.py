"""Pack and unpack 4-bit weights: two codes per byte, one exponent per group of weights.

    w[o, k] = code[o, k] 2^exponent[o, k // group],   code in -8..7 (two's complement), exponent in 0..4

Every such weight fits int8. Kernels never see packed weights: they are unpacked once, before a program runs
(Program.unpacked). O outputs, K inputs, G = ceil(K / group) groups per row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fqvit.ir.value import MAX_ELEMENTS, Scope

MAX_EXPONENT = 4  # -8 * 2^4 = -128 is the smallest int8
MAX_GROUP = 2**16


def pack(w: NDArray[np.int8], exponent: NDArray[np.uint8], group: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Pack weights i8 [O, K] and exponents u8 [O, G] into u8 [O, ceil(K / 2)] and u8 [O, ceil(G / 2)]."""
    shift = exponent[:, _groups(w.shape[1], group)].astype(np.int8)
    codes = w >> shift
    assert int(exponent.max()) <= MAX_EXPONENT and -8 <= int(codes.min()) and int(codes.max()) <= 7
    assert bool((codes * (1 << shift) == w).all())
    return _join((codes & 15).astype(np.uint8)), _join(exponent)


def unpack(codes: NDArray[np.uint8], exponents: NDArray[np.uint8], inputs: int, group: int) -> NDArray[np.int8]:
    """Invert `pack`: return weights i8 [O, K]. inputs: K, which the packed shape does not determine if K is odd."""
    groups = _groups(inputs, group)
    signed = (_split(codes, inputs) ^ 8).astype(np.int8) - np.int8(8)  # two's complement
    factors = np.left_shift(1, _split(exponents, int(groups[-1]) + 1)).astype(np.int8)
    unpacked: NDArray[np.int8] = signed * factors[:, groups]
    return unpacked


def packed_weights(scope: Scope, codes: str, exponents: str, inputs: int, group: int) -> NDArray[np.int8]:
    """Unpack the constants `codes` and `exponents` to weights i8 [O, K]. Rejects constants that `pack` cannot produce."""
    scope.check(2 <= group <= MAX_GROUP, f"group is {group}, expected 0 or 2 to {MAX_GROUP}")
    groups = -(-inputs // group)
    packed_codes = scope.constant(codes, ("u8",), (None, -(-inputs // 2)))
    outputs = len(packed_codes)
    scope.check(outputs * inputs <= MAX_ELEMENTS, f"too many weights: {outputs} x {inputs}, at most {MAX_ELEMENTS}")
    packed_exponents = scope.constant(exponents, ("u8",), (outputs, -(-groups // 2)))
    for name, array, count in ((codes, packed_codes, inputs), (exponents, packed_exponents, groups)):
        scope.check(count % 2 == 0 or int(array[:, -1].max()) < 16, f"constant {name!r} has a padding nibble that is not 0")
    largest = int(_split(packed_exponents, groups).max())
    scope.check(largest <= MAX_EXPONENT, f"constant {exponents!r} has exponent {largest}, expected 0 to {MAX_EXPONENT}")
    return unpack(packed_codes, packed_exponents, inputs, group)


def _groups(inputs: int, group: int) -> NDArray[np.intp]:
    """Return the group of each input: intp [K]."""
    return np.arange(inputs) // group


def _join(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack values below 16, [O, n] -> [O, ceil(n / 2)]: even columns in low nibbles; an odd n leaves the last nibble 0."""
    padded = np.pad(values, ((0, 0), (0, values.shape[1] % 2)))
    joined: NDArray[np.uint8] = padded[:, ::2] | padded[:, 1::2] << np.uint8(4)
    return joined


def _split(packed: np.ndarray[Any, Any], count: int) -> NDArray[np.uint8]:
    """Invert `_join`: return [O, count]."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)[:, :count]
