"""Lowering rules of the leaf modules of captured graphs (models/general.py)."""

from __future__ import annotations

import math

import numpy as np
import torch

from fqvit.errors import FqvitError
from fqvit.ir.elementwise import Depthwise, Max, Multiply, Rotary
from fqvit.ir.moves import Concat, Permute, Take
from fqvit.ir.ops import Add, Linear, Lookup, Mean, Term
from fqvit.lowering.emit import LoweredValue
from fqvit.lowering.encode import shared_shift, to_int32
from fqvit.lowering.rules.base import Lowering, Rule
from fqvit.lowering.rules.layers import add_constant, double, emit_linear, emit_table
from fqvit.models import general
from fqvit.models.layers import Leaf
from fqvit.quant.qparams import QParams
from fqvit.quant.weights import depthwise_weights, stem_linear

COS_BITS = 14  # fraction bits of rotary tables: 1.0 fits int16, and an error of 2^-15 is far below one 8-bit code


def lower_route(leaf: general.Route, low: Lowering) -> LoweredValue:
    """Reshape, select and permute."""
    (x,) = low.inputs
    q = x.codes()
    if leaf.keeps_channels:
        q = q.tiled(leaf.times)
    elif q.alpha is not None:
        raise FqvitError(f"{low.name}: moves single channels of a value with one shift per channel, which is not supported.")
    permuted = tuple(np.delete(leaf.view, [] if leaf.select is None else leaf.select[0])[list(leaf.perm)].tolist())
    shape = () if permuted == leaf.shape else leaf.shape
    low.emit.op(Permute(y=low.name, x=x.buffer, view=leaf.view, perm=leaf.perm, shape=shape, select=leaf.select))
    return LoweredValue(low.name, leaf.shape, q)


def lower_gather(leaf: general.Gather, low: Lowering) -> LoweredValue:
    """View the input as rows of `width` elements, gather rows, reshape."""
    emit, (x,) = low.emit, low.inputs
    q = x.codes()
    if len(q.scale) > 1 or q.alpha is not None:
        raise FqvitError(f"{low.name}: moves single channels of a value with one scale per channel, which is not supported.")
    rows = reshape(low, x.buffer, x.shape, (math.prod(x.shape) // leaf.width, leaf.width), f"{low.name}.rows")
    index = leaf.index.cpu().numpy().astype(np.int32)
    fill = emit.zero(q) if (index < 0).any() else 0
    return _gathered(low, rows, index, leaf.width, leaf.shape, q, fill)


def _gathered(
    low: Lowering,
    rows: str,
    index: np.ndarray,
    width: int,
    shape: tuple[int, ...],
    q: QParams,
    fill: int | tuple[int, ...] | str,
) -> LoweredValue:
    taken = low.name if shape == (len(index), width) else f"{low.name}.taken"
    low.emit.op(Take(y=taken, x=rows, index=low.emit.shared("rows", index), fill=fill))
    reshape(low, taken, (len(index), width), shape, low.name)
    return LoweredValue(low.name, shape, q)


def reshape(low: Lowering, x: str, shape: tuple[int, ...], wanted: tuple[int, ...], y: str) -> str:
    """Emit a reshape to buffer `y` if the shapes differ; return the buffer that has the wanted shape."""
    if shape == wanted:
        return x
    low.emit.op(Permute(y=y, x=x, view=wanted, perm=tuple(range(len(wanted)))))
    return y


def lower_join(leaf: general.Join, low: Lowering) -> LoweredValue:
    """Requantize all inputs to the scale of this site, concatenate their rows and gather."""
    emit, q, width = low.emit, low.codes(), leaf.width
    if q.alpha is not None or len(q.scale) > 1:
        raise FqvitError(f"{low.name}: joins values with one scale per channel, which is not supported.")
    buffers, count = [], 0
    for i, x in enumerate(low.inputs):
        name = f"{low.name}.part{i}"
        requantize(low, x, q, name)
        rows = math.prod(x.shape) // width
        buffers.append(reshape(low, name, x.shape, (rows, width), f"{name}.rows"))
        count += rows
    index = leaf.index.cpu().numpy().astype(np.int32)
    plain = np.array_equal(index, np.arange(count))
    joined = low.name if plain and leaf.shape == (count, width) else f"{low.name}.joined"
    emit.op(Concat(y=joined, xs=tuple(buffers)))
    if plain:
        reshape(low, joined, (count, width), leaf.shape, low.name)
        return LoweredValue(low.name, leaf.shape, q)
    return _gathered(low, joined, index, width, leaf.shape, q, emit.zero(q) if (index < 0).any() else 0)


def lower_narrow(leaf: general.Narrow, low: Lowering) -> LoweredValue:
    """Requantize a value to the bits of this site: at most 8 for ops that cannot read more, or as requested for an output."""
    (x,), q = low.inputs, low.codes()
    requantize(low, x, q, low.name)
    return LoweredValue(low.name, x.shape, q)


def requantize(low: Lowering, x: LoweredValue, q: QParams, name: str) -> None:
    """Emit codes of `q` for the codes or accumulators of x: a sum whose second term is 0."""
    emit, channels = low.emit, x.shape[-1]
    ratio = (x.unit if x.q is None else x.q.scale) / q.scale[0]
    if len(ratio) not in (1, channels):
        ratio = np.repeat(ratio, channels // len(ratio))
    (mult,), shift = shared_shift(name, [ratio], low.context.short)
    number: int | str = int(mult[0])
    if len(mult) > 1:
        number = f"{name}.mult0"
        emit.constant(number, mult.astype(np.int32))
    zeros = Term(x=emit.shared("zeros", np.zeros(channels, np.int16)), mult=0)
    if x.q is None:
        term = Term(x=x.buffer, mult=number)
    else:
        term = Term(x=x.buffer, mult=number, zero=emit.zero(x.q), alpha=emit.alpha(x.q))
    emit.op(Add(y=name, terms=(term, zeros), shift=shift, y_zero=emit.zero(q), y_alpha=emit.alpha(q), bits=q.bits))


def lower_activation(leaf: general.Activation, low: Lowering) -> LoweredValue:
    """Lower a function of one variable to a table with one entry per input code."""
    (x,) = low.inputs
    q_x = x.codes()
    codes = torch.from_numpy((np.arange(q_x.last + 1) - q_x.zero[0]) * q_x.scale[0])
    return emit_table(low, leaf.function(codes).numpy())


def lower_multiply(leaf: general.Multiply, low: Lowering) -> LoweredValue:
    """Multiply codes; the ratio of scales is s_a * s_b / s_y."""
    (a, b), q = low.inputs, low.codes()
    q_a, q_b = a.codes(), b.codes()
    mult, shift = low.encode_ratio(float(q_a.scale[0] * q_b.scale[0]) / float(q.scale[0]))
    low.emit.op(
        Multiply(
            y=low.name,
            a=a.buffer,
            b=b.buffer,
            mult=mult,
            shift=shift,
            a_zero=int(q_a.zero[0]),
            b_zero=int(q_b.zero[0]),
            y_zero=int(q.zero[0]),
            bits=q.bits,
        )
    )
    return LoweredValue(low.name, a.shape, q)


def lower_rotary(leaf: general.Rotary, low: Lowering) -> LoweredValue:
    """Rotate pairs of channels with i16 tables of cosines and sines: 14 fraction bits, fewer if an entry exceeds 1."""
    emit, (x,), q = low.emit, low.inputs, low.codes()
    q_x = x.codes()
    table = np.stack([double(leaf.cos), double(leaf.sin)])
    # A model may scale its rotation; the largest entry then decides how many fraction bits fit int16.
    bits = COS_BITS - max(math.ceil(math.log2(max(float(np.abs(table).max()), 1.0))), 0)
    emit.constant(f"{low.name}.table", np.floor(table * 2.0**bits + 0.5).astype(np.int16))
    partner = emit.shared("partner", leaf.partner.cpu().numpy().astype(np.int32))
    mult, shift = low.encode_ratio(float(q_x.scale[0]) / float(q.scale[0]) * 2.0**-bits)
    emit.op(
        Rotary(
            y=low.name,
            x=x.buffer,
            partner=partner,
            mult=mult,
            shift=shift,
            zero=int(q_x.zero[0]),
            y_zero=int(q.zero[0]),
            bits=q.bits,
        )
    )
    return LoweredValue(low.name, x.shape, q)


def lower_depthwise(leaf: general.Depthwise, low: Lowering) -> LoweredValue:
    """Lower a depthwise convolution, or an affine map per channel."""
    emit, (x,), q, name = low.emit, low.inputs, low.codes(), low.name
    q_x, channels = x.codes(), x.shape[-1]
    quantized = depthwise_weights(leaf, q_x)
    w = np.ascontiguousarray(quantized.w.T)
    emit.constant(f"{name}.w", w)
    with_zero = quantized.bias - (w.astype(np.int64) * q_x.channel_zeros(channels)).sum(0)
    emit.constant(f"{name}.bias", to_int32(name, "bias", with_zero))
    emit.requantizer(name, quantized.scale / q.channel_scales(channels), low.context.short)
    index = leaf.index.cpu().numpy().astype(np.int32)
    emit.op(
        Depthwise(
            y=name,
            x=x.buffer,
            index=emit.shared("rows", index),
            fill=emit.zero(q_x) if (index < 0).any() else 0,
            y_zero=emit.zero(q),
            bits=q.bits,
        )
    )
    return LoweredValue(name, (*index.shape[:-1], channels), q)


def lower_stem(leaf: general.Stem, low: Lowering) -> LoweredValue:
    """Lower a convolution of the pixels: gather their windows, then apply a linear op.

    Padding is 0 after normalization, which is the mean colour; a pixel can represent it only to the nearest integer.
    """
    emit, (x,) = low.emit, low.inputs
    channels = x.shape[-1]
    rows, windows = f"{low.name}.pixels", f"{low.name}.windows"
    index = leaf.index.cpu().numpy().astype(np.int32)
    preprocess = low.context.preprocess
    mean = np.floor(np.array(preprocess.mean) * 255 + 0.5).astype(np.uint8)
    fill: int | str = emit.shared("mean", mean) if (index < 0).any() else 0
    emit.op(Take(y=rows, x=x.buffer, index=emit.shared("rows", index), fill=fill))
    shape = (len(index), index.shape[1] * channels)
    emit.op(Permute(y=windows, x=rows, view=shape, perm=(0, 1)))
    weight, bias, zero = stem_linear(leaf, preprocess)
    pixels = QParams(8, np.array([1 / 255]), np.array([zero], np.int64))
    return emit_linear(low, LoweredValue(windows, shape, pixels), weight, bias)


def lower_signs(leaf: general.Signs, low: Lowering) -> LoweredValue:
    """Compare codes with the zero point and pack eight results per byte.

    A sum clamped to one bit gives b = [code > zero]. The weights of a byte, 128 to 1, fit i8 only if they are negated, so the
    linear op computes 255 - sum_i 2^(7 - i) * b[i], and a table subtracts this result from 255.
    """
    emit, (x,), name = low.emit, low.inputs, low.name
    q, channels = x.codes(), x.shape[-1]
    zeros = Term(x=emit.shared("zeros", np.zeros(channels, np.int16)), mult=0)
    bits, packed = f"{name}.bits", f"{name}.packed"
    emit.op(Add(y=bits, terms=(Term(x=x.buffer, mult=2, zero=emit.zero(q)), zeros), shift=1, bits=1))
    count = -(-channels // 8)
    weight = np.zeros((count, channels), np.int8)
    for c in range(channels):
        weight[c // 8, c] = -(128 >> c % 8)
    emit.constant(f"{packed}.w", weight)
    emit.constant(f"{packed}.bias", np.zeros(count, np.int32))
    emit.constant(f"{packed}.mult", np.full(count, 1 << 15, np.uint16))
    emit.constant(f"{packed}.shift", np.full(count, 15, np.uint8))
    emit.op(Linear(y=packed, x=bits, y_zero=255))
    emit.constant(f"{name}.table", np.arange(255, -1, -1).astype(np.uint8))
    emit.op(Lookup(y=name, x=packed))
    return LoweredValue(name, (count,), QParams(8, np.ones(1), np.zeros(1, np.int64)))


def lower_mean_rows(leaf: general.MeanRows, low: Lowering) -> LoweredValue:
    """Lower the mean over the axis before the channels."""
    (x,), q = low.inputs, low.codes()
    q_x = x.codes()
    mult, shift = low.encode_ratio(float(q_x.scale[0]) / x.shape[-2] / float(q.scale[0]))
    low.emit.op(
        Mean(
            y=low.name,
            x=x.buffer,
            mult=mult,
            shift=shift,
            zero=low.emit.zero(q_x),
            alpha=low.emit.alpha(q_x),
            y_zero=int(q.zero[0]),
            bits=q.bits,
        )
    )
    return LoweredValue(low.name, (*x.shape[:-2], x.shape[-1]), q)


def lower_max_rows(leaf: general.MaxRows, low: Lowering) -> LoweredValue:
    """Gather rows, then take the largest code. Padding has code 0, the smallest."""
    (x,) = low.inputs
    q, channels = x.codes(), x.shape[-1]
    index = leaf.index.cpu().numpy().astype(np.int32)
    rows = x.buffer
    if x.shape != (*index.shape, channels) or not np.array_equal(index.flatten(), np.arange(index.size)):
        rows = f"{low.name}.rows"
        low.emit.op(Take(y=rows, x=x.buffer, index=low.emit.shared("rows", index)))
    low.emit.op(Max(y=low.name, x=rows))
    return LoweredValue(low.name, (*index.shape[:-1], channels), q)


def lower_shift(leaf: general.Shift, low: Lowering) -> LoweredValue:
    """Add a constant, such as a position embedding."""
    return add_constant(low, low.inputs[0], double(leaf.values), low.node.inputs[0])


RULES: dict[type[Leaf], Rule] = {
    general.Route: lower_route,
    general.Gather: lower_gather,
    general.Join: lower_join,
    general.Narrow: lower_narrow,
    general.Activation: lower_activation,
    general.Multiply: lower_multiply,
    general.Rotary: lower_rotary,
    general.Depthwise: lower_depthwise,
    general.Stem: lower_stem,
    general.MeanRows: lower_mean_rows,
    general.MaxRows: lower_max_rows,
    general.Shift: lower_shift,
    general.Signs: lower_signs,
}
