"""Emit attention as QDQ nodes: scores, the three kinds of softmax, and attention times V.

The codes of Softmax are uniform already. For LogSoftmax and RowCodes, there are two kinds of export. "uniform" quantizes
exp(score - largest score of the row) to 8 bits and divides by the row sum after the product with V, like programs with 8-bit
relative attention. "log2" reproduces the program's own attention codes: score codes are integers, so a table lookup gives the
weight, before normalization, for every distance from the largest score. See also: writer.py.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from fqvit.errors import FqvitError
from fqvit.export.qdq.graph import Floats, QdqGraph, QdqParams, QuantizedTensor
from fqvit.ir.attention import Attend, LogSoftmax, MatMul, RowCodes, ShiftMatMul, Softmax

Attention = Literal["auto", "log2", "uniform"]
Kind = Literal["log2", "uniform"]
MASKED = -1e4  # added to masked scores: their exponential is 0, even in half precision


def matmul(
    graph: QdqGraph,
    op: MatMul,
    a: QuantizedTensor,
    b: QuantizedTensor,
    mult: Floats,
    table: Any,
    params: QdqParams,
    shape: tuple[int, ...],
) -> QuantizedTensor:
    """Emit attention scores, or uniform attention times V.

    mult: the multiplier [1], or one per head [H, 1, 1]
    table: relative position bias [M, N, H] in units of the accumulator, or None
    """
    left = graph.scaled(a.name, np.ones(1), (a.zero - op.a_zero) * a.scale, f"{op.y}.a")
    right = graph.scaled(b.name, np.ones(1), (b.zero - op.b_zero) * b.scale, f"{op.y}.b")
    if not op.b_rows:
        axes = list(range(len(b.shape) + 1))
        right = graph.node("Transpose", [right], f"{op.y}.b.transposed", perm=[*axes[:-2], axes[-1], axes[-2]])
    ratio = mult / 2.0**op.shift * params.scale
    name = graph.node("MatMul", [left, right], f"{op.y}.product")
    offset: Floats = (op.y_zero - params.zero) * params.scale
    name = graph.scaled(name, ratio / (a.scale * b.scale), offset, op.y)
    if table is not None:
        bias = graph.float32(f"{op.y}.positions", table.astype(np.float64).transpose(2, 0, 1) * ratio)
        name = graph.node("Add", [name, bias], f"{op.y}.biased")
    return graph.quantized(name, op.y, shape, params)


def softmax(
    graph: QdqGraph, op: Softmax, x: QuantizedTensor, region: NDArray[Any] | None, params: QdqParams
) -> QuantizedTensor:
    """Emit a softmax whose codes are uniform, as in the program."""
    scores = _masked(graph, op.y, x, region)
    if graph.profile.softmax:
        name = graph.node("Softmax", [scores], f"{op.y}.softmax", axis=-1)
    else:
        e = graph.node("Exp", [_minus_row_max(graph, op.y, scores)], f"{op.y}.exp")
        name = graph.node("Div", [e, _over_row(graph, "ReduceSum", e, f"{op.y}.total")], f"{op.y}.softmax")
    return graph.quantized(name, op.y, x.shape, params)


def _minus_row_max(graph: QdqGraph, y: str, scores: str) -> str:
    """Subtract the largest score of each row."""
    return graph.node("Sub", [scores, _over_row(graph, "ReduceMax", scores, f"{y}.largest")], f"{y}.minus_max")


def _over_row(graph: QdqGraph, kind: str, x: str, y: str) -> str:
    """Reduce the last axis to length 1."""
    return graph.node(kind, [x, graph.constant("axis.last", np.array([-1], np.int64))], y, keepdims=1)


def weights(
    graph: QdqGraph,
    op: LogSoftmax | RowCodes,
    x: QuantizedTensor,
    table: NDArray[Any],
    region: NDArray[Any] | None,
    reader: ShiftMatMul | Attend | None,
    emulate: bool,
    bits: int,
) -> QuantizedTensor:
    """Emit attention weights. Except for log2 codes, the weights of a row are not yet divided by their sum.

    emulate: reproduce the program's codes by a table lookup, else quantize uniformly to `bits`
    """
    if reader is None:
        said = "QDQ ONNX cannot express attention codes that no op multiplies by V"
        raise FqvitError(f"{op.y}: {said}. Export with --to onnx instead.")
    relative = _minus_row_max(graph, op.y, _masked(graph, op.y, x, region))
    if not emulate:
        name = graph.node("Exp", [relative], f"{op.y}.exp")
        params = QdqParams(np.array([1 / (2.0**bits - 1)]), np.array([0]), bits)
        tensor = graph.quantized(name, op.y, x.shape, params)
        return QuantizedTensor(tensor.name, x.shape, tensor.scale, tensor.zero, normalise=True)
    if isinstance(op, RowCodes):
        assert isinstance(reader, Attend)
        levels = np.array(reader.levels or range(256), np.float64)
        shares = levels[table] / levels.max()
        name = _by_distance(graph, op.y, op.y, relative, x, shares, region, float(shares[-1]))
        return QuantizedTensor(name, x.shape, np.ones(1), np.array([0]), normalise=True)
    return _log2(graph, op, relative, x, table.astype(np.float64), region, reader)


def _by_distance(
    graph: QdqGraph,
    y: str,
    out: str,
    relative: str,
    x: QuantizedTensor,
    table: Floats,
    region: NDArray[Any] | None,
    elsewhere: float,
) -> str:
    """Emit table[largest score code of the row - score code], or `elsewhere` between tokens of different regions."""
    n = len(table)
    distance = graph.node(
        "Mul", [relative, graph.float32(f"{y}.codes_per_unit", -1 / float(x.scale[0]))], f"{y}.scaled_distance"
    )
    distance = graph.node("Round", [distance], f"{y}.rounded")
    ends = [graph.float32("zero", 0.0), graph.float32(f"{y}.largest_distance", float(n - 1))]
    distance = graph.node("Clip", [distance, *ends], f"{y}.distance")
    if region is not None:
        same = graph.constant(f"{y}.same", _same_region(region))
        distance = graph.node("Where", [same, distance, graph.float32(f"{y}.hidden", float(n))], f"{y}.distance_or_hidden")
        table = np.append(table, elsewhere)
    index = graph.node("Cast", [distance], f"{y}.index", to=TensorProto.INT32)
    return graph.node("Gather", [graph.float32(f"{y}.table", table), index], out, axis=0)


def _log2(
    graph: QdqGraph,
    op: LogSoftmax,
    relative: str,
    x: QuantizedTensor,
    table: Floats,
    region: NDArray[Any] | None,
    reader: ShiftMatMul | Attend,
) -> QuantizedTensor:
    """Emit 2^-a, where r = round(S / e) is an integer and a = floor(log2(4/3 * r)): log2(r), rounded up from mantissa 1.5 on.

    e: integer exponential of a score, looked up by its distance from the largest score of the row   S: sum of e over the row
    """
    assert isinstance(reader, ShiftMatMul)
    y, last = op.y, 2**op.bits - 1
    e = _by_distance(graph, y, f"{y}.e", relative, x, table, region, 0.0)
    total = _over_row(graph, "ReduceSum", e, f"{y}.total")
    # Avoid a division by 0. Weights this small get the last code in any case.
    floor = graph.node("Max", [e, graph.float32("one", 1.0)], f"{y}.e.positive")
    r = graph.node("Div", [total, floor], f"{y}.inverse")
    r = graph.node("Floor", [graph.node("Add", [r, graph.float32("half", 0.5)], f"{y}.inverse.half")], f"{y}.r")
    # Add 1/4, so that float rounding cannot move an integer r across a code boundary.
    r = graph.node("Add", [r, graph.float32("quarter", 0.25)], f"{y}.r.plus_quarter")
    r = graph.node("Mul", [r, graph.float32("4/3", 4 / 3)], f"{y}.r43")
    log = graph.node("Mul", [graph.node("Log", [r], f"{y}.ln"), graph.float32("1/ln2", float(1 / np.log(2)))], f"{y}.log2")
    code = graph.node("Floor", [log], f"{y}.code")
    nonzero = graph.node("Greater", [e, graph.float32("zero", 0.0)], f"{y}.nonzero")
    code = graph.node("Where", [nonzero, code, graph.float32(f"{y}.last", float(last))], f"{y}.code.or_last")
    code = graph.node("Min", [code, f"{y}.last"], f"{y}.code.clipped")
    weight = graph.node("Pow", [graph.float32("1/2", 0.5), code], f"{y}.weight" if reader.zero_code else y)
    if reader.zero_code:
        below = graph.node("Less", [code, f"{y}.last"], f"{y}.below")
        weight = graph.node("Where", [below, weight, graph.float32("zero", 0.0)], y)
    return QuantizedTensor(weight, x.shape, np.ones(1), np.array([0]))


def attend(
    graph: QdqGraph, op: ShiftMatMul | Attend, a: QuantizedTensor, v: QuantizedTensor, params: QdqParams, shape: tuple[int, ...]
) -> QuantizedTensor:
    """Emit attention weights times V, divided by the row sums if the weights are not normalized yet."""
    name = graph.node("MatMul", [a.name, v.name], f"{op.y}.product")
    if a.normalise:
        name = graph.node("Div", [name, _over_row(graph, "ReduceSum", a.name, f"{op.y}.total")], f"{op.y}.mean")
    if (v.zero != op.v_zero).any():
        raise FqvitError(f"{op.y}: the zero point of V is {int(v.zero[0])}, expected {op.v_zero}. This is a bug.")
    one = max(op.levels or (255,)) if isinstance(op, Attend) else 2 ** (2**op.a_bits - 1)
    ratio = op.mult / 2.0**op.shift * one
    offset: Floats = (op.y_zero - params.zero) * params.scale
    name = graph.scaled(name, ratio * params.scale / v.scale, offset, op.y)
    return graph.quantized(name, op.y, shape, params)


def _same_region(region: NDArray[Any]) -> NDArray[np.bool_]:
    """Return whether two tokens of a window are in the same region: [W, T] -> bool [W, 1, T, T]."""
    same: NDArray[np.bool_] = (region[:, :, None] == region[:, None, :])[:, None]
    return same


def _masked(graph: QdqGraph, y: str, x: QuantizedTensor, region: NDArray[Any] | None) -> str:
    """Add MASKED to the scores between tokens of different regions."""
    if region is None:
        return x.name
    mask = graph.float32(f"{y}.mask", np.where(_same_region(region), 0.0, MASKED))
    return graph.node("Add", [x.name, mask], f"{y}.masked")
