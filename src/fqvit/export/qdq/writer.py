"""Write a program as QDQ ONNX, for runtimes that fuse QuantizeLinear and DequantizeLinear.

Codes equal the program's up to float rounding: weights are the same int8 values, the scale of each output follows from its
multiplier, and zero points are folded into biases. The graph uses standard ops only and has a dynamic batch axis:
uint8 pixels [N, H, W, C] -> float outputs, such as logits [N, classes].
See also: attention.py, scales.py, outputs.py, docs/reference/qdq.md, docs/measurements/exports.md (agreement with the program).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
from onnx import ModelProto, TensorProto, helper, save_model

from fqvit.errors import FqvitError
from fqvit.export.qdq.attention import Attention, Kind, attend, matmul, softmax, weights
from fqvit.export.qdq.elementwise import depthwise, maximum, multiply, rotary
from fqvit.export.qdq.functions import recognised
from fqvit.export.qdq.graph import PROFILES, Floats, QdqGraph, QdqParams, QuantizedTensor, Target, collapsed, rms_normalized
from fqvit.export.qdq.outputs import emit_outputs, metadata
from fqvit.export.qdq.scales import BufferScales, per_channel
from fqvit.ir.attention import Attend, LogSoftmax, MatMul, RowCodes, ShiftMatMul, Softmax
from fqvit.ir.elementwise import Depthwise, Max, Multiply, Rotary
from fqvit.ir.moves import Concat, Permute, Take
from fqvit.ir.ops import Add, LayerNorm, Linear, Lookup, Mean, Zero
from fqvit.ir.program import INPUT, AnyOp, Program
from fqvit.system.files import write_atomically

PIXEL = 1 / 255
# Measured in docs/measurements/exports.md.
COST = "with DeiT-Tiny 8/8/8, 95.8 % of images keep the program's class (97.6 % with --target ort)"


def export(program: Program, path: str | Path, target: Target = "ort", attention: Attention = "auto") -> tuple[str, ...]:
    """Write `program` to `path` as QDQ ONNX. Returns notes on the result for the user, one line each."""
    model, notes = build(program, target, attention)
    write_atomically(Path(path), lambda temporary: save_model(model, str(temporary)))
    return notes


def build(program: Program, target: Target = "ort", attention: Attention = "auto") -> tuple[ModelProto, tuple[str, ...]]:
    """Return the ONNX model and notes on it for the user, one line each."""
    if target not in PROFILES:
        raise FqvitError(f"target: found {target!r}, expected one of {', '.join(PROFILES)}.")
    if attention not in get_args(Attention):
        raise FqvitError(f"attention: found {attention!r}, expected auto, log2 or uniform.")
    program.check_pixels("export to QDQ ONNX")
    source = program.unpacked()
    profile = PROFILES[target]
    kind: Kind = "log2" if attention == "log2" else "uniform"
    export_ = _Export(source, QdqGraph(profile), BufferScales(source, profile.symmetric), kind)
    export_.run()
    graph = export_.graph
    height, width, channels = program.input_shape
    inputs = [helper.make_tensor_value_info(INPUT, TensorProto.UINT8, ["batch", height, width, channels])]
    outputs = emit_outputs(graph, source, export_.tensors)
    made = helper.make_graph(graph.nodes, program.header.model, inputs, outputs, list(graph.constants.values()))
    opset = helper.make_opsetid("", profile.opset)
    model = helper.make_model(made, opset_imports=[opset], ir_version=profile.ir, producer_name="fqvit")
    helper.set_model_props(model, metadata(program) | {"fqvit.target": target})
    return model, _notes(graph, export_.emulated, export_.coarser, target)


def _notes(graph: QdqGraph, emulated: int, coarser: int, target: str) -> tuple[str, ...]:
    notes = [f"{graph.qdq_sites} sites with QuantizeLinear and DequantizeLinear, opset {graph.profile.opset}"]
    if graph.float_sites:
        where = "" if graph.profile.every_site else " at inputs of matrix products"
        notes.append(f"{len(graph.float_sites)} sites stay in float: {target} supports only 8-bit codes{where}")
    if emulated:
        notes.append(f"{emulated} softmaxes reproduce the program's codes by a table lookup (Gather)")
    if coarser:
        notes.append(f"{coarser} softmaxes use uniform 8-bit codes; --attention log2 reproduces the program's codes")
    if graph.recentred:
        notes.append(
            f"{len(graph.recentred)} sites have coarser scales than the program, because {target} needs symmetric codes: {COST}"
        )
    return tuple(notes)


class _Export:
    """Emits the ops of a program in order; every buffer becomes a tensor."""

    def __init__(self, program: Program, graph: QdqGraph, scales: BufferScales, kind: Kind) -> None:
        self.program, self.graph, self.scales, self.kind = program, graph, scales, kind
        self.constants = program.constants
        self.tensors: dict[str, QuantizedTensor] = {}
        self.qkv: dict[str, QuantizedTensor] = {}  # Q, K or V, keyed by the permuted buffer
        self.emulated = self.coarser = 0

    def run(self) -> None:
        self.tensors[INPUT] = self._pixels()
        for op in self.program.ops:
            self.tensors[op.y] = self._emit(op)

    def _pixels(self) -> QuantizedTensor:
        """Emit pixels / 255, or (pixels - 128) / 255 if codes must be symmetric."""
        graph, shape = self.graph, self.program.input_shape
        if not graph.profile.symmetric:
            parts = [graph.float32("pixels.scale", PIXEL), graph.constant("pixels.zero", np.array(0, np.uint8))]
            graph.node("DequantizeLinear", [INPUT, *parts], "pixels.values")
            return QuantizedTensor("pixels.values", shape, np.array([PIXEL]), np.array([0]))
        raw = graph.node("Cast", [INPUT], "pixels.float", to=TensorProto.FLOAT)
        raw = graph.node("Sub", [raw, graph.float32("pixels.middle", 128.0)], "pixels.centred")
        raw = graph.node("Mul", [raw, graph.float32("pixels.unit", PIXEL)], "pixels.scaled")
        return graph.quantized(raw, "pixels.values", shape, QdqParams(np.array([PIXEL]), np.array([128])))

    def _emit(self, op: AnyOp) -> QuantizedTensor:
        shape = self.scales.shapes[op.y]
        match op:
            case Linear():
                return self._linear(op)
            case LayerNorm():
                return self._layernorm(op, shape)
            case Add():
                return self._add(op, shape)
            case Lookup():
                return self._lookup(op, shape)
            case Mean():
                return self._mean(op, shape)
            case Take():
                return self._take(op, shape)
            case Permute():
                return self._permute(op, shape)
            case Concat():
                return self._concat(op, shape)
            case MatMul():
                table = None if op.index is None else self.constants[op.part("bias")][self.constants[op.index]]
                params = self.scales.params(op.y, op.y_zero, op.bits)
                mult = self.scales.multiplier(op)
                return matmul(self.graph, op, self.tensors[op.a], self.tensors[op.b], mult, table, params, shape)
            case Softmax():
                region = None if op.region is None else self.constants[op.region]
                params = QdqParams(np.array([2.0**op.shift / op.mult]), np.array([0]), op.bits)
                return softmax(self.graph, op, self.tensors[op.x], region, params)
            case LogSoftmax() | RowCodes():
                return self._weights(op)
            case ShiftMatMul() | Attend():
                params = self.scales.params(op.y, op.y_zero, op.bits)
                return attend(self.graph, op, self.tensors[op.a], self.tensors[op.v], params, shape)
            case Multiply():
                params = self.scales.params(op.y, op.y_zero, op.bits)
                return multiply(self.graph, op, self.tensors[op.a], self.tensors[op.b], params, shape)
            case Rotary():
                x, params = self._per_tensor(self.tensors[op.x], op.x), self.scales.params(op.y, op.y_zero, op.bits)
                table, partner = self.constants[op.part("table")], self.constants[op.partner]
                return rotary(self.graph, op, x, table, partner, params, shape)
            case Depthwise():
                return self._depthwise(op, shape)
            case Max():
                return maximum(self.graph, op, self.tensors[op.x], shape)

    def _weights(self, op: LogSoftmax | RowCodes) -> QuantizedTensor:
        reader = next((r for r in self.scales.readers[op.y] if isinstance(r, ShiftMatMul | Attend)), None)
        region = None if op.region is None else self.constants[op.region]
        # "uniform" writes evenly spaced levels relative to the largest weight, so programs with such levels lose nothing.
        levels = (reader.levels or tuple(range(256))) if isinstance(reader, Attend) else ()
        even = levels == tuple(range(len(levels))) and len(levels) > 1
        emulate = self.kind == "log2" and not even
        self.emulated, self.coarser = self.emulated + emulate, self.coarser + (not emulate and not even)
        bits = (len(levels) - 1).bit_length() if even else 8
        return weights(self.graph, op, self.tensors[op.x], self.constants[op.part("table")], region, reader, emulate, bits)

    # Every tensor below is f = (integer - zero) * scale, with the scale and zero of its params.

    def _linear(self, op: Linear) -> QuantizedTensor:
        x, w = self._per_tensor(self.tensors[op.x], op.x), self.constants[op.part("w")]
        outputs = len(w)
        bias = self.constants[op.part("bias")].astype(np.float64) + x.zero[0] * w.sum(1, dtype=np.int64)
        shape = self.scales.shapes[op.y]
        if op.out == "acc":
            unit = self.scales.accumulator_scale(op.y, outputs)
            name = self._product(op.y, x, w, unit, bias * unit, op.y)
            return QuantizedTensor(name, shape, unit, np.array([0]))
        mult, shift = (self.constants[op.part(part)].astype(np.float64) for part in ("mult", "shift"))
        ratio = mult / np.exp2(shift)
        if op.out == "i32":
            scale = self.scales.outputs.get(op.y)
            unit = self.scales.accumulator_scale(op.y, outputs) if scale is None else np.array([scale])
            name = self._product(op.y, x, w, ratio * unit, bias * ratio * unit, op.y)
            return QuantizedTensor(name, shape, unit, np.array([0]))
        y_zero = per_channel(self.scales.zero_points(op.y_zero), outputs)
        if not self.scales.is_split_qkv(op):
            params = self.scales.params(op.y, op.y_zero, op.bits)
            gain = ratio * params.scale
            offset = bias * gain + (y_zero - params.zero) * params.scale
            name = self._product(op.y, x, w, gain, offset, f"{op.y}.sum")
            return self.graph.quantized(name, op.y, shape, params)
        third = outputs // 3
        for reader in self.scales.readers[op.y]:
            assert isinstance(reader, Permute) and reader.select is not None
            part_params = self.scales.qkv_params(reader.y)
            assert part_params is not None
            rows = slice(reader.select[1] * third, (reader.select[1] + 1) * third)
            gain = ratio[rows] * part_params.scale
            offset = bias[rows] * gain + (y_zero[rows] - part_params.zero) * part_params.scale
            part = f"{op.y}.{'qkv'[reader.select[1]]}"
            name = self._product(part, x, w[rows], gain, offset, f"{part}.sum")
            self.qkv[reader.y] = self.graph.quantized(name, part, (*shape[:-1], third), part_params)
        return QuantizedTensor(op.y, shape, np.ones(1), np.array([0]))  # not read: the readers take Q, K and V from self.qkv

    def _product(self, name: str, x: QuantizedTensor, w: Any, gain: Floats, offset: Floats, y: str) -> str:
        """Emit (sum_k f_x[k] * w[o, k] * gain[o] / scale_x) + offset[o], with 8-bit weights [K, O] and one scale per output."""
        graph, middle = self.graph, self.graph.profile.middle
        dtype = np.uint8 if middle else np.int8
        codes = graph.constant(f"{name}.w", (w.T.astype(np.int16) + middle).astype(dtype))
        scale = np.broadcast_to(gain / x.scale[0], (len(w),))
        smallest = np.finfo(np.float32).tiny  # scales must be positive, even if the multiplier is 0
        scales = graph.float32(f"{name}.w.scale", np.maximum(scale, smallest))
        zeros = graph.constant(f"{name}.w.zero", np.full(len(w), middle, dtype))
        weight = graph.node("DequantizeLinear", [codes, scales, zeros], f"{name}.w.values", axis=1)
        product = graph.node("MatMul", [x.name, weight], f"{name}.product")
        return graph.node("Add", [product, graph.float32(f"{name}.bias", offset)], y)

    def _per_tensor(self, tensor: QuantizedTensor, name: str) -> QuantizedTensor:
        """Rescale to the scale and zero point of the first channel."""
        if len(tensor.scale) == 1 and len(tensor.zero) == 1:
            return tensor
        unit, zero = tensor.scale[:1], tensor.zero[:1]
        found = self.graph.scaled(tensor.name, unit / tensor.scale, (tensor.zero - zero) * unit, f"{name}.per_tensor")
        return QuantizedTensor(found, tensor.shape, unit, zero)

    def _lifted(self, x: QuantizedTensor, zero: Zero, alpha: str | None, y: str) -> tuple[str, float]:
        """Emit a tensor g and return it with a number `unit`: (code - zero) * 2^alpha = g / unit."""
        power = self._power(alpha)
        unit = float(x.scale[0] / power[0])
        offset = (x.zero - self.scales.zero_points(zero)) * power * unit
        return self.graph.scaled(x.name, power * unit / x.scale, offset, f"{y}.lifted"), unit

    def _power(self, alpha: str | None) -> Floats:
        return np.ones(1) if alpha is None else np.exp2(self.constants[alpha].astype(np.float64))

    def _layernorm(self, op: LayerNorm, shape: tuple[int, ...]) -> QuantizedTensor:
        x, unit = self._lifted(self.tensors[op.x], op.zero, op.alpha, op.y)
        g, b = self.constants[op.part("affine")].astype(np.float64)
        params = self.scales.params(op.y, None, op.bits)
        if not params.product and len(params.zero) > 1:  # b contains the per-channel zero points
            params = QdqParams(params.scale, collapsed(params.zero), op.bits, params.product)
        gamma = g / 2.0 ** (op.shift - op.fraction) * params.scale
        beta = (b / 2.0 ** (op.shift - op.b_shift) - params.zero) * params.scale
        parts = [self.graph.float32(f"{op.y}.gamma", gamma), self.graph.float32(f"{op.y}.beta", beta)]
        epsilon = op.epsilon * (unit / shape[-1]) ** 2
        if op.center:
            name = self.graph.node("LayerNormalization", [x, *parts], f"{op.y}.norm", axis=-1, epsilon=epsilon)
        else:
            name = rms_normalized(self.graph, x, epsilon, op.y)
            name = self.graph.node("Mul", [name, parts[0]], f"{op.y}.gained")
            name = self.graph.node("Add", [name, parts[1]], f"{op.y}.norm")
        return self.graph.quantized(name, op.y, shape, params)

    def _add(self, op: Add, shape: tuple[int, ...]) -> QuantizedTensor:
        unit = self.scales.sum_scale(op)
        names = []
        for i, term in enumerate(op.terms):
            mult = self.constants[term.mult] if isinstance(term.mult, str) else np.array([term.mult])
            gain = self._power(term.alpha) * mult.astype(np.float64) / 2.0**op.shift * unit
            zero = self.scales.zero_points(term.zero)
            if term.x in self.constants:
                values = (self.constants[term.x].astype(np.float64) - per_channel(zero, shape[-1])) * gain
                names.append(self.graph.float32(f"{op.y}.constant{i}", values))
            else:
                x = self.tensors[term.x]
                offset = (x.zero - zero) * gain
                names.append(self.graph.scaled(x.name, gain / x.scale, offset, f"{op.y}.term{i}"))
        total = self.graph.node("Add", names, f"{op.y}.sum")
        return self._requantized(total, op.y, op.y_zero, self._power(op.y_alpha) * unit, op.bits, shape)

    def _requantized(self, x: str, y: str, y_zero: Zero, scale: Floats, bits: int, shape: tuple[int, ...]) -> QuantizedTensor:
        """Quantize x = (code - y_zero) * scale to the codes of buffer y."""
        params = self.scales.params(y, y_zero, bits)
        offset = (self.scales.zero_points(y_zero) - params.zero) * params.scale
        return self.graph.quantized(self.graph.scaled(x, params.scale / scale, offset, y), y, shape, params)

    def _lookup(self, op: Lookup, shape: tuple[int, ...]) -> QuantizedTensor:
        """Emit the float function that a lookup table computes, such as GELU."""
        x, site = self.tensors[op.x], self.program.header.sites.get(op.y)
        table, function = self.constants[op.part("table")].astype(np.int64), None
        if op.alpha is None and np.array_equal(table, np.arange(len(table))[::-1]):  # y = last - x, as in lower_signs
            return QuantizedTensor(self.graph.node("Neg", [x.name], op.y), shape, x.scale, len(table) - 1 - x.zero)
        if site is not None and len(x.scale) == len(x.zero) == 1:
            values = (np.arange(len(table)) - x.zero) * x.scale
            if op.alpha is None:
                function = recognised(table, values, site.scale[0], int(site.zero[0]), (1 << op.bits) - 1)
            else:  # such a table holds floor(2 * f / scale)
                function = recognised(table, values, site.scale[0] / 2, 0, None)
        if site is None or function is None:
            raise FqvitError(
                f"{op.y}: a lookup table of an unknown function, which QDQ ONNX cannot express. Export with --to onnx instead."
            )
        scale, zero = site.scales_and_zeros(self.constants)
        name = function.emit(self.graph, x.name, op.y)
        params = self.scales.params(op.y, None, op.bits)
        offset = (zero - params.zero) * params.scale
        return self.graph.quantized(self.graph.scaled(name, params.scale / scale, offset, op.y), op.y, shape, params)

    def _mean(self, op: Mean, shape: tuple[int, ...]) -> QuantizedTensor:
        graph, x = self.graph, self.tensors[op.x]
        name, unit = self._lifted(x, op.zero, op.alpha, op.y)
        axis, tokens = len(shape), x.shape[-2]
        if op.skip:
            rows = graph.constant(f"{op.y}.rows", np.arange(op.skip, tokens, dtype=np.int64))
            name = graph.node("Gather", [name, rows], f"{op.y}.kept", axis=axis)
        axes = graph.constant(f"axis.{axis}", np.array([axis], np.int64))
        name = graph.node("ReduceMean", [name, axes], f"{op.y}.mean", keepdims=0)
        code = unit / (op.mult / 2.0**op.shift * (tokens - op.skip))
        return self._requantized(name, op.y, op.y_zero, np.array([code]), op.bits, shape)

    def _take(self, op: Take, shape: tuple[int, ...]) -> QuantizedTensor:
        graph, x, index = self.graph, self.tensors[op.x], self.constants[op.index].astype(np.int64)
        name = x.name
        if len(x.shape) > 2:
            name = graph.reshape(name, (int(np.prod(x.shape[:-1])), x.shape[-1]), f"{op.y}.rows")
        rows = graph.constant(f"{op.index}.clipped", np.maximum(index, 0))
        missing = bool((index < 0).any())
        name = graph.node("Gather", [name, rows], f"{op.y}.taken" if missing else op.y, axis=1)
        if missing:
            valid = graph.constant(f"{op.index}.valid", (index >= 0)[..., None])
            fill = per_channel(self.scales.zero_points(op.fill), shape[-1])
            values = np.broadcast_to((fill - x.zero) * x.scale, (shape[-1],))
            name = graph.node("Where", [valid, name, graph.float32(f"{op.y}.fill", values)], op.y)
        return QuantizedTensor(name, shape, x.scale, x.zero)

    def _depthwise(self, op: Depthwise, shape: tuple[int, ...]) -> QuantizedTensor:
        w, params = self.constants[op.part("w")], self.scales.params(op.y, op.y_zero, op.bits)
        if len(params.zero) > 1:  # use the middle code for all channels; `offset` compensates for the difference
            params = QdqParams(per_channel(params.scale, shape[-1]), np.array([1 << (op.bits - 1)]), op.bits, params.product)
        mult, shift, bias = (self.constants[op.part(part)].astype(np.float64) for part in ("mult", "shift", "bias"))
        x = self.tensors[op.x]
        taps = self._take(Take(y=f"{op.y}.taps", x=op.x, index=op.index, fill=op.fill), (*shape[:-1], len(w), shape[-1]))
        ratio = mult / np.exp2(shift) * params.scale
        offset = (bias + x.zero * w.sum(0, dtype=np.int64)) * ratio
        offset = offset + (per_channel(self.scales.zero_points(op.y_zero), shape[-1]) - params.zero) * params.scale
        return depthwise(self.graph, op.y, taps.name, w, ratio / x.scale, offset, params, shape)

    def _permute(self, op: Permute, shape: tuple[int, ...]) -> QuantizedTensor:
        graph = self.graph
        rows = self.qkv.get(op.y)  # Q, K or V
        x, view, perm = self.tensors[op.x] if rows is None else rows, list(op.view), op.perm
        name = x.name
        if rows is not None:
            del view[-3]
        name = graph.reshape(name, tuple(view), f"{op.y}.view")
        if rows is None and op.select is not None:
            axis, index = op.select
            selected = graph.constant(f"index.{index}", np.array(index, np.int64))
            name = graph.node("Gather", [name, selected], f"{op.y}.selected", axis=axis + 1)
            del view[axis]
        if perm != tuple(range(len(perm))):
            name = graph.node("Transpose", [name], f"{op.y}.transposed", perm=[0, *(axis + 1 for axis in perm)])
        name = graph.reshape(name, shape, op.y)
        return QuantizedTensor(name, shape, self._tiled(x.scale, op.y, shape), self._tiled(x.zero, op.y, shape))

    def _tiled(self, values: Any, name: str, shape: tuple[int, ...]) -> Any:
        """Repeat per-channel values if a permute concatenates the channels of several tokens."""
        if len(values) == 1:
            return values
        if shape[-1] % len(values):
            said = "splits channels that have one scale each, which QDQ ONNX cannot express"
            raise FqvitError(f"{name}: {said}. Export with --to onnx instead.")
        return np.tile(values, shape[-1] // len(values))

    def _concat(self, op: Concat, shape: tuple[int, ...]) -> QuantizedTensor:
        graph = self.graph
        first = next(self.tensors[name] for name in op.xs if name in self.tensors)
        names = []
        for name in op.xs:
            if name in self.tensors:
                names.append(self._rescaled(self.tensors[name], first, name))
                continue
            values: Floats = (self.constants[name].astype(np.float64) - first.zero) * first.scale
            rows = graph.float32(f"{op.y}.{name}", values[None])
            batch = graph.node("Shape", [first.name], f"{op.y}.batch", start=0, end=1)
            sizes = graph.constant(f"{op.y}.sizes", np.array(values.shape, np.int64))
            full_shape = graph.node("Concat", [batch, sizes], f"{op.y}.shape", axis=0)
            names.append(graph.node("Expand", [rows, full_shape], f"{op.y}.{name}.rows"))
        return QuantizedTensor(graph.node("Concat", names, op.y, axis=1), shape, first.scale, first.zero)

    def _rescaled(self, tensor: QuantizedTensor, other: QuantizedTensor, name: str) -> str:
        offset = (tensor.zero - other.zero) * other.scale
        return self.graph.scaled(tensor.name, other.scale / tensor.scale, offset, f"{name}.rescaled")
