"""Random cases of multiply, rotary, depthwise and max for test_ops.py."""

from __future__ import annotations

import math

import numpy as np

from fqvit.ir.elementwise import Depthwise, Max, Multiply, Rotary
from fqvit.ir.program import AnyOp
from tests.ir.draw import Draw


def multiply(draw: Draw) -> AnyOp:
    shape = draw.one((5,), (3, 6), (2, 3, 4), (2, 1, 2, 3))
    a_bits, b_bits = draw.one((8, 8), (4, 8), (16, 8), (8, 16), (16, 15), (15, 16))
    draw.buffer("a", shape, a_bits)
    draw.buffer("b", shape[draw.int(0, len(shape) - 1) :], b_bits)
    mult, shift = draw.requantizer(2 ** (a_bits + b_bits))
    zeros = [draw.one(0, 2**bits - 1, draw.int(0, 2**bits - 1)) for bits in (a_bits, b_bits)]
    bits = draw.one(1, 4, 8, 16)
    return Multiply(
        y="y",
        a="a",
        b=draw.one("b", "b", "b", "a") if a_bits < 16 else "b",
        mult=mult,
        shift=shift,
        a_zero=zeros[0],
        b_zero=zeros[1],
        y_zero=draw.one(0, 2**bits - 1),
        bits=bits,
    )


def rotary(draw: Draw) -> AnyOp:
    tokens, period, heads, x_bits = draw.one(1, 4), draw.one(1, 2, 5, 6), draw.one(1, 3), draw.one(4, 8, 16)
    shape = (tokens, period * heads)
    draw.buffer("x", draw.one(shape, (2, *shape), (2, 3, *shape)), x_bits)
    if draw.int(0, 1):
        angle = draw.rng.uniform(0, 2 * math.pi, (tokens, period))
        table = np.stack([np.cos(angle), np.sin(angle)]) * 2**14
    else:
        table = draw.rng.integers(-(2**15), 2**15, (2, tokens, period)) / (1 if x_bits < 16 else 2)
    draw.constants["y.table"] = np.trunc(table).astype(np.int16)
    draw.constant("partner", 0, period - 1, (period,), draw.one("i32", "u16"))
    mult, shift = draw.requantizer(2 ** (x_bits + 14))
    bits = draw.one(4, 8, 16)
    return Rotary(
        y="y",
        x="x",
        partner="partner",
        mult=mult,
        shift=shift,
        zero=draw.one(0, 2**x_bits - 1, 2 ** (x_bits - 1)),
        y_zero=draw.one(0, 2**bits - 1, 2 ** (bits - 1)),
        bits=bits,
    )


def depthwise(draw: Draw) -> AnyOp:
    channels, taps, x_bits = draw.one(1, 3, 6), draw.one(1, 2, 9), draw.one(4, 8, 16)
    shape = draw.one((5, channels), (2, 3, channels))
    draw.buffer("x", shape, x_bits)
    draw.constant("rows", -1, math.prod(shape[:-1]) - 1, (*draw.one((), (4,), (2, 3)), taps), "i32")
    draw.constants["y.w"] = draw.integers(-128, 127, (taps, channels), "i8")
    draw.constant("y.bias", -(2**24), 2**24, (channels,), "i32")
    pairs = [draw.requantizer(taps << x_bits + 7) for _ in range(channels)]
    short = draw.int(0, 1)
    draw.constants["y.mult"] = np.array([m >> 15 * short for m, _ in pairs], np.uint16 if short else np.int32)
    draw.constants["y.shift"] = np.array([max(s - 15 * short, 1) for _, s in pairs], np.uint8)
    bits = draw.one(3, 8, 12)
    fill, y_zero = draw.zero("fill", channels, x_bits), draw.zero("z", channels, bits)
    return Depthwise(y="y", x="x", index="rows", fill=fill, y_zero=y_zero, bits=bits)


def maximum(draw: Draw) -> AnyOp:
    draw.buffer("x", draw.one((1, 3), (7, 5), (2, 3, 4), (2, 2, 9, 1)), draw.one(4, 8, 16))
    return Max(y="y", x="x")
