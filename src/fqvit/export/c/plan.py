"""Plan a C export: run ops row by row, so that most buffers hold one row, and place buffers in an arena.

Ops that compute row r of their output from row r of their inputs (linear, layernorm, add, softmax ...) share a stage: one loop
over rows, in which a buffer that no other stage reads is a single row. An op that needs all rows of an input, or has a
different number of rows, belongs to a later stage. K and V are permuted one slice (one head of one window) at a time. Nothing
here depends on the C language. See also: arena.py (offsets), emit.py (the calls).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fqvit.export.c.arena import plan_arena
from fqvit.ir.attention import Attend, MatMul, ShiftMatMul
from fqvit.ir.elementwise import Depthwise, Max, Multiply
from fqvit.ir.liveness import last_uses
from fqvit.ir.moves import Concat, Permute, Take
from fqvit.ir.ops import Mean
from fqvit.ir.program import INPUT, AnyOp, Program, Verified
from fqvit.ir.value import Value

BYTES = {"u8": 1, "u16": 2, "i32": 4}

Access = Literal["row", "slice", "all"]


def rows_of(value: Value) -> int:
    return math.prod(value.shape[:-1])


def row_bytes(value: Value) -> int:
    return value.channels * BYTES[value.dtype]


def size_bytes(value: Value) -> int:
    return math.prod(value.shape) * BYTES[value.dtype]


@dataclass
class Stage:
    """Ops that all run for row 0, then all for row 1, and so on. A concat is a separate stage."""

    rows: int
    ops: list[AnyOp] = field(default_factory=list)


@dataclass(frozen=True)
class Allocation:
    """The memory of a buffer in the arena. It holds the whole buffer, or one row or slice of it at a time."""

    kind: Literal["whole", "row", "slice"]
    bytes: int
    offset: int = 0


@dataclass(frozen=True)
class Plan:
    stages: tuple[Stage, ...]
    allocations: dict[str, Allocation]  # by root: the buffer that holds the values
    roots: dict[str, str]  # the root of each buffer that is only a reshaped view of another one
    sliced: frozenset[str]  # permuted buffers of which only one slice is in memory at a time
    concat_offsets: dict[str, int]  # byte offset of the parts of a concat that are written in place
    arena_bytes: int

    def root(self, name: str) -> str:
        return self.roots.get(name, name)


def accesses(op: AnyOp, values: Mapping[str, Value]) -> Iterator[tuple[str, Access]]:
    """Yield the inputs of an op with the part of each that one row of its output needs."""
    if isinstance(op, MatMul | ShiftMatMul | Attend):
        first, second = op.inputs()
        yield first, "row"
        yield second, "slice"
    elif isinstance(op, Multiply):
        yield op.a, "row"
        yield op.b, "row" if rows_of(values[op.a]) == rows_of(values[op.b]) else "all"
    else:
        kind: Access = "all" if isinstance(op, Take | Permute | Mean | Concat | Depthwise | Max) else "row"
        for name in op.inputs():
            yield name, kind


def plan(program: Program, verified: Verified) -> Plan:
    """Choose the order of the ops and the memory of the buffers. The outputs of the model depend on neither."""
    return _Planner(program, verified).plan()


class _Planner:
    def __init__(self, program: Program, verified: Verified) -> None:
        self.values, self.constants = verified.buffers, program.constants
        self.roots: dict[str, str] = {}
        self.ops: list[AnyOp] = []
        for op in program.ops:
            if isinstance(op, Permute) and op.select is None and op.perm == tuple(range(len(op.perm))) and op.x != INPUT:
                self.roots[op.y] = self.root(op.x)
            else:
                self.ops.append(op)
        self.outputs = {self.root(output.buffer) for output in program.header.outputs}
        self.readers: dict[str, list[tuple[AnyOp, str, Access]]] = {op.y: [] for op in self.ops}
        self.readers[INPUT] = []
        for op in self.ops:
            for name, access in accesses(op, self.values):
                if name in self.values:
                    self.readers[self.root(name)].append((op, name, access))
        self.sliced = frozenset(op.y for op in self.ops if self.is_sliced(op))
        self.concat_of = {part: (op, offset) for op in self.ops for part, offset in self.parts_in_place(op)}
        concats = {op.y for op in self.ops if isinstance(op, Concat)}
        # The concatenated token accumulators are the largest buffer of a ViT. Their reader ends its stage to free them early.
        self.stage_ends = {op.y for op in self.ops if op.y in concats or any(self.root(x) in concats for x in op.inputs())}

    def root(self, name: str) -> str:
        return self.roots.get(name, name)

    def is_sliced(self, op: AnyOp) -> bool:
        """Return whether an op permutes a buffer that a single op reads slice by slice: K or V."""
        readers = self.readers[op.y]
        return isinstance(op, Permute) and [access for *_, access in readers] == ["slice"] and op.y not in self.outputs

    def parts_in_place(self, op: AnyOp) -> Iterator[tuple[str, int]]:
        """Yield the inputs that only this concat reads, with their byte offsets in its output."""
        offset = 0
        for name in op.inputs() if isinstance(op, Concat) else ():
            if name in self.values:
                root = self.root(name)
                if len(self.readers[root]) == 1 and root != INPUT:
                    yield root, offset
                offset += size_bytes(self.values[name])
            else:
                offset += self.constants[name].nbytes

    def plan(self) -> Plan:
        stages, stage_of = self.stages()
        order = [op for stage in stages for op in stage.ops]
        position = {op.y: i for i, op in enumerate(order)}
        last_use = last_uses(map(self.root, op.inputs()) for op in order)
        spans = [(position[stage.ops[0].y], position[stage.ops[-1].y]) for stage in stages]
        lifetimes: dict[str, tuple[int, int]] = {}
        kinds: dict[str, Literal["whole", "row", "slice"]] = {}
        for op in self.ops:
            own, name = stage_of[op.y], op.y
            reader_stages = {stage_of[reader.y] for reader, *_ in self.readers[name]}
            if name in self.sliced:
                kinds[name], lifetimes[name] = "slice", spans[own]
            elif reader_stages == {own} and name not in self.outputs:
                kinds[name] = "row"
                lifetimes[name] = position[name], last_use[name]
            else:
                # Outputs are copied at the end of the stage that writes them.
                kinds[name], lifetimes[name] = "whole", (spans[own][0], spans[max(reader_stages, default=own)][1])
        for op in self.ops:  # a concat comes after its parts and may itself be a part of another concat
            if op.y in self.concat_of:
                outer = self.concat_of[op.y][0].y
                lifetimes[outer] = min(lifetimes[op.y][0], lifetimes[outer][0]), lifetimes[outer][1]
        sizes = {name: self.bytes(name, kind) for name, kind in kinds.items()}
        overwritten = dict(self.overwrites(kinds, stage_of, position))
        for name, holder in overwritten.items():
            lifetimes[holder] = lifetimes[holder][0], max(lifetimes[holder][1], lifetimes[name][1])
        placed = [name for name in kinds if name not in self.concat_of and name not in overwritten]
        offsets, arena_bytes = plan_arena({name: sizes[name] for name in placed}, lifetimes)
        offsets |= {name: offsets[holder] for name, holder in overwritten.items()}
        for op in reversed(self.ops):
            if op.y in self.concat_of:
                outer_op, offset = self.concat_of[op.y]
                offsets[op.y] = offsets[outer_op.y] + offset
        allocations = {name: Allocation(kinds[name], sizes[name], offsets[name]) for name in kinds}
        concat_offsets = {name: offset for name, (_, offset) in self.concat_of.items()}
        # C has no empty arrays: a program without ops gets an arena of 1 byte.
        return Plan(tuple(stages), allocations, self.roots, self.sliced, concat_offsets, max(1, arena_bytes))

    def overwrites(
        self, kinds: Mapping[str, str], stage_of: dict[str, int], position: dict[str, int]
    ) -> Iterator[tuple[str, str]]:
        """Yield whole buffers that can overwrite another one, each with the buffer that held the memory first.

        A stage may write row r over row r of a buffer whose last read is an earlier op of the same stage. This keeps the
        residual stream at one offset.
        """
        first: dict[str, str] = {}
        fixed = {*self.concat_of, *(op.y for op, _ in self.concat_of.values())}
        free = [op.y for op in self.ops if kinds[op.y] == "whole" and op.y not in fixed]  # not overwritten yet

        def can_overwrite(y: str, x: str) -> bool:
            own = stage_of[y]
            left = [reader for reader in self.readers[x] if stage_of[reader[0].y] >= own]
            same = rows_of(self.values[x]) == rows_of(self.values[y]) and row_bytes(self.values[x]) == row_bytes(self.values[y])
            return same and stage_of[x] < own and len(left) > 0 and all(
                stage_of[op.y] == own and position[op.y] < position[y] and access == "row" and self.same_rows(name)
                for op, name, access in left
            )  # fmt: skip

        for y in tuple(free):
            x = next((x for x in free if can_overwrite(y, x)), None)
            if x is not None:
                free.remove(x)
                first[y] = first.get(x, x)
                yield y, first[y]

    def stages(self) -> tuple[list[Stage], dict[str, int]]:
        """Put every op into the first stage that has its inputs ready. Ops of the same level and number of rows share a stage.

        Returns the stages, and for each buffer the index of the stage that writes it.
        """
        level = {INPUT: -1}
        groups: dict[tuple[int, int, str], Stage] = {}
        keys = {}
        reader_of = {name: self.readers[name][0][0] for name in self.sliced}
        waiting: dict[str, list[AnyOp]] = {}
        for op in self.ops:
            if op.y in self.sliced:  # joins the stage of its reader
                waiting.setdefault(reader_of[op.y].y, []).append(op)
                continue
            first = 0
            slices = waiting.pop(op.y, [])
            for reader in (op, *slices):
                for name, access in accesses(reader, self.values):
                    root = self.root(name)
                    if name in self.values and root not in self.sliced:
                        first = max(first, level[root] + (0 if access == "row" and self.keeps_rows(name) else 1))
            level[op.y] = first
            keys[op.y] = first, rows_of(self.values[op.y]), op.y if isinstance(op, Concat) else ""
            stage = groups.setdefault(keys[op.y], Stage(keys[op.y][1]))
            for permute in slices:
                keys[permute.y] = keys[op.y]
            stage.ops += [*slices, op]
        order = sorted(groups)
        number = {key: i for i, key in enumerate(order)}
        return [groups[key] for key in order], {name: number[key] for name, key in keys.items()}

    def keeps_rows(self, name: str) -> bool:
        """Return whether an op that reads this buffer row by row can share a stage with the op that writes it."""
        root = self.root(name)
        if root == INPUT or root in self.stage_ends:
            return False
        return self.same_rows(name)

    def same_rows(self, name: str) -> bool:
        """Return whether a view has the same rows as the buffer that holds its values."""
        view, own = self.values[name], self.values[self.root(name)]
        return rows_of(view) == rows_of(own) and view.channels == own.channels

    def bytes(self, name: str, kind: str) -> int:
        value = self.values[name]
        if kind == "row":
            return row_bytes(value)
        if kind == "slice":
            view = self.values[self.readers[name][0][1]]
            return math.prod(view.shape[-2:]) * BYTES[value.dtype]
        return size_bytes(value)
