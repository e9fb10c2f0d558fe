"""The integer ops that move values and change none: rows by number, axes, rows one after the other. Same rules as ops.py."""

from __future__ import annotations

import math

from fqvit.ir.fixed import Array
from fqvit.ir.kit import Kit
from fqvit.ir.ops import Get, Op, Zero, zero_point
from fqvit.ir.value import MAX_AXES, Proof, Scope, Value


class Take(Op, frozen=True, tag="take"):
    """y[i...] = x[index[i...]], a whole row of channels each; index -1 gives `fill` (the zero point).

    x: any [..., C], its leading axes seen as one list of rows   index: i32 [...]   y: [*index.shape, C]
    """

    x: str
    index: str
    fill: Zero = 0

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        x = scope.buffer(self.x, ("u8", "u16", "i32"), 2)
        if self.index not in scope.constants:
            scope.fail(f"constant {self.index!r} is missing")
        index = scope.constant(self.index, ("i32",), (None,) * scope.constants[self.index].ndim)
        rows = math.prod(x.shape[:-1])
        scope.check(int(index.min()) >= -1 and int(index.max()) < rows, f"constant {self.index!r} points outside {rows} rows")
        lo, hi = scope.zero(self.fill, x.channels)
        scope.check(x.lo <= lo and hi <= x.hi, f"fill is outside {x.lo}..{x.hi}")
        return Value(x.dtype, (*index.shape, x.channels), x.lo, x.hi, masked=x.masked), []

    def run(self, kit: Kit, get: Get) -> Array:
        x, index = get(self.x), kit.wide(get(self.index))
        rows = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
        # -1 must not wrap around to the last row.
        taken = kit.wide(rows[:, index.clip(0, None)])
        return kit.narrow(kit.where((index >= 0)[..., None], taken, zero_point(kit, get, self.fill, x.shape[-1])), _dtype_of(x))


class Permute(Op, frozen=True, tag="permute"):
    """y = x.reshape(view)[select].transpose(perm).reshape(shape), values unchanged

    select: (axis, index) keeps one index of that axis of `view` and drops the axis; perm counts the axes left.
    shape may be left out where it is what the transposition gives.
    """

    x: str
    view: tuple[int, ...]
    perm: tuple[int, ...]
    shape: tuple[int, ...] = ()
    select: tuple[int, int] | None = None

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        x = scope.buffer(self.x, ("u8", "u16", "i32"))
        scope.check(
            min(self.view, default=0) > 0 and math.prod(self.view) == math.prod(x.shape),
            f"view {list(self.view)} does not fit {list(x.shape)}",
        )
        scope.check(len(self.view) <= MAX_AXES, f"view has {len(self.view)} axes, at most {MAX_AXES}")
        left = list(self.view)
        if self.select is not None:
            axis, index = self.select
            scope.check(0 <= axis < len(left) and 0 <= index < left[axis], f"select {list(self.select)} is outside the view")
            del left[axis]
        scope.check(
            sorted(self.perm) == list(range(len(left))), f"perm {list(self.perm)} is not a permutation of {len(left)} axes"
        )
        shape = self.shape or tuple(left[axis] for axis in self.perm)
        scope.check(min(shape, default=0) > 0 and math.prod(shape) == math.prod(left), f"shape {list(shape)} does not fit")
        return Value(x.dtype, shape, x.lo, x.hi, masked=x.masked), []

    def run(self, kit: Kit, get: Get) -> Array:
        x = get(self.x)
        x = x.reshape(x.shape[0], *self.view)
        if self.select is not None:
            axis, index = self.select
            x = x[(slice(None),) * (axis + 1) + (index,)]
        y = kit.permute(x, (0, *(axis + 1 for axis in self.perm)))
        return y.reshape(x.shape[0], *self.shape) if self.shape else y


class Concat(Op, frozen=True, tag="concat"):
    """y = the rows of every x in turn; an x may be a constant (the class token).

    xs: [T_i, C] each, of one type   y: [sum T_i, C]
    """

    xs: tuple[str, ...]

    def inputs(self) -> tuple[str, ...]:
        return self.xs

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        scope.check(any(name in scope.buffers for name in self.xs), "joins no buffer")
        values = [scope.either(name, ("u8", "u16", "i32")) for name in self.xs]
        first = values[0]
        for name, value in zip(self.xs, values, strict=True):
            scope.check(
                len(value.shape) == 2 and value.dtype == first.dtype and value.channels == first.channels,
                f"{name!r} does not fit the others",
            )
        shape = (sum(value.shape[0] for value in values), first.channels)
        masked = any(v.masked for v in values)
        return Value(first.dtype, shape, min(v.lo for v in values), max(v.hi for v in values), masked=masked), []

    def run(self, kit: Kit, get: Get) -> Array:
        arrays = [get(name) for name in self.xs]
        images = max(x.shape[0] for x in arrays if len(x.shape) == 3)
        return kit.concat([x if len(x.shape) == 3 else kit.repeat(x, images) for x in arrays], 1)


def _dtype_of(x: Array) -> str:
    return {"uint8": "u8", "uint16": "u16", "int32": "i32"}[str(x.dtype).removeprefix("torch.")]
