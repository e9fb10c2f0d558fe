"""A growing ONNX graph: nodes and initializers with readable names, integers only.

A value inside an op is called `<buffer>/<what>`, a node like the value it gives. Neighbours: onnx_fixed.py (arithmetic),
onnx_ops.py, onnx_moves.py and onnx_attention.py (an emitter for each op), onnx.py (the whole).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from fqvit.errors import FqvitError
from fqvit.ir.ops import Zero
from fqvit.ir.program import Program, Verified
from fqvit.ir.value import Constant, Value

BATCH = "N"
# The only element types that a graph may have; bool is what comparisons give.
TYPES: Mapping[str, int] = {
    "bool": TensorProto.BOOL,
    "u8": TensorProto.UINT8,
    "i8": TensorProto.INT8,
    "u16": TensorProto.UINT16,
    "i16": TensorProto.INT16,
    "i32": TensorProto.INT32,
    "i64": TensorProto.INT64,
    "u64": TensorProto.UINT64,
}
NUMPY: Mapping[str, Any] = {
    "u8": np.uint8,
    "i8": np.int8,
    "u16": np.uint16,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "u64": np.uint64,
}


class OnnxGraph:
    """What emitters write to. `op` is the buffer being written; values and constants are those of the verified program.

    plain_tables: Gather in place of GatherElements, which is slow in ONNX Runtime but all that some other runtimes have.
    """

    def __init__(self, program: Program, verified: Verified, plain_tables: bool = False) -> None:
        self.plain_tables = plain_tables
        self.constants = program.constants
        self.values = verified.buffers
        self.op = ""
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self._used = {*verified.buffers, *program.constants}
        self._shared: set[str] = set()

    def node(self, kind: str, inputs: Sequence[str], label: str, **attributes: Any) -> str:
        """Adds a node with one output -> its name."""
        name = self._unique_name(f"{self.op}/{label}")
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def shared_node(self, kind: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """A node that several ops use, written by the first of them."""
        if name not in self._shared:
            self._shared.add(name)
            self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, array: Any, dtype: str, label: str) -> str:
        """An initializer of this op; without axes, one that all ops share, called by its type and value."""
        plain = np.asarray(array)
        if plain.ndim == 0:
            return self.shared_constant(plain, dtype, f"{dtype}.{int(plain)}")
        return self._initializer(self._unique_name(f"{self.op}/{label}"), plain, dtype)

    def shared_constant(self, array: Any, dtype: str, name: str) -> str:
        """An initializer that all ops share by its name."""
        return name if name in self.initializers else self._initializer(name, np.asarray(array), dtype)

    def set_output(self, name: str, y: str) -> None:
        """Gives the value `name`, if the last node made it, the buffer's own name y."""
        last = self.nodes[-1] if self.nodes else None
        if last is not None and last.output[0] == name and name.startswith(f"{y}/"):
            last.output[0] = last.name = y
        else:
            self.nodes.append(helper.make_node("Identity", [name], [y], name=y))

    def _unique_name(self, name: str) -> str:
        unique, count = name, 1
        while unique in self._used:
            count += 1
            unique = f"{name}.{count}"
        self._used.add(unique)
        return unique

    def _initializer(self, name: str, array: Constant, dtype: str) -> str:
        if name in self.values:
            raise FqvitError(f"{name!r}: a buffer of this name is in the way of a constant. Rename it, then export.")
        typed = array.astype(NUMPY[dtype])
        # Arrays of Python integers have refused by now to become too narrow; others come back the same or were.
        kept = array.dtype == object or (typed.min() < 0) == (array.min() < 0)
        assert kept and np.array_equal(typed.astype(array.dtype), array), f"{name} does not fit {dtype}"
        self.initializers[name] = numpy_helper.from_array(np.ascontiguousarray(typed).reshape(array.shape), name)
        return name

    # What nearly every emitter asks for.

    def value(self, name: str) -> Value:
        return self.values[name]

    def cast(self, x: str, dtype: str, label: str | None = None) -> str:
        return self.node("Cast", [x], label or dtype, to=TYPES[dtype])

    def reshape(self, x: str, shape: Sequence[int], label: str = "seen") -> str:
        """shape as Reshape has it: a leading 0 keeps the batch, -1 is what is left."""
        name = f"shape.{'x'.join(map(str, shape))}"
        return self.node("Reshape", [x, self.shared_constant(np.array(shape, np.int64), "i64", name)], label)

    def zero(self, zero: Zero, channels: int) -> Constant:
        """One number, or one a channel: i64 [] or [C]."""
        if isinstance(zero, str):
            return self.constants[zero].astype(np.int64)
        if isinstance(zero, int):
            return np.array(zero, np.int64)
        return np.repeat(np.array(zero, np.int64), channels // len(zero))

    def alpha(self, alpha: str | None) -> Constant:
        """2^alpha: i64 [] or [C]."""
        return np.array(1, np.int64) if alpha is None else 1 << self.constants[alpha].astype(np.int64)

    def info(self, name: str, value: Value) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TYPES[value.dtype], [BATCH, *value.shape])
