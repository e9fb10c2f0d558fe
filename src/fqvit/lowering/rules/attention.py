"""Lowering rules of attention: heads, scores, softmax and attention times V."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from torch import Tensor

from fqvit.errors import FqvitError
from fqvit.ir.attention import Attend, LogSoftmax, MatMul, RowCodes, ShiftMatMul, Softmax
from fqvit.ir.moves import Permute
from fqvit.lowering.emit import LoweredValue
from fqvit.lowering.encode import shared_shift, to_int32
from fqvit.lowering.grids import numbered
from fqvit.lowering.rules.base import Lowering, Rule
from fqvit.lowering.rules.layers import double
from fqvit.models import layers
from fqvit.quant.exptable import EXP_TABLES, level_table

SOFTMAX_BITS = 52  # bits of Softmax's mult, which stays below 2^53 because JSON readers may use float64
MOST_REGIONS = 256  # region numbers are u8


def lower_heads(leaf: layers.Heads, low: Lowering) -> LoweredValue:
    """Select Q, K or V and split it into heads: [..., T, 3 * H * D] -> [..., H, T, D]."""
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
    return LoweredValue(low.name, shape, x.codes().group(leaf.part))


def lower_scores(leaf: layers.Scores, low: Lowering) -> LoweredValue:
    """Emit Q @ K^T * scale: Q and K [..., H, T, D] -> [..., H, T, T]."""
    return _emit_scores(low, leaf, None)


def lower_biased_scores(leaf: layers.BiasedScores, low: Lowering) -> LoweredValue:
    """Emit Q @ K^T * scale plus the relative position bias."""
    return _emit_scores(low, leaf, leaf.index)


def _emit_scores(low: Lowering, leaf: layers.Scores, index: Tensor | None) -> LoweredValue:
    """Emit a matmul of Q and K. index: [T, T], row numbers in the table of relative position biases."""
    emit, (a, b), q = low.emit, low.inputs, low.codes()
    q_a, q_b = a.codes(), b.codes()
    # The real value of 1 in an accumulator: one number, or one per head.
    factors = np.ones(1) if leaf.factors is None else double(leaf.factors)
    unit = float(q_a.scale[0] * q_b.scale[0]) * leaf.scale * factors
    name = None
    if index is not None:
        table = np.floor(double(low.node.params[0]) / unit + 0.5)
        emit.constant(f"{low.name}.bias", to_int32(low.name, "relative position bias", table.astype(np.int64)))
        rows = index.cpu().numpy()
        name = emit.shared("relative_position_index", rows.astype(np.uint16 if rows.max() < 1 << 16 else np.int32))
    mult: int | str
    if len(unit) == 1:
        mult, shift = low.encode_ratio(float(unit[0]) / float(q.scale[0]))
    else:
        (mults,), shift = shared_shift(low.name, [unit / float(q.scale[0])], low.context.short)
        mult = f"{low.name}.mult"
        emit.constant(mult, mults.astype(np.int32))
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
    return LoweredValue(low.name, (*a.shape[:-1], b.shape[-2]), q)


def lower_softmax(leaf: layers.Softmax, low: Lowering) -> LoweredValue:
    """Emit a softmax with relative, log2 or uniform codes, whichever the site's parameters describe."""
    emit, (x,), q = low.emit, low.inputs, low.codes()
    q_x, tokens = x.codes(), x.shape[-1]
    region = None if leaf.mask is None else emit.shared("region", _regions(leaf.mask))
    if region is not None:
        low.move(low.name, "windows", leaf.cut)
    if q.levels:
        emit.constant(f"{low.name}.table", level_table(float(q_x.scale[0]), q_x.last + 1, q.levels, leaf.mask is not None))
        emit.op(RowCodes(y=low.name, x=x.buffer, region=region))
        return LoweredValue(low.name, x.shape, q)
    make = EXP_TABLES[low.context.calibration.recipe.exp]
    emit.constant(f"{low.name}.table", make(float(q_x.scale[0]), q_x.last + 1, tokens))
    if q.log2:
        emit.op(LogSoftmax(y=low.name, x=x.buffer, bits=q.bits, region=region))
        q = dataclasses.replace(q, zero_code=q.zero_code or low.context.masked)
    else:
        scale = float(q.scale[0])
        softmax_shift = min(SOFTMAX_BITS + math.frexp(scale)[1] - 1, SOFTMAX_BITS)
        mult = round(2**softmax_shift / scale)
        emit.op(Softmax(y=low.name, x=x.buffer, mult=mult, shift=softmax_shift, bits=q.bits, region=region))
    return LoweredValue(low.name, x.shape, q)


def _regions(mask: Tensor) -> np.ndarray:
    """Return region numbers u8 [W, T]: equal for two tokens of a window if and only if mask [W, T, T] is True for them.

    A window of a Swin model has at most four regions, because the cyclic shift cuts it at most once in each direction.
    """
    same = mask.cpu().numpy()
    first = same.argmax(-1)  # a region is identified by its first token
    if not (same == (first[:, :, None] == first[:, None, :])).all():
        raise FqvitError("attention mask: not a partition of the tokens into regions.")
    most = max(len(np.unique(window)) for window in first)
    if most > MOST_REGIONS:
        raise FqvitError(f"attention mask: {most} regions in a window, expected at most {MOST_REGIONS}.")
    return numbered(same)


def lower_context(leaf: layers.Context, low: Lowering) -> LoweredValue:
    """Emit attention times V, then merge the heads: [..., H, T, T] x [..., H, T, D] -> [..., T, H * D]."""
    emit, (a, v), q = low.emit, low.inputs, low.codes()
    q_a, q_v = a.codes(), v.codes()
    heads = f"{low.name}.heads"
    # With per-channel scales of V, the ratio to this site's scale is the same for all channels.
    ratio = float(q_v.scale[0]) / float(q.scale[0])
    v_zero, y_zero = int(q_v.zero[0]), int(q.zero[0])
    if q_a.levels:
        # Attend multiplies mult by the largest level, so the ratio is divided by it; mult has two bits fewer than in other ops.
        mult, shift = low.encode_ratio(4 * ratio / max(q_a.levels))
        mult = mult if low.context.short else min((mult + 2) >> 2, 2**29 - 1)
        shift = shift + 2 if low.context.short else shift
        levels = () if q_a.levels == tuple(range(256)) else q_a.levels
        common = {"mult": mult, "shift": shift, "v_zero": v_zero, "y_zero": y_zero, "bits": q.bits}
        emit.op(Attend(y=heads, a=a.buffer, v=v.buffer, levels=levels, **common))
    elif q_a.log2:
        mult, shift = low.encode_ratio(ratio * 2.0**-q_a.last)
        common = {"mult": mult, "shift": shift, "v_zero": v_zero, "y_zero": y_zero, "bits": q.bits}
        emit.op(ShiftMatMul(y=heads, a=a.buffer, v=v.buffer, a_bits=q_a.bits, zero_code=q_a.zero_code, **common))
    else:
        mult, shift = low.encode_ratio(ratio * float(q_a.scale[0]))
        common = {"mult": mult, "shift": shift, "b_zero": v_zero, "y_zero": y_zero, "bits": q.bits}
        emit.op(MatMul(y=heads, a=a.buffer, b=v.buffer, a_zero=int(q_a.zero[0]), b_rows=True, index=None, **common))
    *lead, count, tokens, _ = a.shape
    width, n = v.shape[-1], len(lead)
    shape = (*lead, tokens, count * width)
    emit.op(Permute(y=low.name, x=heads, view=(*lead, count, tokens, width), perm=(*range(n), n + 1, n, n + 2), shape=shape))
    return LoweredValue(low.name, shape, q)


RULES: dict[type[layers.Leaf], Rule] = {
    layers.Heads: lower_heads,
    layers.Scores: lower_scores,
    layers.BiasedScores: lower_biased_scores,
    layers.Softmax: lower_softmax,
    layers.Context: lower_context,
}
