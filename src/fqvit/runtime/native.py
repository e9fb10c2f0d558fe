"""The native engine: run a program on compiled kernels, bit for bit like the reference.

Python reads and verifies the file. The C++ side checks everything again and packs its own copy of the weights; constants are
handed over op by op, so that few exist twice at a time. See also: reference.py, docs/explanation/engine.md.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property, singledispatchmethod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fqvit import _native
from fqvit.distributed.workers import cores
from fqvit.errors import FqvitError
from fqvit.ir.attention import Attend, LogSoftmax, MatMul, RowCodes, ShiftMatMul, Softmax
from fqvit.ir.file import opened
from fqvit.ir.moves import Concat, Permute, Take
from fqvit.ir.ops import Add, LayerNorm, Linear, Lookup, Mean, Op, Zero
from fqvit.ir.program import INPUT, Program, Verified
from fqvit.ir.value import DAMAGED, Constant, Scope
from fqvit.runtime.memory import MOST_BYTES, check_bytes

Integers = np.ndarray[Any, Any]
NOTHING = np.zeros(0, np.uint8)  # stands for an absent constant
OUTS = {"codes": 0, "acc": 1, "i32": 2}  # {Linear.out: its number in the C++ engine}
ISA = "FQVIT_ISA"  # environment variable that selects the instruction set, for tests and comparisons
# The engine expands parameters per op and channel, even if the file stores one number or several ops share a constant. They may
# take this many bytes, or this many times the bytes stored in the file, whichever is more.
MOST_PARAMETERS = 64 << 20
MOST_TIMES = 20


class Engine:
    """A program, from a file or from memory, that is ready to run natively.

    threads: None uses every core available to this process. The bits are the same for every number of threads.
    Several Python threads may share an engine; their runs wait for each other. For parallel runs create one engine per thread.
    """

    def __init__(
        self,
        program: Program | str | Path,
        threads: int | None = None,
        *,
        isa: str | None = None,
        keep: bool = False,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Load a program. Raises FqvitError if it does not verify or needs too much memory.

        isa: one of `instruction_sets()`; None uses $FQVIT_ISA, or else the best one
        keep: keep every buffer, as `buffers` needs; slower, and raises the memory limit to 8 * most_bytes
        most_bytes: limit on the memory that the buffers of one image need, in bytes
        """
        if threads is not None and threads < 1:
            raise FqvitError(f"threads: {threads}, expected 1 or more.")
        options = threads or cores(), _instruction_set(isa), keep, 8 * most_bytes if keep else most_bytes
        if isinstance(program, Program):
            self._load(program, program.verify(), *options)
            return
        with opened(Path(program)) as (source, verified):
            try:
                self._load(source, verified, *options)
            except FqvitError as error:
                raise FqvitError(f"{program}: {error}") from None

    def _load(self, program: Program, verified: Verified, threads: int, isa: str, keep: bool, most_bytes: int) -> None:
        loader = _Loader(program, verified, threads, isa, keep)
        check_bytes(program.header.model, loader.engine.run_bytes, most_bytes)  # allocated by the first run only
        self._engine, self._numbers = loader.engine, loader.numbers
        self.header = program.header
        self.classes = program.classes
        self.input_shape = program.input_shape

    @property
    def isa(self) -> str:
        """The instruction set of the matrix kernels."""
        return self._engine.instruction_set

    @property
    def threads(self) -> int:
        """The number of threads of a run."""
        return self._engine.threads

    def run(self, images: NDArray[np.uint8]) -> Integers:
        """Return int32 logits [N, classes], or codes of features, for images uint8 [N, H, W, C]."""
        return self._engine.run(self._checked(images))

    def run_all(self, images: NDArray[np.uint8]) -> tuple[Integers, ...]:
        """Like run, but return all outputs, in the order of the header."""
        return tuple(self._engine.run_all(self._checked(images)))

    def _checked(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        images = np.asarray(images)
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != self.input_shape:
            expected = ", ".join(map(str, self.input_shape))
            raise FqvitError(f"images: {images.dtype} {list(images.shape)}, expected uint8 [N, {expected}].")
        return np.ascontiguousarray(images)

    def classify(self, images: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Return the class with the highest score per image, i64 [N], for images uint8 [N, H, W, C]. Ties: the first class."""
        if self.header.output.kind != "logits":
            raise FqvitError(f"{self.header.model}: gives features ({self.header.output.kind}), not classes.")
        best: NDArray[np.int64] = self.run(images).argmax(-1)
        return best

    def buffers(self, image: NDArray[np.uint8]) -> dict[str, Integers]:
        """Run one image, uint8 [H, W, C], and return every buffer by name. Needs an engine created with keep=True."""
        numbers = [self._numbers[op.y] for op in self.header.ops]
        found = self._engine.buffers(self._checked(image[None]), numbers)
        return {op.y: codes for op, codes in zip(self.header.ops, found, strict=True)}

    def profile(self, image: NDArray[np.uint8], rounds: int = 20) -> list[OpTime]:
        """Measure every op, after fusion, for one image uint8 [H, W, C] on one thread: the fastest of `rounds` runs."""
        return [OpTime(*row) for row in self._engine.profile(self._checked(image[None]), rounds)]


@dataclass(frozen=True)
class OpTime:
    """The time of one op. buffer: the buffer that it writes; macs: multiply-accumulates of its matrix products."""

    buffer: str
    op: str
    seconds: float
    macs: int


def instruction_sets() -> list[str]:
    """Return the instruction sets that this build contains and this CPU supports, best first."""
    return _native.instruction_sets()


def _instruction_set(isa: str | None) -> str:
    """Return the requested instruction set after checking it; "" stands for the best."""
    where, name = ("isa", isa) if isa else (ISA, os.environ.get(ISA, ""))
    if name and name not in instruction_sets():
        known = ", ".join(instruction_sets())
        raise FqvitError(f"{where}: instruction set {name}: not in this build or not on this CPU, expected one of {known}.")
    return name


def _contiguous(array: Constant) -> Constant:
    """Return a contiguous, aligned array. np.ascontiguousarray would turn a 0-d array into a 1-d one."""
    return array if array.flags.c_contiguous and array.flags.aligned else array.copy()


class _Loader:
    """Hand a program over to the C++ engine, op by op."""

    def __init__(self, program: Program, verified: Verified, threads: int, isa: str, keep: bool) -> None:
        self.constants = program.constants
        self.values = verified.buffers
        self.engine = _native.Engine(list(program.input_shape), isa, threads)
        self.numbers = {INPUT: 0}
        for op in program.ops:
            try:
                self.numbers[op.y] = self.add(op)
            except _native.BadProgram as error:
                raise FqvitError(f"{op.y}: {error}. {DAMAGED}") from None
        output, *others = (self.numbers[output.buffer] for output in program.header.outputs)
        self.engine.finish(output, keep, others)

    def send(self, op: Op, ints: list[int], arrays: list[Constant]) -> int:
        """Add an op to the engine; return the number of its buffer. Raises FqvitError if parameters need too much memory."""
        inputs = [self.number(name) for name in op.inputs()]
        tag: str = op.__struct_config__.tag  # type: ignore[assignment]
        number = self.engine.add(op.y, tag, inputs, ints, [_contiguous(array) for array in arrays])
        taken = self.engine.constant_bytes
        if taken > MOST_PARAMETERS and taken > MOST_TIMES * self.stored:
            said = f"parameters need {taken / 1e6:,.0f} MB, but the file stores only {self.stored / 1e6:,.1f} MB"
            raise FqvitError(f"{op.y}: {said}. {DAMAGED}")
        return number

    @cached_property
    def stored(self) -> int:
        """The size of all constants in bytes."""
        return sum(array.nbytes for array in self.constants.values())

    def number(self, name: str) -> int:
        """Return the number of a buffer, or of a constant used as an operand."""
        if name not in self.numbers:
            self.numbers[name] = self.engine.constant(_contiguous(self.constants[name]))
        return self.numbers[name]

    def part(self, op: Op, name: str) -> Constant:
        """Return one of the op's own constants, or NOTHING."""
        return self.constants.get(op.part(name), NOTHING)

    def named(self, name: str | None) -> Constant:
        """Return a shared constant, or NOTHING."""
        return NOTHING if name is None else self.constants[name]

    def zero(self, zero: Zero, channels: int) -> Constant:
        """Return a zero point as i32 [1], or as i32 [C] if it differs between channels."""
        if isinstance(zero, str):
            return self.constants[zero].astype(np.int32)
        if isinstance(zero, int) or len(zero) == 1:
            return np.array(zero, np.int32).reshape(1)
        return np.repeat(np.array(zero, np.int32), channels // len(zero))

    def channels(self, name: str) -> int:
        return self.values[name].channels

    @singledispatchmethod
    def add(self, op: Op) -> int:
        """Send an op as the record that docs/reference/engine-records.md describes; return the number of its buffer."""
        raise FqvitError(f"{op.y}: the native engine does not support {type(op).__name__}.")

    @add.register
    def _(self, op: Lookup) -> int:
        zeros = np.array(op.y_zero, np.int32)
        return self.send(op, [op.bits], [self.part(op, "table"), self.named(op.alpha), zeros])

    @add.register
    def _(self, op: Linear) -> int:
        w = op.weights(Scope(self.values, self.constants, op.y))  # unpacked if stored in 4 bits
        mult, shift = self.part(op, "mult"), self.part(op, "shift")
        arrays = [w, self.part(op, "bias"), mult, shift, self.zero(op.y_zero, len(w))]
        return self.send(op, [OUTS[op.out], op.bits], arrays)

    @add.register
    def _(self, op: LayerNorm) -> int:
        arrays = [self.part(op, "affine"), self.zero(op.zero, self.channels(op.x)), self.named(op.alpha)]
        return self.send(op, [op.epsilon, op.shift, op.b_shift, op.bits], arrays)

    @add.register
    def _(self, op: Add) -> int:
        channels, arrays = self.values[op.y].channels, []
        for term in op.terms:
            mult = np.array([term.mult], np.int32) if isinstance(term.mult, int) else self.constants[term.mult]
            arrays += [mult, self.zero(term.zero, channels), self.named(term.alpha)]
        return self.send(op, [op.shift, op.bits], [*arrays, self.zero(op.y_zero, channels), self.named(op.y_alpha)])

    @add.register
    def _(self, op: Mean) -> int:
        arrays = [self.zero(op.zero, self.channels(op.x)), self.named(op.alpha)]
        return self.send(op, [op.mult, op.shift, op.skip, op.y_zero, op.bits], arrays)

    @add.register
    def _(self, op: Take) -> int:
        return self.send(op, [], [self.constants[op.index], self.zero(op.fill, self.channels(op.x))])

    @add.register
    def _(self, op: Permute) -> int:
        lists = (op.view, op.perm, op.shape, op.select or ())
        return self.send(op, [], [np.array(values, np.int64) for values in lists])

    @add.register
    def _(self, op: Concat) -> int:
        return self.send(op, [], [])

    @add.register
    def _(self, op: MatMul) -> int:
        index = self.named(op.index)
        bias = self.part(op, "bias") if op.index is not None else NOTHING
        ints = [op.mult, op.shift, op.a_zero, op.b_zero, int(op.b_rows), op.y_zero, op.bits]
        return self.send(op, ints, [bias, index])

    @add.register
    def _(self, op: LogSoftmax) -> int:
        return self.send(op, [op.bits], [self.part(op, "table"), self.named(op.region)])

    @add.register
    def _(self, op: Softmax) -> int:
        return self.send(op, [op.mult, op.shift, op.bits], [self.part(op, "table"), self.named(op.region)])

    @add.register
    def _(self, op: RowCodes) -> int:
        return self.send(op, [], [self.part(op, "table"), self.named(op.region)])

    @add.register
    def _(self, op: ShiftMatMul) -> int:
        ints = [op.mult, op.shift, op.v_zero, op.a_bits, int(op.zero_code), op.y_zero, op.bits]
        return self.send(op, ints, [])

    @add.register
    def _(self, op: Attend) -> int:
        return self.send(op, [op.mult, op.shift, op.v_zero, op.y_zero, op.bits], [np.array(op.levels, np.int32)])
