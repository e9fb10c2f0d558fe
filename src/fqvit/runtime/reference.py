"""The reference runtime: a short, slow interpreter that defines the results of a program.

It does not need torch; `library="torch"` runs the same code on torch tensors with identical results. It verifies every program
before running it. See also: native.py (fast, bit-exact with this runtime).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fqvit.ir.fixed import Array
from fqvit.ir.kit import kit
from fqvit.ir.liveness import last_uses
from fqvit.ir.program import INPUT, Program
from fqvit.runtime.limits import MOST_BYTES
from fqvit.runtime.memory import check_bytes, live_bytes
from fqvit.runtime.pixels import checked_images

Integers = np.ndarray[Any, Any]


class Reference:
    """A program that is ready to run: verified, with unpacked weights and with constants converted for `library`."""

    def __init__(self, program: Program, library: Literal["numpy", "torch"] = "numpy", *, most_bytes: int = MOST_BYTES) -> None:
        """Raises FqvitError if the program does not verify or its buffers need more than `most_bytes` per image.

        An op temporarily needs more: it computes in int64.
        """
        check_bytes(program.header.model, live_bytes(program, program.verify().buffers), most_bytes)
        ready = program.unpacked()
        self.program, self.ops = program, ready.ops
        self.kit = kit(library)
        self.constants = {name: self.kit.asarray(array) for name, array in ready.constants.items()}
        self.outputs = [output.buffer for output in program.header.outputs]
        self.last_use = last_uses((op.inputs() for op in program.ops), self.outputs)

    def run(self, images: NDArray[np.uint8], visit: Callable[[str, Integers], None] | None = None) -> Integers:
        """Return the first output for images uint8 [N, H, W, C]: int32 logits [N, classes], or codes of features.

        visit: called with the name and the contents of every buffer as soon as an op has written it
        """
        return self.run_all(images, visit)[0]

    def run_all(self, images: NDArray[np.uint8], visit: Callable[[str, Integers], None] | None = None) -> tuple[Integers, ...]:
        """Like run, but return all outputs, in the order of the header."""
        images = checked_images(images, self.program.input_shape)
        values: dict[str, Array] = {INPUT: self.kit.asarray(images)}

        def get(name: str) -> Array:
            return values[name] if name in values else self.constants[name]

        for i, op in enumerate(self.ops):
            values[op.y] = op.run(self.kit, get)
            if visit is not None:
                visit(op.y, self.kit.numpy(values[op.y]))
            for name in op.inputs():
                if self.last_use[name] == i:
                    values.pop(name, None)
        return tuple(self.kit.numpy(values[name]) for name in self.outputs)


def run(program: Program, images: NDArray[np.uint8], library: Literal["numpy", "torch"] = "numpy") -> Integers:
    """Run a program once: images uint8 [N, H, W, C] -> int32 logits [N, classes], or codes of features."""
    return Reference(program, library).run(images)
