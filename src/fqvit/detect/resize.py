"""A detector's pyramid for images of another size: the same program with other rows, regions and shapes.

Needs no torch and no float: the program says how its moves follow from the size (Header.moves), and gives exactly the program
that lowering for that size gives. Refuses programs without moves. Neighbours: grids.py (the numbers), lower_detector.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from fqvit.errors import FqvitError
from fqvit.ir.attention import LogSoftmax, RowCodes, Softmax
from fqvit.ir.moves import Permute, Take
from fqvit.ir.program import INPUT, AnyOp, Move, Program
from fqvit.ir.value import DAMAGED, MAX_ELEMENTS, Constant, Scope, Value
from fqvit.lowering import grids

STRIDE = 32  # of the last level: sides are multiples of it


def resized(program: Program, height: int, width: int) -> Program:
    """The program for images of height x width, multiples of 32, verified."""
    header = program.header
    if not header.moves:
        raise FqvitError(f"{header.model}: has one size. Only the pyramid of a detector can be made for another one.")
    if height % STRIDE or width % STRIDE or not STRIDE <= min(height, width) <= max(height, width) <= 8192:
        raise FqvitError(f"images of {height} x {width}: sides must be multiples of {STRIDE}. Pad them.")
    resizer = _Resizer(program, height, width)
    ops = tuple(resizer.resize_op(op) for op in program.ops)
    preprocess = msgspec.structs.replace(header.preprocess, height=height, width=width)
    made = Program(msgspec.structs.replace(header, ops=ops, preprocess=preprocess), resizer.constants)
    made.verify()
    return made


class _Resizer:
    """Goes over the ops in order; knows of every buffer its shape and the rows and columns of its places."""

    def __init__(self, program: Program, height: int, width: int) -> None:
        self.moves = program.header.moves
        sized = {op.index for op in program.ops if isinstance(op, Take)}
        sized |= {op.region for op in program.ops if isinstance(op, LogSoftmax | Softmax | RowCodes) and op.region is not None}
        self.constants: dict[str, Constant] = {name: x for name, x in program.constants.items() if name not in sized}
        # At the program's own size every choice of rows is there to be compared with.
        self.stored = program.constants if (height, width) == program.input_shape[:2] else {}
        self.elements = 0  # of all that was made
        self.shared: dict[tuple[str, bytes, tuple[int, ...]], str] = {}
        self.grid = {INPUT: (height, width)}
        self.values = {INPUT: Value("u8", (height, width, program.input_shape[2]), 0, 255)}

    def resize_op(self, op: AnyOp) -> AnyOp:
        """The op at the new size."""
        x = op.inputs()[0]
        grid = self.grid.get(x)
        if grid is None:
            raise FqvitError(f"{op.y}: reads {x!r} before any op writes it. {DAMAGED}")
        move = self.moves.get(op.y)
        self.grid[op.y] = grid
        if isinstance(op, Take):
            if move is None:
                raise FqvitError(f"{op.y}: does not say how its rows follow from the image's size. {DAMAGED}")
            shape = self._shape(op.y, grid, move)
            index = self._constant("rows", op.y, op.index, shape, partial(self._rows, grid, move, shape))
            op = msgspec.structs.replace(op, index=index)
            if move.kind in ("enlarged", "second"):
                self.grid[op.y] = shape[0], shape[1]
            elif move.kind == "merge":
                self.grid[op.y] = -(-grid[0] // 2), -(-grid[1] // 2)
        elif isinstance(op, Permute):
            op = self._permute(op, grid, move)
        elif isinstance(op, LogSoftmax | Softmax | RowCodes) and op.region is not None:
            if move is None or not 0 < move.shift < move.window:
                raise FqvitError(f"{op.y}: does not say how its regions follow from the image's size. {DAMAGED}")
            shape = _windows(grid, move.window)
            made = self._constant("region", op.y, op.region, shape, partial(grids.regions, grid, move.window, move.shift))
            op = msgspec.structs.replace(op, region=made)
        self.values[op.y] = op.infer(Scope(self.values, self.constants, op.y))[0]
        return op

    def _shape(self, y: str, grid: tuple[int, int], move: Move) -> tuple[int, ...]:
        """Of the rows that a move chooses, before they are made."""
        places, half = math.prod(grid), (-(-grid[0] // 2), -(-grid[1] // 2))
        if move.kind in ("windows", "tokens") and move.shift >= move.window:
            raise FqvitError(f"{y}: windows of {move.window} shifted by {move.shift}. {DAMAGED}")
        if move.kind == "windows":
            return _windows(grid, move.window)
        if move.kind == "tokens":
            return (places,)
        if move.kind == "neighbours":
            return places, 9
        if move.kind == "enlarged" and move.of in self.grid:
            return self.grid[move.of]
        if move.kind == "merge":
            return math.prod(half), 4
        if move.kind == "second":
            return half
        raise FqvitError(f"{y}: {move.kind} is not a choice of rows. {DAMAGED}")

    def _rows(self, grid: tuple[int, int], move: Move, shape: tuple[int, ...]) -> grids.Rows:
        if move.kind == "windows":
            return grids.windows(grid, move.window, move.shift)
        if move.kind == "tokens":
            return grids.tokens(grid, move.window, move.shift)
        if move.kind == "neighbours":
            return grids.neighbours(*grid)
        if move.kind == "enlarged":
            return grids.enlarged(grid, (shape[0], shape[1]))
        return grids.merged(grid) if move.kind == "merge" else grids.every_second(*grid)

    def _constant(self, kind: str, y: str, name: str, shape: tuple[int, ...], make: Callable[[], Constant]) -> str:
        """The name of what is made. A few bytes of a file can ask for much, so it is compared with what the file has, if it is
        of this size, and bounded if not."""
        stored = self.stored.get(name)
        self._expect(y, stored is None or stored.shape == shape)
        if self.elements + math.prod(shape) > MAX_ELEMENTS:
            raise FqvitError(f"{y}: the image is too large: {MAX_ELEMENTS:,} places were chosen before. Take a smaller one.")
        array = make()
        self._expect(y, stored is None or np.array_equal(stored, array))
        return self._share(kind, array)

    def _expect(self, y: str, condition: bool) -> None:
        if not condition:
            raise FqvitError(f"{y}: what it reads does not follow from the image's size as its move says. {DAMAGED}")

    def _permute(self, op: Permute, grid: tuple[int, int], move: Move | None) -> Permute:
        """Where no move says otherwise, only the first axis follows from the size: windows, or tokens."""
        shape: tuple[int, ...] = ()
        if move is not None and move.kind == "patches" and len(op.view) == 5:
            patch, channels = op.view[1], op.view[4]
            rows, columns = self.grid[op.y] = grid[0] // patch, grid[1] // patch
            shape = (rows * columns, patch * patch * channels)
            return msgspec.structs.replace(op, view=(rows, patch, columns, patch, channels), shape=shape)
        if move is not None and move.kind == "grid" and len(op.view) == 3:
            return msgspec.structs.replace(op, view=(*grid, op.view[-1]))
        if move is not None:
            raise FqvitError(f"{op.y}: {move.kind} is no change of shape of {len(op.view)} axes. {DAMAGED}")
        first = math.prod(self.values[op.x].shape) // math.prod(op.view[1:])
        # A shape's first axis is the view's.
        if op.shape:
            shape = (first * op.shape[0] // op.view[0], *op.shape[1:])
        return msgspec.structs.replace(op, view=(first, *op.view[1:]), shape=shape)

    def _share(self, kind: str, array: Constant) -> str:
        """Names as lowering gives them: equal constants are stored once, in the order in which they are first used."""
        key = (kind, array.tobytes(), array.shape)
        if key not in self.shared:
            self.shared[key] = f"{kind}.{sum(known[0] == kind for known in self.shared)}"
            self.constants[self.shared[key]] = np.ascontiguousarray(array)
            self.elements += array.size
        return self.shared[key]


def _windows(grid: tuple[int, int], window: int) -> tuple[int, int]:
    """How many there are, and how many places each has."""
    return math.prod(-(-side // window) for side in grid), window * window
