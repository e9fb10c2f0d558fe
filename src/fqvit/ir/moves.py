"""Define the integer ops that move values unchanged: take, permute and concat.

The notation is that of ops.py.
"""

from __future__ import annotations

import math

from fqvit.ir.fixed import Array
from fqvit.ir.kit import Kit
from fqvit.ir.ops import Get, Op, Zero, zero_point
from fqvit.ir.value import MAX_AXES, Int, Proof, Scope, Value


class Take(Op, frozen=True, tag="take"):
    """y[i..., :] = rows[index[i...], :], where rows is x with its leading axes flattened; index -1 gives the row `fill`

    x: u8, u16 or i32 [..., C]   index: i32 [...], each -1 or a row number   y: dtype of x, [*index.shape, C]
    fill: the zero point of x, so that padding has the value 0
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
        # Index -1 must not wrap around to the last row.
        taken = kit.wide(rows[:, index.clip(0, None)])
        return kit.narrow(kit.where((index >= 0)[..., None], taken, zero_point(kit, get, self.fill, x.shape[-1])), _dtype_of(x))


class Permute(Op, frozen=True, tag="permute"):
    """y = x.reshape(view)[select].transpose(perm).reshape(shape)

    x: u8, u16 or i32, any shape   y: dtype of x
    select: (axis, index) keeps one index of an axis of `view` and removes that axis; perm numbers the remaining axes.
    shape: empty if the transposed shape is the final one.
    """

    x: str
    view: tuple[Int, ...]
    perm: tuple[Int, ...]
    shape: tuple[Int, ...] = ()
    select: tuple[Int, Int] | None = None

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
        scope.check(
            min(shape, default=0) > 0 and math.prod(shape) == math.prod(left), f"shape {list(shape)} does not fit {list(left)}"
        )
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
    """y = the rows of all xs, concatenated along the first axis

    xs: u8, u16 or i32 [T_i, C], all of one dtype; some may be constants (the class token)   y: same dtype, [sum T_i, C]
    """

    xs: tuple[str, ...]

    def inputs(self) -> tuple[str, ...]:
        return self.xs

    def infer(self, scope: Scope) -> tuple[Value, list[Proof]]:
        scope.check(any(name in scope.buffers for name in self.xs), "concatenates only constants, expected at least one buffer")
        values = [scope.either(name, ("u8", "u16", "i32")) for name in self.xs]
        first = values[0]
        for name, value in zip(self.xs, values, strict=True):
            scope.check(
                len(value.shape) == 2 and value.dtype == first.dtype and value.channels == first.channels,
                f"{name!r} does not match the dtype and channels of {self.xs[0]!r}",
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
