"""Write every op as an initializer of its C struct in templates/fqvit_ops.h.

See also: emit.py, which writes the calls.
"""

from __future__ import annotations

import math
from functools import singledispatchmethod

import numpy as np

from fqvit.export.c.text import Arrays
from fqvit.ir.attention import Attend, LogSoftmax, MatMul, RowCodes, ShiftMatMul, Softmax
from fqvit.ir.elementwise import Depthwise, Max, Multiply, Rotary
from fqvit.ir.moves import Permute, Take
from fqvit.ir.ops import Add, LayerNorm, Linear, Lookup, Mean, Op, Term, Zero
from fqvit.ir.packing import exponent_levels
from fqvit.ir.program import Program, Verified
from fqvit.ir.value import NAMES, Constant

OUTS = {"codes": "FQVIT_CODES", "acc": "FQVIT_ACC", "i32": "FQVIT_INTEGERS"}
STRUCTS = {
    Lookup: "lookup", Linear: "linear", LayerNorm: "layernorm", Add: "add", Mean: "mean", Take: "take", Permute: "permute",
    MatMul: "matmul", LogSoftmax: "softmax", Softmax: "softmax", RowCodes: "softmax", ShiftMatMul: "context", Attend: "context",
    Multiply: "multiply", Rotary: "rotary", Depthwise: "depthwise", Max: "max",
}  # fmt: skip
Fields = dict[str, object]  # in the order of the struct; omitted fields are 0 or NULL


class Structs:
    """Builds struct initializers and collects the arrays that they point to."""

    def __init__(self, program: Program, verified: Verified, arrays: Arrays) -> None:
        self.constants, self.values, self.arrays = program.constants, verified.buffers, arrays

    def of(self, op: Op) -> tuple[str, Fields]:
        """Return the name of the op's struct and its fields."""
        return STRUCTS[type(op)], {name: value for name, value in self.fields(op).items() if value is not None}

    def type(self, name: str) -> str:
        return f"FQVIT_{self.values[name].dtype.upper()}"

    def channels(self, name: str) -> int:
        return self.values[name].channels

    def constant(self, name: str) -> str:
        return self.arrays.add(name, self.constants[name])

    def named(self, name: str | None) -> str | None:
        return None if name is None else self.constant(name)

    def zero(self, owner: str, zero: Zero, channels: int) -> str:
        if isinstance(zero, str):
            many = self.arrays.add(zero, self.constants[zero].astype(np.uint16))
            return f"{{.many = {many}, .group = 1}}"
        if isinstance(zero, tuple):
            many = self.arrays.add(owner, np.array(zero, np.uint16))
            return f"{{.many = {many}, .group = {channels // len(zero)}}}"
        return f"{{.one = {zero}}}"

    def table(self, op: Op) -> Constant:
        return self.constants[op.part("table")]

    @singledispatchmethod
    def fields(self, op: Op) -> Fields:
        raise AssertionError(f"no struct for {type(op).__name__}")

    @fields.register
    def _(self, op: Lookup) -> Fields:
        fields: Fields = {"x": self.type(op.x), "y": self.type(op.y), "channels": self.channels(op.y)}
        table = op.part("table")
        fields |= {"table": self.constant(table), "entry": f"FQVIT_{NAMES[self.constants[table].dtype].upper()}"}
        if op.alpha is not None:
            zeros = self.arrays.add(op.part("y_zero"), np.array(op.y_zero, np.uint16))
            fields |= {"alpha": self.constant(op.alpha), "y_zero": zeros, "last": (1 << op.bits) - 1}
        return fields

    @fields.register
    def _(self, op: Linear) -> Fields:
        inputs, outputs = self.channels(op.x), self.channels(op.y)
        fields: Fields = {"x": self.type(op.x), "y": self.type(op.y), "out": OUTS[op.out], "inputs": inputs, "outputs": outputs}
        w = self.constant(op.part("w"))
        if op.packed:
            fields |= {"packed": w, "width": op.weight_bits}
            if op.codebooks:
                fields |= {"choice": self.constant(op.part("choice")), "levels": self.constant(op.part("codebooks"))}
            elif op.group:
                levels = self.arrays.add(f"exponents of {op.weight_bits} bits", exponent_levels(op.weight_bits))
                fields |= {"choice": self.constant(op.part("exponent")), "levels": levels}
            if op.group:
                fields["group"] = op.group
        else:
            fields["w"] = w
        fields["bias"] = self.constant(op.part("bias"))
        if op.out != "acc":
            fields["mult"] = self.arrays.add(op.part("mult"), self.constants[op.part("mult")].astype(np.int32))
            fields["shift"] = self.constant(op.part("shift"))
        if op.out == "codes":
            fields |= {"y_zero": self.zero(op.part("y_zero"), op.y_zero, outputs), "last": (1 << op.bits) - 1}
        return fields

    @fields.register
    def _(self, op: LayerNorm) -> Fields:
        channels = self.channels(op.x)
        return {
            "x": self.type(op.x), "y": self.type(op.y), "channels": channels,
            "epsilon": f"INT64_C({op.epsilon})", "shift": op.shift, "b_shift": op.b_shift,
            "fraction": op.fraction, "zero": self.zero(op.part("zero"), op.zero, channels), "alpha": self.named(op.alpha),
            "affine": self.constant(op.part("affine")), "last": (1 << op.bits) - 1, "uncentered": None if op.center else 1,
        }  # fmt: skip

    @fields.register
    def _(self, op: Add) -> Fields:
        channels = self.channels(op.y)
        terms = ", ".join(self.term(op.part(f"zero{i}"), term, channels) for i, term in enumerate(op.terms))
        return {
            "y": self.type(op.y), "channels": channels, "terms": f"{{{terms}}}", "shift": op.shift,
            "y_alpha": self.named(op.y_alpha), "y_zero": self.zero(op.part("y_zero"), op.y_zero, channels),
            "last": (1 << op.bits) - 1,
        }  # fmt: skip

    def term(self, owner: str, term: Term, channels: int) -> str:
        fields: Fields = {}
        if term.x in self.values:
            fields["type"] = self.type(term.x)
        else:
            x = self.constants[term.x]
            if x.ndim == 0:
                x = np.repeat(x, channels)
            fields |= {"type": f"FQVIT_{NAMES[x.dtype].upper()}", "constant": self.arrays.add(term.x, x)}
            fields["rows"] = x.size // channels
        fields["mult" if isinstance(term.mult, int) else "mults"] = (
            term.mult if isinstance(term.mult, int) else self.constant(term.mult)
        )
        fields["zero"] = self.zero(owner, term.zero, channels)
        if term.alpha is not None:
            fields["alpha"] = self.constant(term.alpha)
        return initializer(fields)

    @fields.register
    def _(self, op: Mean) -> Fields:
        rows, channels = self.values[op.x].shape[-2:]
        return {
            "x": self.type(op.x), "y": self.type(op.y), "rows": rows, "skip": op.skip, "channels": channels,
            "mult": op.mult, "shift": op.shift, "zero": self.zero(op.part("zero"), op.zero, channels),
            "alpha": self.named(op.alpha), "y_zero": op.y_zero, "last": (1 << op.bits) - 1,
        }  # fmt: skip

    @fields.register
    def _(self, op: Take) -> Fields:
        channels = self.channels(op.x)
        fill = self.zero(op.part("fill"), op.fill, channels)
        return {"x": self.type(op.x), "channels": channels, "index": self.constant(op.index), "fill": fill}

    @fields.register
    def _(self, op: Permute) -> Fields:
        strides = [math.prod(op.view[axis + 1 :]) for axis in range(len(op.view))]
        sizes, offset = list(op.view), 0
        if op.select is not None:
            axis, index = op.select
            offset = strides.pop(axis) * index
            del sizes[axis]
        merged: list[tuple[int, int]] = []  # axes that stay adjacent become one
        for axis in op.perm:
            size, stride = sizes[axis], strides[axis]
            if merged and merged[-1][1] == size * stride:
                merged[-1] = merged[-1][0] * size, stride
            elif size > 1:
                merged.append((size, stride))
        merged = merged or [(1, 1)]
        lists = [f"{{{', '.join(str(pair[i]) for pair in merged)}}}" for i in (0, 1)]
        width = {"u8": 1, "u16": 2, "i32": 4}[self.values[op.x].dtype]
        return {"bytes": width, "axes": len(merged), "offset": offset, "size": lists[0], "stride": lists[1]}

    @fields.register
    def _(self, op: MatMul) -> Fields:
        a, y = self.values[op.a].shape, self.values[op.y].shape
        fields: Fields = {"a": self.type(op.a), "b": self.type(op.b), "y": self.type(op.y)}
        per_head = op.index is not None or isinstance(op.mult, str)
        fields |= {"rows": y[-2], "columns": y[-1], "inner": a[-1], "heads": y[-3] if per_head else None}
        fields |= {"b_rows": int(op.b_rows), "a_zero": op.a_zero, "b_zero": op.b_zero}
        fields |= {"mult": op.mult} if isinstance(op.mult, int) else {"mults": self.constant(op.mult)}
        fields["shift"] = op.shift
        if op.index is not None:
            wide = self.constants[op.index].dtype == np.int32
            fields |= {"bias": self.constant(op.part("bias")), "wide_index" if wide else "index": self.constant(op.index)}
        return fields | {"y_zero": op.y_zero, "last": (1 << op.bits) - 1}

    @fields.register
    def _(self, op: LogSoftmax) -> Fields:
        return self.softmax(op, op.x, op.region) | {"last": (1 << op.bits) - 1}

    @fields.register
    def _(self, op: Softmax) -> Fields:
        own: Fields = {"mult": f"INT64_C({op.mult})", "shift": op.shift, "last": (1 << op.bits) - 1}
        return self.softmax(op, op.x, op.region) | own

    @fields.register
    def _(self, op: RowCodes) -> Fields:
        return self.softmax(op, op.x, op.region)

    def softmax(self, op: Op, x: str, region: str | None) -> Fields:
        shape = self.values[x].shape
        fields: Fields = {"x": self.type(x), "y": self.type(op.y), "tokens": shape[-1]}
        fields |= {"table": self.constant(op.part("table")), "length": self.table(op).size}
        if region is not None:
            fields |= {"region": self.constant(region), "window_rows": shape[-3] * shape[-2]}
        return fields

    @fields.register
    def _(self, op: ShiftMatMul) -> Fields:
        last = (1 << op.a_bits) - 1
        levels = [1 << (last - code) for code in range(last + 1)]
        if op.zero_code:
            levels[last] = 0
        return self.context(op, levels, 0)

    @fields.register
    def _(self, op: Attend) -> Fields:
        levels = list(op.levels) or list(range(256))
        return self.context(op, levels, max(levels))

    def context(self, op: ShiftMatMul | Attend, levels: list[int], largest: int) -> Fields:
        tokens, width = self.values[op.v].shape[-2:]
        array = self.arrays.add(op.part("levels"), np.array(levels, np.uint16))
        return {
            "v": self.type(op.v), "y": self.type(op.y), "tokens": tokens, "width": width, "levels": array,
            "largest": largest, "v_zero": op.v_zero, "mult": op.mult, "shift": op.shift, "y_zero": op.y_zero,
            "last": (1 << op.bits) - 1,
        }  # fmt: skip

    @fields.register
    def _(self, op: Multiply) -> Fields:
        return {
            "a": self.type(op.a), "b": self.type(op.b), "y": self.type(op.y), "channels": self.channels(op.y),
            "a_zero": op.a_zero, "b_zero": op.b_zero, "mult": op.mult, "shift": op.shift, "y_zero": op.y_zero,
            "last": (1 << op.bits) - 1,
        }  # fmt: skip

    @fields.register
    def _(self, op: Rotary) -> Fields:
        table = op.part("table")
        _, tokens, period = self.constants[table].shape
        return {
            "x": self.type(op.x), "y": self.type(op.y), "channels": self.channels(op.y), "tokens": tokens, "period": period,
            "table": self.constant(table), "partner": self.arrays.add(op.partner, self.constants[op.partner].astype(np.int32)),
            "zero": op.zero, "mult": op.mult, "shift": op.shift, "y_zero": op.y_zero, "last": (1 << op.bits) - 1,
        }  # fmt: skip

    @fields.register
    def _(self, op: Depthwise) -> Fields:
        channels = self.channels(op.y)
        mult = self.arrays.add(op.part("mult"), self.constants[op.part("mult")].astype(np.int32))
        return {
            "x": self.type(op.x), "y": self.type(op.y), "channels": channels, "taps": self.constants[op.part("w")].shape[0],
            "index": self.constant(op.index), "fill": self.zero(op.part("fill"), op.fill, channels),
            "w": self.constant(op.part("w")), "bias": self.constant(op.part("bias")), "mult": mult,
            "shift": self.constant(op.part("shift")), "y_zero": self.zero(op.part("y_zero"), op.y_zero, channels),
            "last": (1 << op.bits) - 1,
        }  # fmt: skip

    @fields.register
    def _(self, op: Max) -> Fields:
        rows, channels = self.values[op.x].shape[-2:]
        return {"x": self.type(op.x), "rows": rows, "channels": channels}


def initializer(fields: Fields) -> str:
    return f"{{{', '.join(f'.{name} = {value}' for name, value in fields.items())}}}"
