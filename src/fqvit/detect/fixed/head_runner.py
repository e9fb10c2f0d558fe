"""Run a detector's head on any number of RoIs in batches; the result does not depend on the batch size.

The batched program (batch.py) runs on the engine or on the slow reference, which defines the result. Needs no torch.
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
MIN_ROWS = 64  # per matrix product: weights are read once per tile of 4 to 12 rows, and few tiles should be partial


def rois_per_batch(program: Program) -> int:
    """Return the smallest batch with MIN_ROWS rows per product: many RoIs for fully connected layers, one for convolutions."""
    buffers = program.verify().buffers
    rows = (math.prod(buffers[op.y].shape[:-1]) for op in program.ops if isinstance(op, Linear))
    return -(-MIN_ROWS // min(rows, default=MIN_ROWS))


class HeadRunner:
    """Run a head in batches.

    input, outputs: as in the head's header   shapes: shapes of the outputs for one RoI   batch: RoIs per run
    """

    def __init__(
        self,
        program: Program,
        threads: int | None = None,
        backend: Literal["native", "reference"] = "native",
        batch: int | None = None,
    ) -> None:
        """batch: RoIs per run; None uses rois_per_batch"""
        if program.header.input is None:
            raise FqvitError(f"{program.header.model}: takes pixels, expected a head of a detector, which takes RoI features.")
        self.input: CodeInput = program.header.input
        self.outputs: tuple[Output, ...] = program.header.outputs
        buffers = program.verify().buffers
        self.shapes = tuple(buffers[output.buffer].shape for output in self.outputs)
        self.batch = batch or rois_per_batch(program)
        made = batched(program, self.batch)
        self._runner = Engine(made, threads) if backend == "native" else Reference(made)

    def run_all(self, codes: NDArray[np.uint8]) -> tuple[Integers, ...]:
        """Run the head on RoI features u8 [n, side, side, C]; return every output [n, ...] in the order of the header."""
        height, width, channels = self.input.shape
        if codes.dtype != np.uint8 or codes.ndim != 4 or codes.shape[1:] != self.input.shape:
            takes = f"uint8 [n, {height}, {width}, {channels}]"
            raise FqvitError(f"RoI features: {codes.dtype} {list(codes.shape)}, expected {takes}.")
        count, whole = len(codes), len(codes) // self.batch * self.batch
        parts = [codes[:whole]]
        if whole < count:  # the last batch is filled with zeros, whose outputs are dropped
            filled = np.zeros((self.batch, *self.input.shape), np.uint8)
            filled[: count - whole] = codes[whole:]
            parts.append(filled)
        found = [self._runner.run_all(part.reshape(-1, self.batch * height, width, channels)) for part in parts]
        joined = []
        for i, shape in enumerate(self.shapes):
            rows = [outputs[i].reshape(-1, *shape) for outputs in found]
            joined.append(rows[0] if len(rows) == 1 else np.concatenate(rows)[:count])
        return tuple(joined)
