"""A detector's head on any number of squares: batches of them through one program (detect/batch.py), bit for bit as one by one.

Integers in and out, no torch. The engine runs it, or the reference, which is slow and says what is right.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.batch import batched
from fqvit.errors import FqvitError
from fqvit.ir.ops import Linear
from fqvit.ir.program import CodeInput, Output, Program
from fqvit.runtime.native import Engine
from fqvit.runtime.reference import Reference

Integers = NDArray[Any]
MIN_ROWS = 64  # of every product: weights are read once for a block of some ten rows, and few blocks should be cut short


def rois_per_batch(program: Program) -> int:
    """As few as give every linear map MIN_ROWS rows: many for fully connected layers, one where all are convolutions."""
    buffers = program.verify().buffers
    rows = (math.prod(buffers[op.y].shape[:-1]) for op in program.ops if isinstance(op, Linear))
    return -(-MIN_ROWS // min(rows, default=MIN_ROWS))


class HeadRunner:
    """input, outputs: what the codes of one square mean, in and out   shapes: of one square's outputs"""

    def __init__(
        self,
        program: Program,
        threads: int | None = None,
        backend: Literal["native", "reference"] = "native",
        batch: int | None = None,
    ) -> None:
        """batch: squares of a batch; None chooses."""
        if program.header.input is None:
            raise FqvitError(f"{program.header.model}: takes pixels, expected a head of a detector, which takes squares.")
        self.input: CodeInput = program.header.input
        self.outputs: tuple[Output, ...] = program.header.outputs
        buffers = program.verify().buffers
        self.shapes = tuple(buffers[output.buffer].shape for output in self.outputs)
        self.batch = batch or rois_per_batch(program)
        made = batched(program, self.batch)
        self._runner = Engine(made, threads) if backend == "native" else Reference(made)

    def run_all(self, codes: NDArray[np.uint8]) -> tuple[Integers, ...]:
        """uint8 [n, side, side, C] -> every output [n, ...], in the order of the header: as an Engine runs a program."""
        height, width, channels = self.input.shape
        if codes.dtype != np.uint8 or codes.ndim != 4 or codes.shape[1:] != self.input.shape:
            takes = f"uint8 [n, {height}, {width}, {channels}]"
            raise FqvitError(f"squares of {codes.dtype} {list(codes.shape)}: this head takes {takes}.")
        count, whole = len(codes), len(codes) // self.batch * self.batch
        parts = [codes[:whole]]
        if whole < count:  # squares of zeros fill the last batch, and what they give is dropped
            filled = np.zeros((self.batch, *self.input.shape), np.uint8)
            filled[: count - whole] = codes[whole:]
            parts.append(filled)
        found = [self._runner.run_all(part.reshape(-1, self.batch * height, width, channels)) for part in parts]
        joined = []
        for i, shape in enumerate(self.shapes):
            rows = [outputs[i].reshape(-1, *shape) for outputs in found]
            joined.append(rows[0] if len(rows) == 1 else np.concatenate(rows)[:count])
        return tuple(joined)
