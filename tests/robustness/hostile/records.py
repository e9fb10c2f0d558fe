"""Record the calls that build a native engine as values, which can be changed and sent again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np

from fqvit import _native
from fqvit.ir.program import Program
from fqvit.runtime.native import Engine

Array = np.ndarray[Any, Any]


@dataclass
class Record:
    """One call of _native.Engine.add; with an empty tag, one call of .constant with arrays[0]."""

    tag: str
    inputs: list[int] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)
    arrays: list[Array] = field(default_factory=list)


@dataclass
class Recorded:
    """All calls that build an engine. image: H, W, C; output, others: numbers of the output values."""

    image: tuple[int, int, int]
    records: list[Record]
    output: int
    others: list[int] = field(default_factory=list)

    def copy(self) -> Recorded:
        return copy.deepcopy(self)

    def build(self, isa: str, threads: int = 1, keep: bool = False) -> Any:
        """Build a native engine. Nothing has verified the records: the engine must check everything itself."""
        engine = _native.Engine(list(self.image), isa, threads)
        for record in self.records:
            send(engine, record)
        engine.finish(self.output, keep, self.others)
        return engine


def send(engine: Any, record: Record) -> int:
    """Make the call of a record and return the number of the value that it adds."""
    if not record.tag:
        return int(engine.constant(record.arrays[0]))
    return int(engine.add("y", record.tag, record.inputs, record.ints, record.arrays))


class _Recorder:
    """Stand-in for the native engine: numbers values in the same way and records the calls."""

    instruction_set, threads, run_bytes, constant_bytes = "recorder", 1, 0, 0

    def __init__(self, keep: Callable[[Record], int]) -> None:
        self.keep = keep
        self.output = 0
        self.others: list[int] = []

    def constant(self, array: Array) -> int:
        return self.keep(Record("", arrays=[array.copy()]))

    def add(self, name: str, tag: str, inputs: list[int], ints: list[int], arrays: list[Array]) -> int:
        return self.keep(Record(tag, list(inputs), list(ints), [array.copy() for array in arrays]))

    def finish(self, output: int, keep: bool, others: list[int]) -> None:
        self.output, self.others = output, others


def recorded(program: Program) -> Recorded:
    """Record the calls that Engine makes for a program."""
    records: list[Record] = []

    def keep(record: Record) -> int:
        records.append(record)
        return len(records)

    recorder = _Recorder(keep)
    with patch.object(_native, "Engine", lambda *_: recorder):
        Engine(program, 1)
    return Recorded(program.input_shape, records, recorder.output, recorder.others)
