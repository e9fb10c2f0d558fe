"""Pack and unpack weights with exponents, which fqvit reads but no longer writes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fqvit.ir.packing import GROUP_WIDTH, exponent_levels, pack_codebooks, unpack_codebooks


def pack(
    w: NDArray[np.int8], exponent: NDArray[np.uint8], group: int, width: int = GROUP_WIDTH
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Pack weights i8 [O, K] and exponents u8 [O, G]; both results are u8 with one row per output."""
    return pack_codebooks(w, exponent, exponent_levels(width), group, width)


def unpack(
    codes: NDArray[np.uint8], exponents: NDArray[np.uint8], inputs: int, group: int, width: int = GROUP_WIDTH
) -> NDArray[np.int8]:
    """Invert `pack`: return weights i8 [O, K]."""
    return unpack_codebooks(codes, exponents, exponent_levels(width), inputs, group, width)
