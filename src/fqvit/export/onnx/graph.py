"""Build an integer-only ONNX graph: nodes and initializers with readable, unique names.

A tensor inside an op is named `<buffer>/<label>`; a node has the name of its output. See also: fixed.py (arithmetic), ops.py,
moves.py, attention.py and elementwise.py (one emitter per op), writer.py (the whole file).
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
# The only element types in a graph. Comparisons return bool.
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
    """Collects the nodes and initializers that the emitters of ops add.

    op: the buffer that the current op writes   values, constants: those of the verified program
    plain_tables: emit table lookups as Gather instead of GatherElements: slower in ONNX Runtime, but supported everywhere
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
        """Add a node with one output and return its name."""
        name = self._unique_name(f"{self.op}/{label}")
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def shared_node(self, kind: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Return the name of a node that several ops use. The first call adds it."""
        if name not in self._shared:
            self._shared.add(name)
            self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, array: Any, dtype: str, label: str) -> str:
        """Add an initializer of this op. Scalars are shared by all ops and named by type and value."""
        plain = np.asarray(array)
        if plain.ndim == 0:
            return self.shared_constant(plain, dtype, f"{dtype}.{int(plain)}")
        return self._initializer(self._unique_name(f"{self.op}/{label}"), plain, dtype)

    def shared_constant(self, array: Any, dtype: str, name: str) -> str:
        """Return the name of an initializer that all ops share. The first call adds it."""
        return name if name in self.initializers else self._initializer(name, np.asarray(array), dtype)

    def set_output(self, name: str, y: str) -> None:
        """Make tensor `name` the buffer y: rename the last node if it wrote `name`, else add an Identity."""
        last = self.nodes[-1] if self.nodes else None
        if last is not None and last.output[0] == name and name.startswith(f"{y}/"):
            last.output[0] = last.name = y
        else:
            self.nodes.append(helper.make_node("Identity", [name], [y], name=y))

    def output(self, name: str, buffer: str) -> onnx.ValueInfoProto:
        """Return the output `name` of the graph, a copy of the buffer. Call this after all ops have been emitted.

        If another tensor already has this name, the output gets the name of its buffer.
        """
        if name in self._used or name in self.initializers or name in self._shared:
            name = buffer
        if name != buffer:
            self.nodes.append(helper.make_node("Identity", [buffer], [name], name=name))
        return self.info(name, self.values[buffer])

    def _unique_name(self, name: str) -> str:
        unique, count = name, 1
        while unique in self._used:
            count += 1
            unique = f"{name}.{count}"
        self._used.add(unique)
        return unique

    def _initializer(self, name: str, array: Constant, dtype: str) -> str:
        if name in self.values:
            raise FqvitError(
                f"{name!r}: a buffer and a constant have this name, expected unique names. Rename the buffer, then export."
            )
        typed = array.astype(NUMPY[dtype])
        # astype has already rejected Python integers that do not fit; other types must survive the round trip.
        kept = array.dtype == object or (typed.min() < 0) == (array.min() < 0)
        assert kept and np.array_equal(typed.astype(array.dtype), array), f"{name} does not fit {dtype}"
        self.initializers[name] = numpy_helper.from_array(np.ascontiguousarray(typed).reshape(array.shape), name)
        return name

    # Helpers that nearly every emitter uses

    def value(self, name: str) -> Value:
        return self.values[name]

    def cast(self, x: str, dtype: str, label: str | None = None) -> str:
        return self.node("Cast", [x], label or dtype, to=TYPES[dtype])

    def reshape(self, x: str, shape: Sequence[int], label: str = "view") -> str:
        """Reshape x. shape: as in the ONNX op Reshape, where a leading 0 keeps the batch axis and -1 is inferred."""
        name = f"shape.{'x'.join(map(str, shape))}"
        return self.node("Reshape", [x, self.shared_constant(np.array(shape, np.int64), "i64", name)], label)

    def zero(self, zero: Zero, channels: int) -> Constant:
        """Return one zero point per tensor or per channel: i64 [] or [C]."""
        if isinstance(zero, str):
            return self.constants[zero].astype(np.int64)
        if isinstance(zero, int):
            return np.array(zero, np.int64)
        return np.repeat(np.array(zero, np.int64), channels // len(zero))

    def alpha(self, alpha: str | None) -> Constant:
        """Return 2^alpha: i64 [] or [C]."""
        return np.array(1, np.int64) if alpha is None else 1 << self.constants[alpha].astype(np.int64)

    def info(self, name: str, value: Value) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TYPES[value.dtype], [BATCH, *value.shape])
