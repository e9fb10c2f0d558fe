"""Infer and check the static properties of buffers: dtype, shape and range of integers.

Every op infers the Value of its output from the Values of its inputs and from its constants, and returns proofs that no
intermediate result can overflow. See also: ops.py (the ops), program.py (verifies all ops of a program).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import msgspec
import numpy as np

from fqvit.errors import FqvitError
from fqvit.ir.kit import DTYPES

Constant = np.ndarray[Any, Any]
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
MAX_ELEMENTS = 2**28  # per constant, or per buffer and image; Swin-B at 384 pixels needs less than 2^23
MAX_CODE = 2**16 - 1
MAX_CHANNELS = 2**20  # per computed buffer: runtimes store parameters per channel, even if the file has one for all channels
MAX_AXES = 8
MAX_INTEGER = 2**62
Int = Annotated[int, msgspec.Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]  # any integer of a file: fits int64, even when negated
DAMAGED = "The file is damaged or was not written by fqvit."


@dataclass(frozen=True)
class Value:
    """Static properties of one buffer. lo..hi: the range of its integers. shape: without the batch axis.

    Only for codes of LogSoftmax, whose largest is `last`: row_sum bounds the sum of 2^(last - a) over the codes a of a row;
    masked: code `last` marks masked pairs of tokens, so it must mean an attention weight of 0.
    Only for codes of RowCodes: row_code occurs in every row; mask_code is the code of masked pairs of tokens.
    """

    dtype: str
    shape: tuple[int, ...]
    lo: int
    hi: int
    row_sum: int | None = None
    masked: bool = False
    row_code: int | None = None
    mask_code: int | None = None

    @property
    def channels(self) -> int:
        return self.shape[-1]


@dataclass(frozen=True)
class Proof:
    """The claim |value| <= bound < 2^bits for the value named `what` inside the op that writes `buffer`."""

    buffer: str
    what: str
    bound: int
    bits: int

    @property
    def holds(self) -> bool:
        return self.bound < 1 << self.bits


class Scope:
    """The buffers and constants that an op may read. Every check raises FqvitError with the name of the op."""

    def __init__(self, buffers: Mapping[str, Value], constants: Mapping[str, Constant], op: str) -> None:
        self.buffers, self.constants, self.op = buffers, constants, op

    def fail(self, problem: str) -> NoReturn:
        raise FqvitError(f"{self.op}: {problem}. {DAMAGED}")

    def check(self, condition: bool, problem: str) -> None:
        if not condition:
            self.fail(problem)

    def buffer(self, name: str, dtypes: tuple[str, ...] = ("u8", "u16"), min_rank: int = 1) -> Value:
        """Return the Value of a buffer after checking its dtype and its number of axes."""
        if name not in self.buffers:
            self.fail(f"reads {name!r} before any op writes it")
        value = self.buffers[name]
        self.check(value.dtype in dtypes, f"{name!r} is {value.dtype}, expected {' or '.join(dtypes)}")
        self.check(len(value.shape) >= min_rank, f"{name!r} has shape {list(value.shape)}, expected {min_rank} axes or more")
        return value

    def constant(self, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...]) -> Constant:
        """Return a constant after checking its dtype and shape; None in `shape` stands for any size."""
        if name not in self.constants:
            self.fail(f"constant {name!r} is missing")
        array = self.constants[name]
        self.check(NAMES.get(array.dtype) in dtypes, f"constant {name!r} is {array.dtype}, expected {' or '.join(dtypes)}")
        fits = len(array.shape) == len(shape) and all(
            want in (None, have) for want, have in zip(shape, array.shape, strict=True)
        )
        self.check(fits and array.size > 0, f"constant {name!r} has shape {list(array.shape)}, expected {list(shape)}")
        return array

    def either(self, name: str, dtypes: tuple[str, ...]) -> Value:
        """Return the Value of a buffer, or of a constant used as an operand: lo and hi are its actual minimum and maximum."""
        if name in self.buffers:
            return self.buffer(name, dtypes)
        if name not in self.constants:
            self.fail(f"reads {name!r}, which is neither a buffer nor a constant")
        array = self.constants[name]
        dtype = NAMES.get(array.dtype)
        if dtype is None or dtype not in dtypes or array.size == 0:
            self.fail(f"constant {name!r} is {array.dtype} {list(array.shape)}, expected {' or '.join(dtypes)}, not empty")
        return Value(dtype, array.shape, int(array.min()), int(array.max()))

    def zero(self, zero: int | tuple[int, ...] | str, channels: int) -> tuple[int, int]:
        """Return the lowest and the highest zero point of the channels (see ops.Zero), after checking that all are codes."""
        if isinstance(zero, int):
            zero = (zero,)
        if isinstance(zero, tuple):
            self.check(len(zero) > 0 and channels % len(zero) == 0, f"{len(zero)} zero points for {channels} channels")
            self.check(0 <= min(zero) and max(zero) <= MAX_CODE, f"zero point outside 0..{MAX_CODE}")
            return min(zero), max(zero)
        vector = self.constant(zero, ("u8", "u16"), (channels,))
        return int(vector.min()), int(vector.max())

    def alpha(self, name: str | None, channels: int) -> int:
        """Return the largest exponent in a constant u8 [C] of Power-of-Two Factors, at most 15; 0 if there is no constant."""
        if name is None:
            return 0
        vector = self.constant(name, ("u8",), (channels,))
        self.check(int(vector.max()) <= 15, f"constant {name!r} has a shift above 15")
        return int(vector.max())

    def codes(self, bits: int, shape: tuple[int, ...], zero: int | tuple[int, ...] | str = 0) -> Value:
        """Return the value of an output of unsigned codes, after checking `bits` and the zero point."""
        self.check(1 <= bits <= 16, f"bits is {bits}, expected 1 to 16")
        last = (1 << bits) - 1
        lo, hi = self.zero(zero, shape[-1])
        self.check(0 <= lo and hi <= last, f"y_zero is outside 0..{last}")
        return Value("u8" if bits <= 8 else "u16", shape, 0, last)


def check_constant(name: str, shape: tuple[int, ...]) -> None:
    """Reject a constant that is too large. An empty axis counts as 1, so that numpy can represent the shape."""
    if len(shape) > MAX_AXES or math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        limits = f"at most {MAX_AXES} axes and {MAX_ELEMENTS} elements"
        raise FqvitError(f"constant {name!r} has shape {list(shape)}, expected {limits}. {DAMAGED}")


def magnitude(lo: int, hi: int, zero_lo: int = 0, zero_hi: int = 0) -> int:
    """Return the largest |x - zero| for x in lo..hi and zero in zero_lo..zero_hi."""
    return max(hi - zero_lo, zero_hi - lo)
