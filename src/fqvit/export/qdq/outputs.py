"""Dequantize the outputs of a program and name them in the QDQ graph.

An output is float: (integer - zero) * scale * 2^alpha[c]. See also: writer.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from onnx import TensorProto, ValueInfoProto, helper

from fqvit.errors import FqvitError
from fqvit.export.qdq.graph import QdqGraph, QuantizedTensor
from fqvit.export.qdq.scales import MOVES
from fqvit.ir.attention import LogSoftmax, RowCodes
from fqvit.ir.program import Header, Program
from fqvit.runtime.outputs import output_names


def names(header: Header) -> tuple[str, ...]:
    """Return the names of the outputs in the graph. A single output of kind pooled is called features, as in version 0.1.0."""
    found = output_names(header)
    return ("features",) if found == ("pooled",) else found


def emit_outputs(graph: QdqGraph, program: Program, tensors: Mapping[str, QuantizedTensor]) -> list[ValueInfoProto]:
    """Add the dequantized outputs to the graph, after all ops, and return their descriptions."""
    infos = []
    for name, output in zip(names(program.header), program.header.outputs, strict=True):
        _check_codes(program, output.buffer)
        tensor = tensors[output.buffer]
        alpha = np.zeros(1) if output.alpha is None else program.constants[output.alpha].astype(np.float64)
        scale = output.scale * np.exp2(alpha)
        offset = (tensor.zero - output.zero) * scale
        found = graph.scaled(tensor.name, scale / tensor.scale, offset, f"{output.buffer}.output")
        shape: list[str | int | None] = ["batch", *tensor.shape]
        infos.append(helper.make_tensor_value_info(_named(graph, found, name), TensorProto.FLOAT, shape))
    return infos


def metadata(program: Program) -> dict[str, str]:
    """Return the metadata of a QDQ file that `fqvit eval` needs to run it, including the names and kinds of all outputs."""
    header = program.header
    pairs = zip(names(header), header.outputs, strict=True)
    outputs = [{"name": name, "kind": output.kind} for name, output in pairs]
    result = {
        "fqvit.model": header.model,
        "fqvit.preprocess": msgspec.json.encode(header.preprocess).decode(),
        "fqvit.output": msgspec.json.encode(header.output).decode(),
        "fqvit.outputs": msgspec.json.encode(outputs).decode(),
        "fqvit.fingerprint": program.fingerprint(),
    }
    if program.classes is not None:
        result["fqvit.classes"] = "\n".join(program.classes)
    return result


def _check_codes(program: Program, buffer: str) -> None:
    """Raise FqvitError if the buffer holds attention codes.

    In the QDQ graph its tensor holds attention weights, and no scale and zero point convert these back to codes.
    """
    ops = {op.y: op for op in program.ops}
    op = ops.get(buffer)
    while isinstance(op, MOVES):
        op = ops.get(op.inputs()[0])
    if isinstance(op, LogSoftmax | RowCodes):
        raise FqvitError(
            f"{buffer}: attention codes as an output, which QDQ ONNX cannot express. Export with --to onnx instead."
        )


def _named(graph: QdqGraph, x: str, name: str) -> str:
    """Give tensor x the name of an output, with `.output` appended if another tensor has that name; return the name."""
    if x != name:
        taken = {*graph.constants, *(y for node in graph.nodes for y in node.output)}
        while name in taken:
            name = f"{name}.output"
        graph.node("Identity", [x], name)
    return name
