"""Lowering: one rule a leaf module, from a graph with calibrated sites to the flat list of integer ops.

This is the last place where a float exists: every scale ends here as a multiplier, a shift, a table entry or a bias.
A rule reads the wires of its inputs (which buffer, what its integers mean), emits ops, and returns the wire of its output.
Neighbours: ops.py and attention.py (what is emitted), emit.py (constants and fixed-point encoding).
"""

from __future__ import annotations

import dataclasses
import math
from functools import singledispatch

import msgspec
import numpy as np
from torch import Tensor

from fqvit.errors import FqvitError
from fqvit.ir.attention import LogSoftmax, MatMul, ShiftMatMul, Softmax
from fqvit.ir.emit import Emitter, Wire
from fqvit.ir.exptable import exp_table, polynomial_table
from fqvit.ir.file import VERSION
from fqvit.ir.ops import Add, Concat, LayerNorm, Linear, Lookup, Mean, Permute, Take, Term
from fqvit.ir.program import CLASSES, INPUT, Header, Output, Program
from fqvit.models import layers
from fqvit.models.graph import IMAGES, Graph, Node, trace
from fqvit.models.load import FloatModel
from fqvit.preprocess import Preprocess
from fqvit.quant.calibrate import Calibration
from fqvit.quant.qparams import QParams
from fqvit.quant.weights import pixel_linear, quantize_linear, quantize_positions

SOFTMAX_SHIFT = 44  # keeps Softmax's mult below 2^53, which every JSON reader can hold


def lower(model: FloatModel, calibration: Calibration) -> Program:
    """The integer program of `model`, verified. The model is only read."""
    return lower_with_wires(model, calibration)[0]


def lower_with_wires(model: FloatModel, calibration: Calibration) -> tuple[Program, dict[str, Wire]]:
    """Also what every node of the graph became, for comparing float and integer values."""
    graph = trace(model.module, calibration.features)
    masked = any(isinstance(node.leaf, layers.Softmax) and node.leaf.mask is not None for node in graph.nodes)
    emitter = Emitter(calibration, masked)
    emitter.wires[IMAGES] = Wire(INPUT, (model.preprocess.height, model.preprocess.width, model.preprocess.channels))
    for node in graph.nodes:
        lowering = Lowering(emitter, node, [emitter.wires[name] for name in node.inputs], model.preprocess)
        wire = rule(node.leaf, lowering)
        emitter.wires[node.name] = wire
    header = Header(
        version=VERSION,
        model=model.name,
        preprocess=model.preprocess,
        ops=tuple(emitter.ops),
        output=_output(graph, emitter, calibration),
        sites=emitter.sites(graph),
        recipe=msgspec.to_builtins(calibration.recipe),
        source=model.source,
        images=calibration.images,
    )
    if model.classes is not None and calibration.features == "logits":
        emitter.constant(CLASSES, np.frombuffer("\n".join(model.classes).encode(), np.uint8))
    program = Program(header, emitter.constants)
    program.verify()
    return program, emitter.wires


def _output(graph: Graph, emitter: Emitter, calibration: Calibration) -> Output:
    wire = emitter.wires[graph.output]
    if calibration.features == "logits":
        return Output(wire.buffer, "logits", float(wire.unit[0]))
    q = wire.codes()
    return Output(wire.buffer, calibration.features, float(q.scale[0]), int(q.zero[0]))


@dataclasses.dataclass(frozen=True)
class Lowering:
    """What a rule has at hand."""

    emit: Emitter
    node: Node
    inputs: list[Wire]
    preprocess: Preprocess

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def q(self) -> QParams | None:
        """The calibrated parameters of this node's own site; None where it stays in the accumulator."""
        return self.emit.calibration.sites.get(self.name)

    def codes(self) -> QParams:
        if self.q is None:
            raise FqvitError(f"{self.name}: not calibrated. Calibrate this model with this recipe again.")
        return self.q


@singledispatch
def rule(leaf: layers.Leaf, low: Lowering) -> Wire:
    raise FqvitError(f"{low.name}: no lowering rule for {type(leaf).__name__}.")


@rule.register
def _(leaf: layers.Patches, low: Lowering) -> Wire:
    (x,) = low.inputs
    (height, width, channels), patch = x.shape, leaf.patch
    rows, columns = height // patch, width // patch
    squares = f"{low.name}.pixels"
    low.emit.op(
        Permute(
            y=squares,
            x=x.buffer,
            view=(rows, patch, columns, patch, channels),
            perm=(0, 2, 1, 3, 4),
            shape=(rows * columns, patch * patch * channels),
        )
    )
    weight, bias, zero = pixel_linear(_double(leaf.weight), _double(leaf.bias), low.preprocess)
    pixels = QParams(8, np.array([1 / 255]), np.array([zero], np.int64))
    return _linear(low, Wire(squares, (rows * columns, weight.shape[1]), pixels), weight, bias)


@rule.register
def _(leaf: layers.Linear, low: Lowering) -> Wire:
    bias = None if leaf.bias is None else _double(leaf.bias)
    return _linear(low, low.inputs[0], _double(leaf.weight), bias, logits=leaf.role == "logits")


def _linear(low: Lowering, x: Wire, weight: np.ndarray, bias: np.ndarray | None, logits: bool = False) -> Wire:
    emit, name, q_x = low.emit, low.name, x.codes()
    outputs, inputs = weight.shape
    quantized = quantize_linear(weight, bias, q_x.steps(inputs), emit.calibration.recipe.weight_bits)
    emit.constant(f"{name}.w", quantized.w)
    with_zero = quantized.bias - quantized.w.astype(np.int64) @ q_x.zeros(inputs)
    emit.constant(f"{name}.bias", emit.int32(name, "bias", with_zero))
    shape = (*x.shape[:-1], outputs)
    if logits:
        # One scale for all classes, the coarsest, so that no ratio passes 1 and the scores stay within the accumulator's bound.
        unit = float(quantized.scale.max())
        emit.requantizer(name, quantized.scale / unit)
        emit.op(Linear(y=name, x=x.buffer, out="i32"))
        return Wire(name, shape, unit=np.array([unit]))
    if low.q is None:
        emit.op(Linear(y=name, x=x.buffer, out="acc"))
        return Wire(name, shape, unit=quantized.scale)
    emit.requantizer(name, quantized.scale / low.q.steps(outputs))
    emit.op(Linear(y=name, x=x.buffer, y_zero=emit.zero(low.q), bits=low.q.bits))
    return Wire(name, shape, low.q)


@rule.register
def _(leaf: layers.Embed, low: Lowering) -> Wire:
    emit, (patches,) = low.emit, low.inputs
    prefix, positions = (_double(param)[0] for param in low.node.params)
    stream, tokens = patches.buffer, patches.shape[0]
    channels = patches.shape[-1]
    if len(prefix):
        name = f"{low.name}.prefix"
        if patches.q is None:
            emit.constant(name, emit.int32(name, "class token", np.floor(prefix / patches.unit + 0.5).astype(np.int64)))
        else:
            emit.constant(name, _encode(prefix, patches.q).astype(np.uint8))
        stream, tokens = f"{low.name}.tokens", tokens + len(prefix)
        emit.op(Concat(y=stream, xs=(name, patches.buffer)))
    rounded, unit = quantize_positions(positions, emit.calibration.recipe.position_bits)
    emit.constant(f"{low.name}.positions", rounded)
    joined = dataclasses.replace(patches, buffer=stream, shape=(tokens, channels))
    return _add(low, joined, Wire(f"{low.name}.positions", positions.shape, unit=np.array([unit])))


@rule.register
def _(leaf: layers.Add, low: Lowering) -> Wire:
    return _add(low, *low.inputs)


def _add(low: Lowering, a: Wire, b: Wire) -> Wire:
    emit, q, name = low.emit, low.codes(), low.name
    # In units of the output's one scale, before its shift: codes by their own scale, accumulators channel by channel.
    ratios = [(wire.unit if wire.q is None else wire.q.scale) / q.scale[0] for wire in (a, b)]
    mults, shift = emit.shared_shift(name, ratios)
    terms = []
    for i, (wire, mult) in enumerate(zip((a, b), mults, strict=True)):
        number: int | str = int(mult[0])
        if len(mult) > 1:
            number = f"{name}.mult{i}"
            emit.constant(number, mult.astype(np.int32))
        if wire.q is None:
            terms.append(Term(x=wire.buffer, mult=number))
        else:
            terms.append(Term(x=wire.buffer, mult=number, zero=emit.zero(wire.q), alpha=emit.alpha(wire.q)))
    zero = emit.zero(q)
    emit.op(Add(y=name, terms=(terms[0], terms[1]), shift=shift, y_zero=zero, y_alpha=emit.alpha(q), bits=q.bits))
    return Wire(name, a.shape, q)


@rule.register
def _(leaf: layers.LayerNorm, low: Lowering) -> Wire:
    emit, (x,), q, name = low.emit, low.inputs, low.codes(), low.name
    channels = x.shape[-1]
    q_x, steps = x.codes(), q.steps(channels)
    epsilon = max(1, round(leaf.eps * channels**2 / float(q_x.scale[0]) ** 2))
    shift, b_shift = emit.affine(name, _double(leaf.weight) / steps, _double(leaf.bias) / steps + q.zeros(channels))
    emit.op(
        LayerNorm(
            y=name,
            x=x.buffer,
            epsilon=epsilon,
            shift=shift,
            b_shift=b_shift,
            zero=emit.zero(q_x),
            alpha=emit.alpha(q_x),
            bits=q.bits,
        )
    )
    return Wire(name, x.shape, q)


@rule.register
def _(leaf: layers.Gelu, low: Lowering) -> Wire:
    (x,), q = low.inputs, low.codes()
    q_x = x.codes()
    values = (np.arange(q_x.last + 1) - q_x.zero[0]) * q_x.scale[0]
    low.emit.constant(f"{low.name}.table", _encode(_gelu(values), q).astype(np.uint8))
    low.emit.op(Lookup(y=low.name, x=x.buffer))
    return Wire(low.name, x.shape, q)


@rule.register
def _(leaf: layers.Heads, low: Lowering) -> Wire:
    (x,) = low.inputs
    *lead, tokens, triple = x.shape
    width = triple // 3 // leaf.heads
    n = len(lead)
    shape = (*lead, leaf.heads, tokens, width)
    low.emit.op(
        Permute(
            y=low.name,
            x=x.buffer,
            view=(*lead, tokens, 3, leaf.heads, width),
            select=(n + 1, leaf.part),
            perm=(*range(n), n + 1, n, n + 2),
        )
    )
    return Wire(low.name, shape, x.codes().group(leaf.part))


@rule.register
def _(leaf: layers.Scores, low: Lowering) -> Wire:
    return _scores(low, leaf.scale, None)


@rule.register
def _(leaf: layers.BiasedScores, low: Lowering) -> Wire:
    return _scores(low, leaf.scale, leaf.index)


def _scores(low: Lowering, scale: float, index: Tensor | None) -> Wire:
    emit, (a, b), q = low.emit, low.inputs, low.codes()
    q_a, q_b = a.codes(), b.codes()
    unit = float(q_a.scale[0] * q_b.scale[0]) * scale
    name = None
    if index is not None:
        table = _double(low.node.params[0])
        emit.constant(
            f"{low.name}.bias", emit.int32(low.name, "relative position bias", np.floor(table / unit + 0.5).astype(np.int64))
        )
        name = emit.shared("relative_position_index", index.cpu().numpy().astype(np.uint16))
    mult, shift = emit.encode(low.name, unit / float(q.scale[0]))
    emit.op(
        MatMul(
            y=low.name,
            a=a.buffer,
            b=b.buffer,
            mult=mult,
            shift=shift,
            a_zero=int(q_a.zero[0]),
            b_zero=int(q_b.zero[0]),
            index=name,
            y_zero=int(q.zero[0]),
            bits=q.bits,
        )
    )
    return Wire(low.name, (*a.shape[:-1], b.shape[-2]), q)


@rule.register
def _(leaf: layers.Softmax, low: Lowering) -> Wire:
    emit, (x,), q = low.emit, low.inputs, low.codes()
    q_x, tokens = x.codes(), x.shape[-1]
    make = exp_table if emit.calibration.recipe.exp == "table" else polynomial_table
    emit.constant(f"{low.name}.table", make(float(q_x.scale[0]), q_x.last + 1, tokens))
    region = None if leaf.mask is None else emit.shared("region", _regions(leaf.mask))
    if q.log2:
        emit.op(LogSoftmax(y=low.name, x=x.buffer, bits=q.bits, region=region))
        q = dataclasses.replace(q, zero_code=q.zero_code or emit.masked)
    else:
        mult = round(2**SOFTMAX_SHIFT / float(q.scale[0]))
        emit.op(Softmax(y=low.name, x=x.buffer, mult=mult, shift=SOFTMAX_SHIFT, bits=q.bits, region=region))
    return Wire(low.name, x.shape, q)


def _regions(mask: Tensor) -> np.ndarray:
    """[W, T]: numbers that are equal exactly where the mask [W, T, T] is True; it is a partition of every window."""
    same = mask.cpu().numpy()
    first = same.argmax(-1)  # the first token that each token sees names its region
    if not (same == (first[:, :, None] == first[:, None, :])).all():
        raise FqvitError("attention mask: not a partition of the tokens into regions.")
    regions: np.ndarray = first.astype(np.uint8)
    return regions


@rule.register
def _(leaf: layers.Context, low: Lowering) -> Wire:
    emit, (a, v), q = low.emit, low.inputs, low.codes()
    q_a, q_v = a.codes(), v.codes()
    heads = f"{low.name}.heads"
    step = 2.0**-q_a.last if q_a.log2 else float(q_a.scale[0])
    mult, shift = emit.encode(low.name, float(q_v.scale[0]) * step / float(q.scale[0]))
    v_zero, y_zero = int(q_v.zero[0]), int(q.zero[0])
    if q_a.log2:
        emit.op(
            ShiftMatMul(
                y=heads,
                a=a.buffer,
                v=v.buffer,
                mult=mult,
                shift=shift,
                v_zero=v_zero,
                a_bits=q_a.bits,
                zero_code=q_a.zero_code,
                y_zero=y_zero,
                bits=q.bits,
            )
        )
    else:
        emit.op(
            MatMul(
                y=heads,
                a=a.buffer,
                b=v.buffer,
                mult=mult,
                shift=shift,
                a_zero=int(q_a.zero[0]),
                b_zero=v_zero,
                b_rows=True,
                y_zero=y_zero,
                bits=q.bits,
            )
        )
    *lead, count, tokens, width = v.shape
    n = len(lead)
    shape = (*lead, tokens, count * width)
    emit.op(Permute(y=low.name, x=heads, view=(*lead, count, tokens, width), perm=(*range(n), n + 1, n, n + 2), shape=shape))
    return Wire(low.name, shape, q)


@rule.register
def _(leaf: layers.Take, low: Lowering) -> Wire:
    emit, (x,) = low.emit, low.inputs
    q, channels = x.codes(), x.shape[-1]
    index = leaf.index.cpu().numpy().astype(np.int32)
    rows = f"{low.name}.rows" if leaf.join else low.name
    fill = emit.zero(q) if (index < 0).any() else 0
    emit.op(Take(y=rows, x=x.buffer, index=emit.shared("rows", index), fill=fill))
    shape = (*index.shape, channels)
    if not leaf.join:
        return Wire(low.name, shape, q)
    joined = (*index.shape[:-1], index.shape[-1] * channels)
    emit.op(Permute(y=low.name, x=rows, view=joined, perm=tuple(range(len(joined))), shape=joined))
    return Wire(low.name, joined, q.tiled(index.shape[-1]))


@rule.register
def _(leaf: layers.Mean, low: Lowering) -> Wire:
    emit, (x,), q = low.emit, low.inputs, low.codes()
    q_x, (tokens, channels) = x.codes(), x.shape
    mult, shift = emit.encode(low.name, float(q_x.scale[0]) / (tokens - leaf.skip) / float(q.scale[0]))
    emit.op(
        Mean(
            y=low.name,
            x=x.buffer,
            mult=mult,
            shift=shift,
            skip=leaf.skip,
            zero=emit.zero(q_x),
            alpha=emit.alpha(q_x),
            y_zero=int(q.zero[0]),
            bits=q.bits,
        )
    )
    return Wire(low.name, (channels,), q)


def _gelu(x: np.ndarray) -> np.ndarray:
    return np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x])


def _double(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


def _encode(values: np.ndarray, q: QParams) -> np.ndarray:
    codes = np.floor(values / q.steps(values.shape[-1] if q.alpha is not None else 1) + 0.5) + q.zero[0]
    clipped: np.ndarray = np.clip(codes, 0, q.last)
    return clipped
