"""Draw multiply, rotary, depthwise, max and mean ops whose sizes exercise vector kernels, as in wide.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fqvit.ir.elementwise import Depthwise, Max, Multiply, Rotary
from fqvit.ir.ops import Lookup, Mean
from tests.ir.draw import Draw
from tests.runtime.wide import Case, shift_to, size


def mult_and_shift(draw: Draw, acc: Any, bits: int) -> tuple[int, int]:
    """Draw a multiplier, large or small, and a shift that scales the accumulators to codes of `bits` bits."""
    mult = draw.one(draw.int(2**30, 2**31 - 1), draw.int(2**30, 2**31 - 1), draw.int(1, 2**16), draw.one(0, 1, 2**31 - 1))
    return mult, shift_to(draw, acc * mult, bits)


def multiply(draw: Draw) -> Case:
    lead, channels = draw.one((), (1,), (5,), (3, 7)), size(draw, 1, 4, 8, 16, 33, 64, 100)
    shape = (*lead, channels)
    a_bits, b_bits = draw.one((8, 8), (8, 8), (5, 8), (16, 8), (8, 16), (16, 15), (15, 15))
    draw.buffer("a", shape, a_bits)
    draw.buffer("b", shape[draw.int(0, len(lead)) :], b_bits)
    zeros = [draw.one(0, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1)) for bits in (a_bits, b_bits)]
    a, b = (draw.buffers[name].astype(np.int64) - zero for name, zero in zip("ab", zeros, strict=True))
    bits = draw.one(1, 8, 8, 8, 12, 16)
    mult, shift = mult_and_shift(draw, a * b.reshape(len(b), *(1,) * (a.ndim - b.ndim), *b.shape[1:]), bits)
    y_zero = draw.one(0, 2**bits - 1, 2 ** (bits - 1))
    return (Multiply(y="y", a="a", b="b", mult=mult, shift=shift, a_zero=zeros[0], b_zero=zeros[1], y_zero=y_zero, bits=bits),)


def rotary(draw: Draw) -> Case:
    """Draw a rotary op. Partners are neighbours, half a period apart, any channels, or the channels themselves."""
    tokens, heads, x_bits = draw.one(1, 5, 9), draw.one(1, 2, 3), draw.one(8, 8, 5, 15, 16)
    period = draw.one(8, 16, 24, 32, 64, 2, 10, 7)
    shape = (tokens, period * heads)
    draw.buffer("x", draw.one(shape, (2, *shape)), x_bits)
    own, half = np.arange(period), period // 2
    pairs = own ^ 1 if period % 2 == 0 else own[::-1]
    partner = draw.one(pairs, (own + half) % period, draw.rng.permutation(period), draw.rng.integers(0, period, period), own)
    draw.constants["partner"] = partner.astype(draw.one(np.int32, np.uint16))
    angle = draw.rng.uniform(0, 2 * math.pi, (tokens, period))
    table = np.rint(np.stack([np.cos(angle), np.sin(angle)]) * 2**14)
    if x_bits < 16 and draw.int(0, 3) == 0:
        table = draw.rng.integers(-(2**15), 2**15, table.shape)
    draw.constants["y.table"] = table.astype(np.int16)
    zero = draw.one(0, 2**x_bits - 1, 2 ** (x_bits - 1), 2 ** (x_bits - 1))
    x = draw.buffers["x"].astype(np.int64) - zero
    bits = draw.one(1, 8, 8, 8, 12, 16)
    mult, shift = mult_and_shift(draw, x << 14, bits)
    y_zero = draw.one(0, 2**bits - 1, 2 ** (bits - 1))
    return (Rotary(y="y", x="x", partner="partner", mult=mult, shift=shift, zero=zero, y_zero=y_zero, bits=bits),)


def depthwise(draw: Draw) -> Case:
    """Draw a depthwise convolution with 1 to 25 taps, sometimes followed by a lookup, which the engine fuses."""
    rows, channels, taps = draw.one(1, 4, 12), size(draw, 1, 4, 8, 16, 24, 33, 64, 100), draw.one(1, 2, 3, 9, 9, 25)
    x_bits, y = draw.one(8, 8, 8, 5, 16), draw.one("y", "y", "m")
    draw.buffer("x", (rows, channels), x_bits)
    index = draw.rng.integers(-1, rows - 1, (*draw.one((), (1,), (6,), (3, 3)), taps), endpoint=True).astype(np.int32)
    w = draw.integers(-128, 127, (taps, channels), "i8")
    draw.constants |= {"index": index, f"{y}.w": w}
    acc = np.einsum("nikc,kc->nic", draw.buffers["x"][:, index.reshape(-1, taps).clip(0)].astype(np.int64), w.astype(np.int64))
    bias = -acc.mean((0, 1)).astype(np.int64) + draw.integers(-(2**8), 2**8, (channels,), "i64")
    acc += bias
    mult = draw.rng.integers(1, 2 ** draw.one(8, 16, 31) - 1, channels, endpoint=True)
    bits = 8 if y == "m" else draw.one(1, 8, 8, 12, 16)
    shift = [shift_to(draw, acc[..., c] * m, bits) for c, m in enumerate(mult)]
    draw.constants |= {f"{y}.bias": bias.astype(np.int32), f"{y}.mult": mult.astype(np.int32)}
    draw.constants[f"{y}.shift"] = np.array(shift, np.uint8)
    fill, y_zero = draw.zero("f", channels, x_bits), draw.zero("z", channels, bits)
    op = Depthwise(y=y, x="x", index="index", fill=fill, y_zero=y_zero, bits=bits)
    if y == "y":
        return (op,)
    dtype, last = draw.one(("u8", 255), ("u16", 65535))
    draw.constant("y.table", 0, last, (256,), dtype)
    return op, Lookup(y="y", x="m")


def maximum(draw: Draw) -> Case:
    channels = size(draw, 1, 8, 16, 32, 64, 65, 100, 130)
    draw.buffer("x", (*draw.one((), (3,), (2, 2)), draw.one(1, 2, 9, 20), channels), draw.one(8, 8, 5, 16))
    return (Max(y="y", x="x"),)


def mean(draw: Draw) -> Case:
    tokens, channels, x_bits = draw.one(1, 2, 9, 20), size(draw, 1, 8, 16, 64, 65, 100, 130), draw.one(8, 8, 5, 16)
    draw.buffer("x", (*draw.one((), (3,), (2, 2)), tokens, channels), x_bits)
    zero, alpha, skip = draw.zero("zero", channels, x_bits), draw.alpha("alpha", channels), draw.int(0, min(tokens - 1, 2))
    x = draw.buffers["x"].astype(np.int64)
    middle = draw.constants[zero] if isinstance(zero, str) else np.repeat(zero, channels // np.size(zero))
    acc = (x - middle)[..., skip:, :].sum(-2)
    bits = draw.one(1, 8, 8, 12, 16)
    mult, shift = mult_and_shift(draw, acc, bits)
    y_zero = draw.one(0, 2**bits - 1, 2 ** (bits - 1))
    return (Mean(y="y", x="x", mult=mult, shift=shift, skip=skip, zero=zero, alpha=alpha, y_zero=y_zero, bits=bits),)


ELEMENTWISE = {"multiply": multiply, "rotary": rotary, "depthwise": depthwise, "max": maximum, "mean": mean}
