"""Limit the memory of buffers: an untrusted file of 1 kB can declare shapes of any size."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from fqvit.errors import FqvitError
from fqvit.ir.kit import DTYPES
from fqvit.ir.liveness import last_uses
from fqvit.ir.program import INPUT, Program
from fqvit.ir.value import DAMAGED, Value


def check_bytes(model: str, needed: int, most: int) -> None:
    """Raise FqvitError if the buffers of one image need more than `most` bytes."""
    if needed > most:
        problem = f"its buffers need {needed >> 20} MiB per image, at most {most >> 20} MiB are allowed"
        raise FqvitError(f"{model}: {problem}. {DAMAGED}")


def live_bytes(program: Program, buffers: Mapping[str, Value]) -> int:
    """Return the peak size of the live buffers of one image. A buffer is live from the op that writes it to its last reader."""
    sizes = {name: math.prod(value.shape) * np.dtype(DTYPES[value.dtype]).itemsize for name, value in buffers.items()}
    last_use = last_uses((op.inputs() for op in program.ops), (output.buffer for output in program.header.outputs))
    live, most = sizes[INPUT], sizes[INPUT]
    for i, op in enumerate(program.ops):
        live += sizes[op.y]
        most = max(most, live)
        live -= sum(sizes[name] for name in {op.y, *op.inputs()} & sizes.keys() if last_use.get(name, i) == i)
    return most
