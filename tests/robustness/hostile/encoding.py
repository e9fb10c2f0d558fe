"""Encode records as bytes in the format of native/fuzz/program.h, for seeds of the native fuzzer and tests under emulators."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from tests.robustness.hostile.records import Recorded

TAGS = ["", "lookup", "linear", "layernorm", "add", "mean", "take", "permute", "concat"]
TAGS += ["matmul", "log_softmax", "softmax", "shift_matmul", "row_codes", "attend"]
DTYPES = ["uint8", "int8", "uint16", "int16", "int32", "int64"]
SHORT = {-1: 252, 2**30: 253, 2**31 - 1: 254, 2**62: 255}


def integer(value: int) -> bytes:
    if 0 <= value < 248:
        return bytes([value])
    if value in SHORT:
        return bytes([SHORT[value]])
    for kind, (code, bits) in enumerate((("b", 7), ("<h", 15), ("<i", 31), ("<q", 63))):
        if -(2**bits) <= value < 2**bits:
            return bytes([248 + kind]) + struct.pack(code, value)
    raise AssertionError(value)


def integers(values: Any) -> bytes:
    return integer(len(values)) + b"".join(integer(int(value)) for value in values)


def array(x: Any) -> bytes:
    return bytes([DTYPES.index(x.dtype.name)]) + integers(x.shape) + little_endian(x)


def little_endian(x: Any) -> bytes:
    return np.ascontiguousarray(x, x.dtype.newbyteorder("<")).tobytes()


def encoded(program: Recorded, style: int = 0) -> bytes:
    """Encode a recorded program. style: pixels of the test image (0: random, 1: all 0, 2: all 255, 3: 0 and 255 mixed)."""
    out = bytes([style | 4 * bool(program.others)]) + b"".join(map(integer, program.image)) + integer(program.output)
    out += integers(program.others) if program.others else b""
    for record in program.records:
        out += bytes([TAGS.index(record.tag)])
        if record.tag:
            out += integers(record.inputs) + integers(record.ints) + integer(len(record.arrays))
        out += b"".join(map(array, record.arrays))
    return out
