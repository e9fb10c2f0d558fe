"""Write a program as one ONNX file of standard integer ops that matches the reference bit for bit.

Every op becomes a small subgraph that ends in the tensor of its buffer. Ops are not fused, so every buffer can be inspected.
Preprocessing, class names and other header fields become metadata with keys `fqvit.*`, which runtime/onnx.py reads.
Writing needs the package onnx; running needs only onnxruntime. See also: docs/reference/onnx.md (subgraph of every op).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import onnx
from onnx import helper

from fqvit.export.onnx import attention as onnx_attention
from fqvit.export.onnx import elementwise as onnx_elementwise
from fqvit.export.onnx import moves as onnx_moves
from fqvit.export.onnx import ops as onnx_ops
from fqvit.export.onnx.graph import OnnxGraph
from fqvit.ir.attention import Attend, LogSoftmax, MatMul, RowCodes, ShiftMatMul, Softmax
from fqvit.ir.elementwise import Depthwise, Max, Multiply, Rotary
from fqvit.ir.moves import Concat, Permute, Take
from fqvit.ir.ops import Add, LayerNorm, Linear, Lookup, Mean
from fqvit.ir.program import INPUT, Program, Verified
from fqvit.runtime.outputs import describe_outputs, output_names
from fqvit.system.files import write_atomically

OPSET = 21
IR_VERSION = 10

EMITTERS = {
    Lookup: onnx_ops.lookup_op,
    Linear: onnx_ops.linear,
    LayerNorm: onnx_ops.layernorm,
    Add: onnx_ops.add,
    Mean: onnx_ops.mean,
    Take: onnx_moves.take,
    Permute: onnx_moves.permute,
    Concat: onnx_moves.concat,
    MatMul: onnx_attention.matmul,
    LogSoftmax: onnx_attention.log_softmax,
    Softmax: onnx_attention.softmax,
    ShiftMatMul: onnx_attention.shift_matmul,
    RowCodes: onnx_attention.row_codes,
    Attend: onnx_attention.attend,
    Multiply: onnx_elementwise.multiply,
    Rotary: onnx_elementwise.rotary,
    Depthwise: onnx_elementwise.depthwise,
    Max: onnx_elementwise.maximum,
}


def export(program: Program, path: str | Path, plain_tables: bool = False) -> None:
    """Write the program to `path` as ONNX, atomically. plain_tables: see model()"""
    program.check_pixels("export to ONNX")
    data = model(program, plain_tables=plain_tables).SerializeToString()
    write_atomically(path, lambda temporary: temporary.write_bytes(data))


def model(program: Program, buffers: bool = False, plain_tables: bool = False) -> onnx.ModelProto:
    """Return the ONNX model of a program.

    buffers: make every buffer an output, in the order of the ops, instead of the program's outputs
    plain_tables: look up tables with Gather instead of GatherElements. This is slower in ONNX Runtime, but works in runtimes
    with incomplete support for GatherElements (the ReferenceEvaluator of the package onnx accepts at most 64 entries)
    """
    ready = program.unpacked()
    graph = OnnxGraph(ready, verified := ready.verify(), plain_tables)
    for op in ready.ops:
        graph.op = op.y
        graph.set_output(EMITTERS[type(op)](graph, op), op.y)  # type: ignore[operator]
    infos = {name: graph.info(name, value) for name, value in verified.buffers.items()}
    if buffers:
        outputs = [infos[op.y] for op in ready.ops]
    else:
        names = [output.buffer for output in program.header.outputs]
        outputs = [graph.output(*pair) for pair in zip(output_names(program.header), names, strict=True)]
    shown = {INPUT, *(info.name for info in outputs)}
    proto = helper.make_graph(
        graph.nodes,
        program.header.model or "fqvit",
        [infos[INPUT]],
        outputs,
        list(graph.initializers.values()),
        value_info=[info for name, info in infos.items() if name not in shown],
    )
    result = helper.make_model(proto, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    result.producer_name = "fqvit"
    helper.set_model_props(result, metadata(program, verified))
    onnx.checker.check_model(result)
    return result


def metadata(program: Program, verified: Verified) -> dict[str, str]:
    """Return the header fields that the ONNX file keeps as metadata."""
    header = program.header
    result = {
        "fqvit.model": header.model,
        "fqvit.preprocess": msgspec.json.encode(header.preprocess).decode(),
        "fqvit.output": msgspec.json.encode(header.output).decode(),
        "fqvit.outputs": msgspec.json.encode(describe_outputs(program, verified)).decode(),
        "fqvit.recipe": msgspec.json.encode(header.recipe).decode(),
        "fqvit.source": header.source,
        "fqvit.fingerprint": program.fingerprint(),
    }
    if program.classes is not None:
        result["fqvit.classes"] = "\n".join(program.classes)
    return result
