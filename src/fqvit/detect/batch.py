"""Batch the program of a detector's head: one program that runs several RoIs (regions of interest) in larger matrix products.

RoIs are concatenated along the first axis, and so is everything computed from them; a vector per RoI becomes a row of a map
[1, count, O]. A fully connected layer is then one matrix product instead of one matrix-vector product per RoI. The batched
program has the same ops and needs no torch. Programs that take pixels are rejected.
See also: fixed/head_runner.py, which runs batched programs.
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
from fqvit.ir.value import DAMAGED, MAX_ELEMENTS, Constant, Value


def batched(program: Program, count: int) -> Program:
    """Return the verified program of the head for `count` RoIs. Its input is u8 codes [count * side, side, C].

    An output [h, w, O] becomes [count * h, w, O]; an output [O] becomes [1, count, O], of kind `scores` instead of `logits`. In
    memory, both are the outputs of the RoIs one after the other.
    """
    header = program.header
    if header.input is None:
        raise FqvitError(f"{header.model}: takes pixels, expected a detector's head, which takes RoI features.")
    if count < 1:
        raise FqvitError(f"{header.model}: a batch of {count} RoIs, expected 1 or more.")
    buffers = program.verify().buffers
    sized = {op.index for op in program.ops if isinstance(op, Take)}
    constants: dict[str, Constant] = {name: array for name, array in program.constants.items() if name not in sized}
    ops: list[AnyOp] = []
    for op in program.ops:
        if isinstance(op, Take):
            rows = math.prod(buffers[op.x].shape[:-1])
            name = f"{op.index}.of{rows}"  # the same index may read maps of different sizes
            if name not in constants:
                constants[name] = _repeated(program.constants[op.index], rows, count)
            ops.append(msgspec.structs.replace(op, index=name))
        elif isinstance(op, Permute):
            ops.append(_permute(op, count))
        elif isinstance(op, Linear):  # acts on each row
            ops.append(op)
        else:
            _reject(op)
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
    """Repeat the index once per RoI, offset by the first row of that RoI; -1 stays -1."""
    if rows * count >= MAX_ELEMENTS or index.size * count >= MAX_ELEMENTS:
        raise FqvitError(f"a batch of {count} RoIs: too many elements for one buffer. Use a smaller batch.")
    starts = np.arange(count, dtype=np.int64).reshape(-1, *(1,) * index.ndim) * rows
    moved = np.where(index < 0, -1, index + starts).astype(np.int32)
    return moved.reshape(-1, *index.shape[1:])


def _permute(op: Permute, count: int) -> Permute:
    """Extend the op to all RoIs. RoIs are concatenated along the first axis, so the op must keep that axis first."""
    if op.perm[0] != 0 or (op.select is not None and op.select[0] == 0):
        _reject(op)
    if len(op.view) == 1 and not op.shape:
        return msgspec.structs.replace(op, view=(1, count, *op.view), perm=(0, 1, 2))
    if len(op.view) == 1 or len(op.shape) == 1:
        _reject(op)
    shape = (count * op.shape[0], *op.shape[1:]) if op.shape else ()
    return msgspec.structs.replace(op, view=(count * op.view[0], *op.view[1:]), shape=shape)


def _reject(op: AnyOp) -> NoReturn:
    raise FqvitError(f"{op.y}: this op cannot run on a batch of RoIs, expected an op of a detector's head. {DAMAGED}")


def _output(output: Output, buffers: Mapping[str, Value]) -> Output:
    vector = len(buffers[output.buffer].shape) == 1
    return msgspec.structs.replace(output, kind="scores") if output.kind == "logits" and vector else output
