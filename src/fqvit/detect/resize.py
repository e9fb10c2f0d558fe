"""Derive a pyramid's program for another image size: the same ops and weights with new row indices, regions and shapes.

Needs no torch and no floats: Header.moves says how the indices of each op follow from the image size. The result equals the
program that lowering for that size gives. Programs without moves are rejected.
See also: lowering/grids.py (the indices), lower.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from fqvit.errors import FqvitError
from fqvit.ir.attention import LogSoftmax, RowCodes, Softmax
from fqvit.ir.elementwise import Depthwise
from fqvit.ir.moves import Permute, Take
from fqvit.ir.program import INPUT, AnyOp, Move, Program
from fqvit.ir.value import DAMAGED, MAX_ELEMENTS, Constant, Scope, Value
from fqvit.lowering import grids

STRIDE = 32  # of the last backbone stage: sides of images are multiples of this


def resized(program: Program, height: int, width: int) -> Program:
    """Return the verified program for images of height x width, both multiples of 32."""
    header = program.header
    if not header.moves:
        raise FqvitError(f"{header.model}: has a fixed image size. Only the pyramid of a detector can be resized.")
    if height % STRIDE or width % STRIDE or not STRIDE <= min(height, width) <= max(height, width) <= 8192:
        raise FqvitError(
            f"image of {height} x {width}: expected sides that are multiples of {STRIDE} up to 8192. Pad the image."
        )
    resizer = _Resizer(program, height, width)
    ops = tuple(resizer.resize_op(op) for op in program.ops)
    preprocess = msgspec.structs.replace(header.preprocess, height=height, width=width)
    made = Program(msgspec.structs.replace(header, ops=ops, preprocess=preprocess), resizer.constants)
    made.verify()
    return made


class _Resizer:
    """Resize the ops in order. grid: rows and columns of each buffer's positions   values: type and shape of each buffer"""

    def __init__(self, program: Program, height: int, width: int) -> None:
        self.moves = program.header.moves
        sized = {op.index for op in program.ops if isinstance(op, Take)}
        sized |= {op.region for op in program.ops if isinstance(op, LogSoftmax | Softmax | RowCodes) and op.region is not None}
        self.constants: dict[str, Constant] = {name: x for name, x in program.constants.items() if name not in sized}
        # At the program's own size, new indices are compared with the stored ones.
        self.stored = program.constants if (height, width) == program.input_shape[:2] else {}
        self.elements = 0  # total number of elements in the constants made so far
        self.shared: dict[tuple[str, bytes, tuple[int, ...]], str] = {}
        self.grid = {INPUT: (height, width)}
        self.values = {INPUT: Value("u8", (height, width, program.input_shape[2]), 0, 255)}

    def resize_op(self, op: AnyOp) -> AnyOp:
        """Return the op at the new size."""
        x = op.inputs()[0]
        grid = self.grid.get(x)
        if grid is None:
            raise FqvitError(f"{op.y}: reads {x!r} before any op writes it. {DAMAGED}")
        move = self.moves.get(op.y)
        self.grid[op.y] = grid
        if isinstance(op, Take | Depthwise):
            if move is None or isinstance(op, Depthwise):
                raise FqvitError(f"{op.y}: no move says how its row indices follow from the image size. {DAMAGED}")
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
                raise FqvitError(f"{op.y}: no move says how its regions follow from the image size. {DAMAGED}")
            shape = _windows(grid, move.window)
            made = self._constant("region", op.y, op.region, shape, partial(grids.regions, grid, move.window, move.shift))
            op = msgspec.structs.replace(op, region=made)
        self.values[op.y] = op.infer(Scope(self.values, self.constants, op.y))[0]
        return op

    def _shape(self, y: str, grid: tuple[int, int], move: Move) -> tuple[int, ...]:
        """Return the shape of a move's row indices before they are computed, to bound their size."""
        positions, half = math.prod(grid), (-(-grid[0] // 2), -(-grid[1] // 2))
        if move.kind in ("windows", "tokens") and move.shift >= move.window:
            raise FqvitError(f"{y}: windows of {move.window} shifted by {move.shift}, expected a smaller shift. {DAMAGED}")
        if move.kind == "windows":
            return _windows(grid, move.window)
        if move.kind == "tokens":
            return (positions,)
        if move.kind == "neighbours":
            return positions, 9
        if move.kind == "enlarged" and move.of in self.grid:
            return self.grid[move.of]
        if move.kind == "merge":
            return math.prod(half), 4
        if move.kind == "second":
            return half
        raise FqvitError(f"{y}: move {move.kind!r} does not select rows. {DAMAGED}")

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
        """Make a constant and return its name.

        A small file can ask for large constants: their total size is bounded, and at the program's own size each must equal
        the stored one.
        """
        stored = self.stored.get(name)
        self._expect(y, stored is None or stored.shape == shape)
        if self.elements + math.prod(shape) > MAX_ELEMENTS:
            raise FqvitError(f"{y}: the image is too large: it needs more than {MAX_ELEMENTS:,} indices. Use a smaller one.")
        array = make()
        self._expect(y, stored is None or np.array_equal(stored, array))
        return self._share(kind, array)

    def _expect(self, y: str, condition: bool) -> None:
        if not condition:
            raise FqvitError(f"{y}: its stored indices differ from those that its move gives. {DAMAGED}")

    def _permute(self, op: Permute, grid: tuple[int, int], move: Move | None) -> Permute:
        """Return the op at the new size. Without a move, only its first axis (windows or tokens) depends on the image size."""
        shape: tuple[int, ...] = ()
        if move is not None and move.kind == "patches" and len(op.view) == 5:
            patch, channels = op.view[1], op.view[4]
            rows, columns = self.grid[op.y] = grid[0] // patch, grid[1] // patch
            shape = (rows * columns, patch * patch * channels)
            return msgspec.structs.replace(op, view=(rows, patch, columns, patch, channels), shape=shape)
        if move is not None and move.kind == "grid" and len(op.view) == 3:
            return msgspec.structs.replace(op, view=(*grid, op.view[-1]))
        if move is not None:
            raise FqvitError(f"{op.y}: move {move.kind!r} does not reshape a view of {len(op.view)} axes. {DAMAGED}")
        first = math.prod(self.values[op.x].shape) // math.prod(op.view[1:])
        # The first axis of the shape scales with that of the view.
        if op.shape:
            shape = (first * op.shape[0] // op.view[0], *op.shape[1:])
        return msgspec.structs.replace(op, view=(first, *op.view[1:]), shape=shape)

    def _share(self, kind: str, array: Constant) -> str:
        """Store a constant under the name that lowering would give it: equal ones are stored once, numbered by first use."""
        key = (kind, array.tobytes(), array.shape)
        if key not in self.shared:
            self.shared[key] = f"{kind}.{sum(known[0] == kind for known in self.shared)}"
            self.constants[self.shared[key]] = np.ascontiguousarray(array)
            self.elements += array.size
        return self.shared[key]


def _windows(grid: tuple[int, int], window: int) -> tuple[int, int]:
    """Return the number of windows and the number of positions per window."""
    return math.prod(-(-side // window) for side in grid), window * window
