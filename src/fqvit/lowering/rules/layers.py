"""Lowering rules of embeddings, linear layers, norms, GELU, sums, means and gathers (Take)."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fqvit.errors import FqvitError
from fqvit.ir.moves import Concat, Permute, Take
from fqvit.ir.ops import Add, LayerNorm, Linear, Lookup, Mean, Term
from fqvit.ir.packing import pack_codebooks, pack_codes
from fqvit.ir.value import Constant
from fqvit.lowering.emit import LoweredValue
from fqvit.lowering.encode import encode_affine, powers, quotient_fraction, shared_shift, to_int32
from fqvit.lowering.rules.base import Lowering, Rule
from fqvit.models import layers
from fqvit.quant.qparams import QParams
from fqvit.quant.weights import (
    MAX_PACKED,
    bits_and_group,
    pixel_linear,
    quantize_linear,
    quantize_positions,
    short_output_scales,
    weight_rows,
)


def lower_patches(leaf: layers.Patches, low: Lowering) -> LoweredValue:
    """Lower the patch embedding, pixels u8 [h, w, c] -> [T, C]: reshape into patches, then apply a linear op.

    The normalization of pixels is folded into the linear op.
    """
    (x,) = low.inputs
    (height, width, channels), patch = x.shape, leaf.patch
    rows, columns = height // patch, width // patch
    patches = f"{low.name}.pixels"
    low.emit.op(
        Permute(
            y=patches,
            x=x.buffer,
            view=(rows, patch, columns, patch, channels),
            perm=(0, 2, 1, 3, 4),
            shape=(rows * columns, patch * patch * channels),
        )
    )
    low.move(patches, "patches")
    weight, bias, zero = pixel_linear(double(leaf.weight), double(leaf.bias), low.context.preprocess)
    pixels = QParams(8, np.array([1 / 255]), np.array([zero], np.int64))
    return emit_linear(low, LoweredValue(patches, (rows * columns, weight.shape[1]), pixels), weight, bias)


def lower_linear(leaf: layers.Linear, low: Lowering) -> LoweredValue:
    """Lower a linear layer: [..., K] -> [..., O]."""
    return emit_linear(low, low.inputs[0], *weight_rows(leaf), logits=leaf.role in ("logits", "deltas"))


def emit_linear(
    low: Lowering,
    x: LoweredValue,
    weight: np.ndarray,
    bias: np.ndarray | None,
    *,
    logits: bool = False,
    name: str | None = None,
) -> LoweredValue:
    """Emit a linear op. Its output is codes if the node has a site, otherwise accumulators.

    weight: float64 [O, K]   bias: float64 [O] or None
    logits: i32 class scores or box regressions with one scale for all outputs
    name: the name of the output buffer; None for the node's site
    """
    context, emit, q_x = low.context, low.emit, x.codes()
    name = name or low.site
    outputs, inputs = weight.shape
    bits, group = bits_and_group(context.calibration.recipe, low.node)
    short = short_output_scales(context.calibration.recipe, low.node.leaf, low.q, outputs)
    quantized = context.calibration.weights.get(low.name)
    if quantized is None:
        halves = context.calibration.recipe.weight_ends == "halves"
        quantized = quantize_linear(
            weight, bias, q_x.channel_scales(inputs), bits, group=group, output_scales=short, halves=halves
        )
    width, groups = bits if bits <= MAX_PACKED else 0, quantized.groups
    parts: dict[str, Constant] = {"w": quantized.w}
    if groups is not None:
        codes, choices = pack_codebooks(quantized.w, groups.choice, groups.codebooks, group, width)
        parts = {"w": codes, "choice": choices, "codebooks": groups.codebooks}
    elif width:
        parts = {"w": pack_codes(quantized.w, width)}
    owner = emit.weights(name, low.node.leaf, parts)
    codebooks = 0 if groups is None else len(groups.codebooks)
    linear = partial(Linear, y=name, x=x.buffer, group=group, weights_of=owner, width=width, codebooks=codebooks)
    with_zero = quantized.bias - quantized.w.astype(np.int64) @ q_x.channel_zeros(inputs)
    emit.constant(f"{name}.bias", to_int32(name, "bias", with_zero))
    shape = (*x.shape[:-1], outputs)
    if logits:
        # One scale for all outputs, not below the scale of any output, so that no ratio exceeds 1 and scores stay within the
        # bound of the accumulator. Scores with a site use its scale if it is large enough, but stay i32, without a zero point
        # or a clamp.
        unit = max(float(quantized.scale.max()), 0.0 if low.q is None else float(low.q.scale[0]))
        emit.requantizer(name, quantized.scale / unit, context.short)
        emit.op(linear(out="i32"))
        return LoweredValue(name, shape, unit=np.array([unit]))
    fraction = context.sum_unit(name)
    if low.q is None and fraction is not None:
        emit.requantizer(name, quantized.scale / fraction, context.short)
        emit.op(linear(out="i32"))
        return LoweredValue(name, shape, unit=np.array([fraction]))
    if low.q is None:
        emit.op(linear(out="acc"))
        return LoweredValue(name, shape, unit=quantized.scale)
    emit.requantizer(name, quantized.scale / low.q.channel_scales(outputs), short=context.short or short is not None)
    emit.op(linear(y_zero=emit.zero(low.q), bits=low.q.bits))
    return LoweredValue(name, shape, low.q)


def lower_embed(leaf: layers.Embed, low: Lowering) -> LoweredValue:
    """Concatenate the prefix tokens, then add the position embedding: [T, C] -> [P + T, C]."""
    emit, (patches,) = low.emit, low.inputs
    prefix, positions = (double(param)[0] for param in low.node.params)
    stream, tokens = patches.buffer, patches.shape[0]
    channels = patches.shape[-1]
    if len(prefix):
        name = f"{low.name}.prefix"
        if patches.q is None:
            emit.constant(name, to_int32(name, "class token", np.floor(prefix / patches.unit + 0.5).astype(np.int64)))
        else:
            emit.constant(name, to_codes(prefix, patches.q).astype(np.uint8 if patches.q.bits <= 8 else np.uint16))
        stream, tokens = f"{low.name}.tokens", tokens + len(prefix)
        emit.op(Concat(y=stream, xs=(name, patches.buffer)))
    joined = dataclasses.replace(patches, buffer=stream, shape=(tokens, channels))
    return add_constant(low, joined, positions, low.node.inputs[0])


def add_constant(low: Lowering, x: LoweredValue, values: np.ndarray, term: str) -> LoweredValue:
    """Emit the sum of a value and a constant, float64, of the same shape. term: the name of the node that computes the value"""
    emit = low.emit
    rounded, unit = quantize_positions(values, low.context.calibration.recipe.position_bits)
    fraction = low.context.sum_unit(term)
    if fraction is None:
        emit.constant(f"{low.name}.positions", rounded)
    else:
        whole = np.floor(rounded * unit / fraction + 0.5).astype(np.int64)
        unit = fraction
        emit.constant(f"{low.name}.positions", to_int32(low.name, "positions", whole))
    return _emit_add(low, x, LoweredValue(f"{low.name}.positions", values.shape, unit=np.array([unit])))


def lower_add(leaf: layers.Add, low: Lowering) -> LoweredValue:
    """Add two values with a single requantization."""
    return _emit_add(low, *low.inputs)


def _emit_add(low: Lowering, a: LoweredValue, b: LoweredValue) -> LoweredValue:
    """Emit an add op of two values, each of which holds codes or accumulators."""
    emit, q, name = low.emit, low.codes(), low.name
    # Ratios to the output's scale, before its alpha: one for codes; one, or one per channel, for accumulators.
    ratios = [(value.unit if value.q is None else value.q.scale) / q.scale[0] for value in (a, b)]
    mults, shift = shared_shift(name, ratios, low.context.short)
    terms = []
    for i, (value, mult) in enumerate(zip((a, b), mults, strict=True)):
        number: int | str = int(mult[0])
        if len(mult) > 1:
            number = f"{name}.mult{i}"
            emit.constant(number, mult.astype(np.int32))
        if value.q is None:
            terms.append(Term(x=value.buffer, mult=number))
        else:
            terms.append(Term(x=value.buffer, mult=number, zero=emit.zero(value.q), alpha=emit.alpha(value.q)))
    zero = emit.zero(q)
    emit.op(Add(y=name, terms=(terms[0], terms[1]), shift=shift, y_zero=zero, y_alpha=emit.alpha(q), bits=q.bits))
    return LoweredValue(name, a.shape, q)


def lower_layer_norm(leaf: layers.LayerNorm, low: Lowering) -> LoweredValue:
    """Normalize the last axis; the scale of the input cancels."""
    emit, (x,), q, name = low.emit, low.inputs, low.codes(), low.name
    channels = x.shape[-1]
    q_x, scales = x.codes(), q.channel_scales(channels)
    fraction = quotient_fraction(channels)
    epsilon = max(1, round(leaf.eps * channels**2 / float(q_x.scale[0]) ** 2))
    gain, offset = double(leaf.weight) / scales, double(leaf.bias) / scales + q.channel_zeros(channels)
    affine, shift, b_shift = encode_affine(name, gain, offset, fraction)
    emit.constant(f"{name}.affine", affine)
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
            center=leaf.center,
            fraction=fraction,
        )
    )
    return LoweredValue(name, x.shape, q)


def lower_gelu(leaf: layers.Gelu, low: Lowering) -> LoweredValue:
    """Lower GELU to a table with one entry per input code."""
    q_x = low.inputs[0].codes()
    values = np.array([layers.gelu(value) for value in (np.arange(q_x.last + 1) - q_x.zero[0]) * q_x.scale[0]])
    return emit_table(low, values)


def emit_table(low: Lowering, values: np.ndarray) -> LoweredValue:
    """Emit a lookup of function values, one per input code. The output has one scale, or one power-of-two scale per channel."""
    emit, (x,), q, name = low.emit, low.inputs, low.codes(), low.name
    if len(x.codes().scale) > 1 or x.codes().alpha is not None:
        raise FqvitError(f"{name}: its input has one scale per channel, expected one for all.")
    if len(q.scale) == 1:
        emit.constant(f"{name}.table", to_codes(values, q).astype(np.uint8 if q.bits <= 8 else np.uint16))
        emit.op(Lookup(y=name, x=x.buffer))
        return LoweredValue(name, x.shape, q)
    finest, alpha, zeros = powers(q)
    table = np.floor(2 * values / finest).astype(np.int64)
    emit.constant(f"{name}.table", table.astype(np.int16 if np.abs(table).max() < 2**15 else np.int32))
    emit.op(Lookup(y=name, x=x.buffer, alpha=emit.shared("alpha", alpha), y_zero=zeros, bits=q.bits))
    return LoweredValue(name, x.shape, q)


def lower_take(leaf: layers.Take, low: Lowering) -> LoweredValue:
    """Gather rows; with `join` the gathered rows are concatenated along the channels."""
    emit, (x,) = low.emit, low.inputs
    q, channels = x.codes(), x.shape[-1]
    index = leaf.index.cpu().numpy().astype(np.int32)
    rows = f"{low.name}.rows" if leaf.join else low.name
    # A resizable program may need padding at another image size, even if it needs none at this one.
    fill = emit.zero(q) if low.context.resizable or (index < 0).any() else 0
    if leaf.move is not None:
        low.move(rows, leaf.move, leaf.cut)
    emit.op(Take(y=rows, x=x.buffer, index=emit.shared("rows", index), fill=fill))
    shape = (*index.shape, channels)
    if not leaf.join:
        return LoweredValue(low.name, shape, q)
    joined = (*index.shape[:-1], index.shape[-1] * channels)
    emit.op(Permute(y=low.name, x=rows, view=joined, perm=tuple(range(len(joined))), shape=joined))
    return LoweredValue(low.name, joined, q.tiled(index.shape[-1]))


def lower_mean(leaf: layers.Mean, low: Lowering) -> LoweredValue:
    """Lower the mean over the tokens: [T, C] -> [C]."""
    emit, (x,), q = low.emit, low.inputs, low.codes()
    q_x, (tokens, channels) = x.codes(), x.shape
    mult, shift = low.encode_ratio(float(q_x.scale[0]) / (tokens - leaf.skip) / float(q.scale[0]))
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
    return LoweredValue(low.name, (channels,), q)


def double(tensor: Tensor) -> np.ndarray:
    """Convert a parameter to a float64 array."""
    return tensor.detach().cpu().double().numpy()


def to_codes(values: np.ndarray, q: QParams) -> np.ndarray:
    """Quantize real values [..., C] to codes, rounding half up."""
    if q.grid:
        found: np.ndarray = q.encode(torch.from_numpy(values)).numpy()
        return found
    codes = np.floor(values / q.channel_scales(values.shape[-1]) + 0.5) + q.zero[0]
    clipped: np.ndarray = np.clip(codes, 0, q.last)
    return clipped


RULES: dict[type[layers.Leaf], Rule] = {
    layers.Patches: lower_patches,
    layers.Linear: lower_linear,
    layers.Embed: lower_embed,
    layers.Add: lower_add,
    layers.LayerNorm: lower_layer_norm,
    layers.Gelu: lower_gelu,
    layers.Take: lower_take,
    layers.Mean: lower_mean,
}
