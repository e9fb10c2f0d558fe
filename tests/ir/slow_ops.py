"""A second, slow definition of every op, written from its docstring: Python integers, loops, one image at a time.

Nothing here may call fqvit.ir.fixed or an op's run(); test_ops.py compares the two definitions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from fqvit.ir.attention import Attend, LogSoftmax, MatMul, RowCodes, ShiftMatMul, Softmax
from fqvit.ir.elementwise import Depthwise, Max, Multiply, Rotary
from fqvit.ir.moves import Concat, Permute, Take
from fqvit.ir.ops import Add, LayerNorm, Linear, Lookup, Mean, Term

Get = Callable[[str], np.ndarray[Any, Any]]
Result = np.ndarray[Any, Any]


def floor_half(numerator: int, denominator: int) -> int:
    """floor(numerator / denominator + 1/2)"""
    return math.floor(Fraction(numerator, denominator) + Fraction(1, 2))


def indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, shape))


def fill(shape: tuple[int, ...], value: Callable[[tuple[int, ...]], int]) -> Result:
    y = np.empty(shape, object)
    for i in indices(shape):
        y[i] = value(i)
    return y


def clamp(value: int, bits: int) -> int:
    return min(max(value, 0), 2**bits - 1)


def zero_of(get: Get, zero: int | tuple[int, ...] | str, c: int, channels: int) -> int:
    if isinstance(zero, int):
        return zero
    if isinstance(zero, tuple):
        return zero[c * len(zero) // channels]
    return int(get(zero)[c])


def alpha_of(get: Get, alpha: str | None, c: int) -> int:
    return 0 if alpha is None else int(get(alpha)[c])


def lookup(op: Lookup, get: Get) -> Result:
    x, table = get(op.x), get(f"{op.y}.table")
    if op.alpha is None:
        return fill(x.shape, lambda i: int(table[int(x[i])]))

    def one(i: tuple[int, ...]) -> int:
        alpha = alpha_of(get, op.alpha, i[-1])
        rounded = math.floor(Fraction(int(table[int(x[i])]), 2 ** (alpha + 1)) + Fraction(1, 2))
        return min(max(rounded + op.y_zero[alpha], 0), 2**op.bits - 1)

    return fill(x.shape, one)


def packed_value(row: np.ndarray[Any, Any], i: int, width: int) -> int:
    """Return value i of a packed row: one large integer whose least significant bits are the first value."""
    return sum(int(byte) * 256**place for place, byte in enumerate(row)) // 2 ** (i * width) % 2**width


def unpacked_weights(op: Linear, get: Get, inputs: int) -> list[list[int]]:
    owner, width = op.weights_of or op.y, op.width or 4
    codes = [[packed_value(row, k, width) for k in range(inputs)] for row in get(f"{owner}.w")]
    if op.codebooks:
        books = get(f"{owner}.codebooks")
        choices = [[packed_value(row, k // op.group, 4) for k in range(inputs)] for row in get(f"{owner}.choice")]
        return [[int(books[b, c]) for b, c in zip(*rows, strict=True)] for rows in zip(choices, codes, strict=True)]
    signed = [[code - 2**width if code >= 2 ** (width - 1) else code for code in row] for row in codes]
    if not op.group:
        return signed
    powers = [[2 ** packed_value(row, k // op.group, 4) for k in range(inputs)] for row in get(f"{owner}.exponent")]
    return [[c * p for c, p in zip(*rows, strict=True)] for rows in zip(signed, powers, strict=True)]


def linear(op: Linear, get: Get) -> Result:
    x, bias = get(op.x), get(f"{op.y}.bias")
    w = unpacked_weights(op, get, x.shape[-1]) if op.group or op.width else get(f"{op.weights_of or op.y}.w")

    def value(i: tuple[int, ...]) -> int:
        *row, o = i
        acc = sum(int(a) * int(b) for a, b in zip(x[tuple(row)], w[o], strict=True)) + int(bias[o])
        if op.out == "acc":
            return acc
        y = floor_half(acc * int(get(f"{op.y}.mult")[o]), 2 ** int(get(f"{op.y}.shift")[o]))
        return y if op.out == "i32" else clamp(y + zero_of(get, op.y_zero, o, len(w)), op.bits)

    return fill((*x.shape[:-1], len(w)), value)


def layernorm(op: LayerNorm, get: Get) -> Result:
    x, (g, b) = get(op.x), get(f"{op.y}.affine")
    channels = x.shape[-1]
    y = np.empty(x.shape, object)
    for row in indices(x.shape[:-1]):
        v = [(int(x[row][c]) - zero_of(get, op.zero, c, channels)) * 2 ** alpha_of(get, op.alpha, c) for c in range(channels)]
        m1, m2 = sum(v) if op.center else 0, sum(a * a for a in v)
        big = channels * m2 - m1 * m1 + op.epsilon
        j = 0
        while big * 4 ** (j + 1) < 2**62:
            j += 1
        d = math.isqrt(big * 4**j)
        for c in range(channels):
            t = floor_half((channels * v[c] - m1) * 2 ** (op.fraction + j), d)
            assert abs(t) < 2**31
            y[(*row, c)] = clamp(floor_half(t * int(g[c]) + int(b[c]) * 2**op.b_shift, 2**op.shift), op.bits)
    return y


def add(op: Add, get: Get) -> Result:
    xs = [get(term.x) for term in op.terms]
    shape = max((x.shape for x in xs), key=len)
    channels = shape[-1]

    def value(i: tuple[int, ...]) -> int:
        c = i[-1]
        total = 0
        for term, x in zip(op.terms, xs, strict=True):
            assert isinstance(term, Term)
            code = int(x[i[len(i) - x.ndim :]])
            mult = term.mult if isinstance(term.mult, int) else int(get(term.mult)[c])
            total += (code - zero_of(get, term.zero, c, channels)) * 2 ** alpha_of(get, term.alpha, c) * mult
        shifted = floor_half(total, 2 ** (op.shift + alpha_of(get, op.y_alpha, c)))
        return clamp(shifted + zero_of(get, op.y_zero, c, channels), op.bits)

    return fill(shape, value)


def take(op: Take, get: Get) -> Result:
    x, index = get(op.x), get(op.index)
    channels = x.shape[-1]
    rows = [x[i] for i in indices(x.shape[:-1])]

    def value(i: tuple[int, ...]) -> int:
        *lead, c = i
        row = int(index[tuple(lead)])
        return zero_of(get, op.fill, c, channels) if row == -1 else int(rows[row][c])

    return fill((*index.shape, channels), value)


def permute(op: Permute, get: Get) -> Result:
    flat = [int(v) for v in get(op.x).ravel()]
    kept = [axis for axis in range(len(op.view)) if op.select is None or axis != op.select[0]]
    out = [op.view[kept[axis]] for axis in op.perm]
    values = []
    for i in indices(tuple(out)):
        where = [0] * len(op.view)
        if op.select is not None:
            where[op.select[0]] = op.select[1]
        for position, axis in zip(i, op.perm, strict=True):
            where[kept[axis]] = position
        number = 0
        for position, size in zip(where, op.view, strict=True):
            number = number * size + position
        values.append(flat[number])
    return np.array(values, object).reshape(op.shape or out)


def concat(op: Concat, get: Get) -> Result:
    rows = [[int(v) for v in row] for name in op.xs for row in get(name)]
    return np.array(rows, object)


def mean(op: Mean, get: Get) -> Result:
    x = get(op.x)
    *outer, tokens, channels = x.shape

    def value(i: tuple[int, ...]) -> int:
        *lead, c = i
        total = sum(int(x[(*lead, t, c)]) - zero_of(get, op.zero, c, channels) for t in range(op.skip, tokens))
        return clamp(floor_half(total * 2 ** alpha_of(get, op.alpha, c) * op.mult, 2**op.shift) + op.y_zero, op.bits)

    return fill((*outer, channels), value)


def matmul(op: MatMul, get: Get) -> Result:
    a, b = get(op.a), get(op.b)
    inner = a.shape[-1]

    def value(i: tuple[int, ...]) -> int:
        *lead, m, n = i
        acc = 0
        for k in range(inner):
            right = int(b[(*lead, k, n)] if op.b_rows else b[(*lead, n, k)])
            acc += (int(a[(*lead, m, k)]) - op.a_zero) * (right - op.b_zero)
        if op.index is not None:
            acc += int(get(f"{op.y}.bias")[int(get(op.index)[m, n]), lead[-1]])
        mult = op.mult if isinstance(op.mult, int) else int(get(op.mult)[lead[-1]])
        return clamp(floor_half(acc * mult, 2**op.shift) + op.y_zero, op.bits)

    return fill((*a.shape[:-1], b.shape[-1] if op.b_rows else b.shape[-2]), value)


def by_distance(x: np.ndarray[Any, Any], row: tuple[int, ...], table: Any, region: Any, elsewhere: int) -> list[int]:
    """Look up each code of a row by its distance from the largest code; masked tokens (other regions) give `elsewhere`."""
    *lead, _, m = row
    tokens = x.shape[-1]
    codes = [int(v) for v in x[row]]
    seen = [region is None or region[lead[-1], m] == region[lead[-1], t] for t in range(tokens)]
    top = max(code for code, s in zip(codes, seen, strict=True) if s)
    return [int(table[min(top - code, len(table) - 1)]) if s else elsewhere for code, s in zip(codes, seen, strict=True)]


def log_softmax(op: LogSoftmax, get: Get) -> Result:
    x, table = get(op.x), get(f"{op.y}.table")
    region = None if op.region is None else get(op.region)
    last = 2**op.bits - 1
    y = np.empty(x.shape, object)
    for row in indices(x.shape[:-1]):
        e = by_distance(x, row, table, region, 0)
        for t, part in enumerate(e):
            code = last
            if part > 0:
                r = floor_half(sum(e), part)
                top = r.bit_length() - 1
                code = min(top + (2 * r >= 3 * 2**top), last)
            y[(*row, t)] = code
    return y


def softmax(op: Softmax, get: Get) -> Result:
    x, table = get(op.x), get(f"{op.y}.table")
    region = None if op.region is None else get(op.region)
    y = np.empty(x.shape, object)
    for row in indices(x.shape[:-1]):
        e = by_distance(x, row, table, region, 0)
        r = floor_half(op.mult, sum(e))
        for t, part in enumerate(e):
            y[(*row, t)] = clamp(floor_half(part * r, 2**op.shift), op.bits)
    return y


def shift_matmul(op: ShiftMatMul, get: Get) -> Result:
    a, v = get(op.a), get(op.v)
    last = 2**op.a_bits - 1

    def value(i: tuple[int, ...]) -> int:
        *lead, m, d = i
        acc = 0
        for t in range(a.shape[-1]):
            code = int(a[(*lead, m, t)])
            if not (op.zero_code and code == last):
                acc += (int(v[(*lead, t, d)]) - op.v_zero) * 2 ** (last - code)
        return clamp(floor_half(acc * op.mult, 2**op.shift) + op.y_zero, op.bits)

    return fill((*a.shape[:-1], v.shape[-1]), value)


def row_codes(op: RowCodes, get: Get) -> Result:
    x, table = get(op.x), get(f"{op.y}.table")
    region = None if op.region is None else get(op.region)
    y = np.empty(x.shape, object)
    for row in indices(x.shape[:-1]):
        y[row] = by_distance(x, row, table, region, int(table[-1]))
    return y


def attend(op: Attend, get: Get) -> Result:
    a, v = get(op.a), get(op.v)
    levels = op.levels or range(256)

    def value(i: tuple[int, ...]) -> int:
        *lead, m, d = i
        weights = [levels[int(code)] for code in a[(*lead, m)]]
        acc = sum(w * (int(v[(*lead, t, d)]) - op.v_zero) for t, w in enumerate(weights))
        mult = floor_half(op.mult * max(levels), sum(weights))
        assert abs(acc) < 2**31 and 0 <= mult <= op.mult
        return clamp(floor_half(acc * mult, 2**op.shift) + op.y_zero, op.bits)

    return fill((*a.shape[:-1], v.shape[-1]), value)


def multiply(op: Multiply, get: Get) -> Result:
    a, b = get(op.a), get(op.b)

    def value(i: tuple[int, ...]) -> int:
        product = (int(a[i]) - op.a_zero) * (int(b[i[a.ndim - b.ndim :]]) - op.b_zero)
        return clamp(floor_half(product * op.mult, 2**op.shift) + op.y_zero, op.bits)

    return fill(a.shape, value)


def rotary(op: Rotary, get: Get) -> Result:
    x, table, partner = get(op.x), get(f"{op.y}.table"), get(op.partner)

    def value(i: tuple[int, ...]) -> int:
        *lead, t, c = i
        p = c % len(partner)
        own, other = (int(x[(*lead, t, at)]) - op.zero for at in (c, c - p + int(partner[p])))
        acc = own * int(table[0, t, p]) + other * int(table[1, t, p])
        assert abs(acc) < 2**31
        return clamp(floor_half(acc * op.mult, 2**op.shift) + op.y_zero, op.bits)

    return fill(x.shape, value)


def depthwise(op: Depthwise, get: Get) -> Result:
    x, index = get(op.x), get(op.index)
    w, bias, mult, shift = (get(f"{op.y}.{part}") for part in ("w", "bias", "mult", "shift"))
    channels = x.shape[-1]
    rows = [x[i] for i in indices(x.shape[:-1])]

    def value(i: tuple[int, ...]) -> int:
        *lead, c = i
        acc = int(bias[c])
        for k, row in enumerate(index[tuple(lead)]):
            code = zero_of(get, op.fill, c, channels) if row == -1 else int(rows[row][c])
            acc += code * int(w[k, c])
        assert abs(acc) < 2**31
        y = floor_half(acc * int(mult[c]), 2 ** int(shift[c]))
        return clamp(y + zero_of(get, op.y_zero, c, channels), op.bits)

    return fill((*index.shape[:-1], channels), value)


def maximum(op: Max, get: Get) -> Result:
    x = get(op.x)
    *outer, tokens, channels = x.shape
    return fill((*outer, channels), lambda i: max(int(x[(*i[:-1], t, i[-1])]) for t in range(tokens)))


SLOW: dict[type, Callable[[Any, Get], Result]] = {
    Lookup: lookup,
    Linear: linear,
    LayerNorm: layernorm,
    Add: add,
    Take: take,
    Permute: permute,
    Concat: concat,
    Mean: mean,
    MatMul: matmul,
    LogSoftmax: log_softmax,
    Softmax: softmax,
    ShiftMatMul: shift_matmul,
    RowCodes: row_codes,
    Attend: attend,
    Multiply: multiply,
    Rotary: rotary,
    Depthwise: depthwise,
    Max: maximum,
}
