"""A detector head's program for several squares at once: one program whose products have that many times the rows.

The squares lie one after the other along the first axis, and so does everything made of them; a vector of each square becomes a
row of a map of one line. A fully connected layer is then one product of matrices instead of one with a vector for each square.
Needs no torch and no op of its own. Refuses programs that take pixels. Neighbours: resize.py;
fqvit.detect.fixed.head_runner (who runs it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn

import msgspec
import numpy as np

from fqvit.errors import FqvitError
from fqvit.ir.moves import Permute, Take
from fqvit.ir.ops import Linear
from fqvit.ir.program import AnyOp, Output, Program
from fqvit.ir.value import MAX_ELEMENTS, Constant, Value


def batched(program: Program, count: int) -> Program:
    """The head for `count` squares, verified: codes [count side, side, C] in.

    An output [h, w, O] becomes [count h, w, O]; one [O] becomes [1, count, O], and logits are called scores then. In memory
    both are the outputs of the squares one after the other.
    """
    header = program.header
    if header.input is None:
        raise FqvitError(f"{header.model}: takes pixels; only a detector's head runs on several squares at once.")
    if count < 1:
        raise FqvitError(f"{header.model}: {count} squares at once, expected 1 or more.")
    buffers = program.verify().buffers
    sized = {op.index for op in program.ops if isinstance(op, Take)}
    constants: dict[str, Constant] = {name: array for name, array in program.constants.items() if name not in sized}
    ops: list[AnyOp] = []
    for op in program.ops:
        if isinstance(op, Take):
            rows = math.prod(buffers[op.x].shape[:-1])
            name = f"{op.index}.of{rows}"  # two maps may be read by one index
            if name not in constants:
                constants[name] = _repeated(program.constants[op.index], rows, count)
            ops.append(msgspec.structs.replace(op, index=name))
        elif isinstance(op, Permute):
            ops.append(_permute(op, count))
        elif isinstance(op, Linear):  # of each row
            ops.append(op)
        else:
            _refuse(op)
    height, width, channels = header.input.shape
    changed = msgspec.structs.replace(
        header,
        ops=tuple(ops),
        input=msgspec.structs.replace(header.input, shape=(count * height, width, channels)),
        output=_output(header.output, buffers),
        others=tuple(_output(output, buffers) for output in header.others),
    )
    made = Program(changed, constants)
    made.verify()
    return made


def _repeated(index: Constant, rows: int, count: int) -> Constant:
    """The index once a square, each time among its own rows; -1 stays."""
    if rows * count >= MAX_ELEMENTS or index.size * count >= MAX_ELEMENTS:
        raise FqvitError(f"{count} squares at once are too many. Take fewer.")
    starts = np.arange(count, dtype=np.int64).reshape(-1, *(1,) * index.ndim) * rows
    moved = np.where(index < 0, -1, index + starts).astype(np.int32)
    return moved.reshape(-1, *index.shape[1:])


def _permute(op: Permute, count: int) -> Permute:
    """Squares stay the outermost axis, so the first axis of each must stay where it is."""
    if op.perm[0] != 0 or (op.select is not None and op.select[0] == 0):
        _refuse(op)
    if len(op.view) == 1 and not op.shape:
        return msgspec.structs.replace(op, view=(1, count, *op.view), perm=(0, 1, 2))
    if len(op.view) == 1 or len(op.shape) == 1:
        _refuse(op)
    shape = (count * op.shape[0], *op.shape[1:]) if op.shape else ()
    return msgspec.structs.replace(op, view=(count * op.view[0], *op.view[1:]), shape=shape)


def _refuse(op: AnyOp) -> NoReturn:
    raise FqvitError(f"{op.y}: no head of a detector has this op; it does not run on several squares at once.")


def _output(output: Output, buffers: Mapping[str, Value]) -> Output:
    vector = len(buffers[output.buffer].shape) == 1
    return msgspec.structs.replace(output, kind="scores") if output.kind == "logits" and vector else output
