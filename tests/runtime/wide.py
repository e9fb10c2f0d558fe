"""Draw random ops whose sizes exercise vector kernels: several vectors plus a remainder.

Each case draws buffers and constants and returns a sequence of ops, the last of which writes y. Some are sequences that the
engine fuses: linear with lookup or add, and attention from Q, K and V to the context. See also: tests/ir/test_ops.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from fqvit.ir.attention import Attend, LogSoftmax, MatMul, RowCodes, ShiftMatMul, Softmax
from fqvit.ir.moves import Permute
from fqvit.ir.ops import Add, LayerNorm, Linear, Lookup, Term
from fqvit.ir.program import AnyOp
from fqvit.ir.value import Scope
from fqvit.quant.exptable import exp_table
from tests.ir.draw import Draw

Case = tuple[AnyOp, ...]


def size(draw: Draw, *sizes: int) -> int:
    """Draw one of these sizes, plus -1, 0 or 1."""
    return max(1, draw.one(*sizes) + draw.int(-1, 1))


def shift_to(draw: Draw, x: Any, bits: int, last: int = 62) -> int:
    """Draw a shift that scales x to codes of `bits` bits, or sometimes an extreme one."""
    reach = draw.one(int(np.abs(x).max()), int(3 * x.std()), int(3 * x.std())) + 1
    middle = min(max(reach.bit_length() - bits, 1), last)
    return int(draw.one(*[middle] * 12, min(middle + 3, last), max(middle - 3, 1), draw.one(1, 31, 32, 33, last)))


def linear_parts(draw: Draw, name: str, x: Any, outputs: int, bits: int) -> Any:
    """Draw weights, biases that keep |acc| < 2^31 if possible, multipliers and shifts; return the accumulators of x."""
    x = x.reshape(-1, x.shape[-1]).astype(np.int64)
    w = draw.rng.integers(-128, 127, (outputs, x.shape[-1]), endpoint=True)
    kind = draw.int(0, 4)
    if kind == 1:
        w = np.clip(np.rint(draw.rng.normal(0, 42, w.shape)), -128, 127).astype(np.int64)
    elif kind == 2:
        w = np.where(draw.rng.random(w.shape) < 0.5, -128, 127)
    elif kind == 3:
        w = np.full(w.shape, draw.one(-128, 127))
    elif kind == 4:
        w = np.where(draw.rng.random(w.shape) < 0.1, w, 0)
    acc = x @ w.T
    far = draw.one(0, 2**8, 2**20, 2**31)
    bias = draw.integers(-far, far, (outputs,), "i64") - (acc.mean(0).astype(np.int64) if far < 2**20 else 0)
    room = np.maximum(2**31 - 1 - np.abs(w).sum(1) * (2 ** draw.values["x"].hi.bit_length() - 1), 0)
    bias = np.clip(bias, -room, room)
    acc += bias
    mult = draw.rng.integers(1, 2 ** draw.one(8, 16, 31) - 1, outputs, endpoint=True)
    if draw.int(0, 4) == 0:
        mult = draw.rng.choice([0, 1, 2**30, 2**31 - 1], outputs)
    shift = [shift_to(draw, acc[:, o] * m, bits) for o, m in enumerate(mult)]
    draw.constants |= {f"{name}.w": w.astype(np.int8), f"{name}.bias": bias.astype(np.int32)}
    draw.constants |= {f"{name}.mult": mult.astype(np.int32), f"{name}.shift": np.array(shift, np.uint8)}
    return acc


def rows_and_sizes(draw: Draw) -> tuple[tuple[int, ...], int, int]:
    """Draw the leading axes, K and O of a linear op."""
    lead = draw.one((1,), (2,), (10,), (11,), (12,), (23,), (34,), (3, 7), (2, 2, 5), ())
    return lead, size(draw, 1, 4, 8, 16, 33, 64, 100, 192, 768, 1537, 2400), size(draw, 1, 8, 16, 25, 33, 64, 100)


def linear(draw: Draw) -> Case:
    lead, inner, outputs = rows_and_sizes(draw)
    bits = draw.one(8, 8, 8, 5, 16)
    draw.buffer("x", (*lead, inner), bits)
    y_bits = draw.one(1, 4, 7, 8, 8, 9, 12, 16)
    linear_parts(draw, "y", draw.buffers["x"], outputs, y_bits)
    out = draw.one("codes", "codes", "acc", "i32")
    if out == "i32":
        draw.constants["y.shift"] = np.maximum(draw.constants["y.shift"], draw.one(1, 31)).astype(np.uint8)
    return (Linear(y="y", x="x", out=out, y_zero=draw.zero("z", outputs, y_bits), bits=y_bits),)


def linear_lookup(draw: Draw) -> Case:
    lead, inner, outputs = rows_and_sizes(draw)
    draw.buffer("x", (*lead, inner))
    bits = draw.one(3, 8, 8, 10, 16)
    linear_parts(draw, "m", draw.buffers["x"], outputs, bits)
    first = Linear(y="m", x="x", y_zero=draw.zero("z", outputs, bits), bits=bits)
    if draw.int(0, 1):
        wide, last = draw.one(("u8", 255), ("u16", 65535))
        draw.constant("y.table", 0, last, (2**bits,), wide)
        return first, Lookup(y="y", x="m")
    signed, end = draw.one(("i16", 2**9), ("i16", 2**15 - 1), ("i32", 2**20))
    draw.constant("y.table", -end, end, (2**bits,), signed)
    alpha = draw.constant("alpha", 0, draw.one(0, 1, 3, 15), (outputs,), "u8")
    y_bits = draw.one(1, 6, 8, 16)
    zeros = tuple(draw.int(0, 2**y_bits - 1) for _ in range(int(draw.constants["alpha"].max()) + 1))
    return first, Lookup(y="y", x="m", alpha=alpha, y_zero=zeros, bits=y_bits)


def linear_add(draw: Draw) -> Case:
    lead, inner, outputs = rows_and_sizes(draw)
    shape = (*lead, outputs)
    draw.buffer("x", (*lead, inner))
    acc = linear_parts(draw, "acc", draw.buffers["x"], outputs, 8)
    most = draw.one(2**8, 2**16, 2**30 - 1)
    draw.constants["am"] = draw.integers(0, most, (outputs,), "i32")
    own = Term(x="acc", mult=draw.one("am", draw.int(0, most)))
    bits, r_most, k = draw.one(4, 8, 16), draw.one(2**8, 2**16, 2**29), draw.one(0, 3, 14, 15)
    rm = draw.constant("rm", 0, r_most, (outputs,), "i32")
    alpha = draw.one(None, draw.constant("ra", 0, k, (outputs,), "u8"))
    residual = draw.one("buffer", "buffer", "constant", "positions", "row")
    if residual == "buffer":
        draw.buffer("r", shape, bits)
    elif residual == "positions":
        draw.constants["r"] = draw.integers(-(2**15), 2**15 - 1, shape, "i16")
    else:
        given = shape if residual == "constant" else (outputs,)
        draw.constants["r"] = draw.integers(0, 2**bits - 1, given, "u8" if bits <= 8 else "u16")
    other = Term(x="r", mult=draw.one(rm, draw.int(0, r_most)), zero=draw.zero("rz", outputs, bits), alpha=alpha)
    y_bits, y_k = draw.one(1, 8, 8, 12, 16), draw.one(0, 4)
    y_zero, y_alpha = draw.zero("yz", outputs, y_bits), draw.one(None, draw.constant("ya", 0, y_k, (outputs,), "u8"))
    shift = shift_to(draw, acc * (draw.constants["am"] / 2).astype(np.int64), y_bits, 62 - y_k)
    if draw.int(0, 4) == 0:  # only the residual, near the 32-bit limit
        k, mult = draw.int(13, 15), draw.int(1, 40)
        draw.constants["ra"] = np.full(outputs, k, np.uint8)
        own, other = Term(x="acc", mult=0), Term(x="r", mult=mult, zero=draw.one(0, 2**bits - 1), alpha="ra")
        shift, y_alpha = draw.int(1, 5), None
    terms = (own, other) if draw.int(0, 1) else (other, own)
    return (
        Linear(y="acc", x="x", out="acc"),
        Add(y="y", terms=terms, shift=shift, y_zero=y_zero, y_alpha=y_alpha, bits=y_bits),
    )


def layernorm(draw: Draw) -> Case:
    channels, rows = size(draw, 1, 8, 16, 100, 192), draw.one(1, 2, 5, 13)
    channels = draw.one(channels, 8, 16, 32, 48, 64, 104, 384, 768, 1000, 3960, 3968)
    bits = draw.one(1, 4, 8, 8, 8, 10, 12, 16)
    lead = draw.one((rows,), (2, rows))
    draw.buffer("x", (*lead, channels), bits)
    x = draw.buffers["x"].reshape(-1, channels)
    for row in draw.rng.integers(0, len(x), draw.int(0, 4)):  # rows of equal codes, or with one outlier
        x[row] = draw.int(0, 2**bits - 1)
        if draw.int(0, 1):
            x[row, draw.int(0, channels - 1)] = draw.one(0, 2**bits - 1)
    shift = draw.one(draw.int(24, 46), 31, 32, 33, 40)
    y_bits = draw.one(1, 3, 8, 8, 12, 16)
    scale = 2.0 ** (shift - 24 + y_bits) * draw.one(0.01, 0.2, 0.2, 0.5, 10)
    g = np.clip(draw.rng.normal(0, scale, channels), -(2**31) + 1, 2**31 - 1)
    b_shift = draw.one(0, max(shift - 20, 0), 32)
    b = np.clip(draw.rng.normal(1, 0.5, channels) * 2.0 ** (shift - b_shift + y_bits - 1), -(2**31) + 1, 2**31 - 1)
    draw.constants["y.affine"] = np.stack([g, b]).astype(np.int32)
    # With codes v shifted by alpha, C^2 * v^2 must stay below 2^62. This limits alpha.
    room = 30 - math.ceil(math.log2(channels)) - bits
    alpha = draw.alpha("alpha", channels, max(min(draw.one(3, 8, room), room, 15), 0))
    epsilon = draw.one(1, 7, 2**30, 2**45)
    return (
        LayerNorm(
            y="y",
            x="x",
            epsilon=epsilon,
            shift=shift,
            b_shift=b_shift,
            zero=draw.zero("z", channels, bits),
            alpha=alpha,
            bits=y_bits,
            center=bool(draw.int(0, 2)),
            fraction=draw.one(24, 24, 24, 23, 16),
        ),
    )


def last_bits(draw: Draw) -> Case:
    """Draw a LayerNorm in which an error of 1 in t, the normalised value, often changes a code.

    To this end, the factors g (first row of y.affine) satisfy 1/4 <= |g| / 2^shift < 1/2, and codes are near the middle code.
    """
    channels, bits = draw.one(7, 8, 16, 64, 192, 200, 384, 768, 1000, 3960, 3968), draw.one(1, 8, 8, 12, 16)
    room = max(30 - math.ceil(math.log2(channels)) - bits, 0)
    draw.buffer("x", (1, channels), bits)
    x = draw.buffers["x"]
    if draw.int(0, 1):  # all but a few codes are equal, which gives the largest quotients
        x[:] = x[..., :1]
        for _ in range(draw.int(1, 4)):
            x[..., draw.int(0, channels - 1)] = draw.int(0, 2**bits - 1)
    x[1] = x[0]
    alpha = draw.alpha("alpha", channels, min(draw.one(3, room), room, 15))
    zero = draw.one(0, draw.int(0, 2**bits - 1), draw.constant("z", 0, 2**bits - 1, (channels,), "u8" if bits <= 8 else "u16"))
    if draw.int(0, 3) == 0:  # C * v - sum(v) is near the 32-bit limit
        x[:], alpha, zero = draw.one(0, 2**bits - 1), "alpha", 2 ** (bits - 1)
        x[..., draw.int(0, channels - 1)] ^= 2**bits - 1
        draw.constants["alpha"] = np.full(channels, min(room + draw.int(0, 2), 15), np.uint8)
    v = x[0, 0].astype(np.int64) - (draw.constants["z"].astype(np.int64) if zero == "z" else zero)
    v = [int(c) for c in (v << draw.constants["alpha"].astype(np.int64) if alpha else v)]
    center = bool(draw.int(0, 2))
    total = sum(v) if center else 0
    d = channels * sum(c * c for c in v) - total * total
    square = (math.isqrt(d) + draw.int(2, 9)) ** 2  # roots just below and just above an integer
    epsilon = draw.one(1, 2**20, 2**40, *[square - d - 1] * 3, square - d)
    d += epsilon
    j = (62 - d.bit_length()) >> 1
    root = math.isqrt(d << 2 * j)
    t = [(((channels * c - total) << 24 + j) + root // 2) // root for c in v]
    g = [draw.one(1, -1) * draw.one(2**31 - 1, draw.int(2**30, 2**31 - 1)) for _ in t]
    b = [2**15 - (q * f >> 32) for q, f in zip(t, g)]
    draw.constants["y.affine"] = np.array([g, b]).astype(np.int32)
    return (LayerNorm(y="y", x="x", epsilon=epsilon, shift=32, b_shift=32, zero=zero, alpha=alpha, bits=16, center=center),)


def heads(draw: Draw, softmax: Callable[..., Case]) -> Case:
    """Draw attention: qkv [W, T, 3 * H * D] or [T, 3 * H * D] -> context [W, T, H * D] or [T, H * D], with W windows."""
    tokens = size(draw, 1, 4, 8, 16, 17, 32, 49, 50, 65)
    width, count = draw.one(1, 2, 3, 8, 16, 20, 24, 32, 32, 33, 64, 64), draw.int(1, 3)
    windows = draw.one(None, None, 1, 3)
    lead = () if windows is None else (windows,)
    n = len(lead)
    draw.buffer("qkv", (*lead, tokens, 3 * count * width), draw.one(8, 8, 8, 6))
    if draw.int(0, 3) == 0:  # similar Q and K give similar scores
        draw.buffers["qkv"] = np.clip(draw.buffers["qkv"] // 16 + 120, 0, draw.values["qkv"].hi).astype(np.uint8)
    view, perm = (*lead, tokens, 3, count, width), (*range(n), n + 1, n, n + 2)
    parts = [Permute(y=y, x="qkv", view=view, perm=perm, select=(n + 1, i)) for i, y in enumerate("qkv")]
    index = None
    if draw.int(0, 1):
        most = draw.one(0, 2**10, 2**15, 2**30)
        draw.constants["s.bias"] = draw.integers(-most, most, (11, count), "i32")
        index = draw.constant("index", 0, 10, (tokens, tokens), "u16")
    zeros = [draw.one(0, 255, *[127, 128, 129] * 3, draw.int(0, 255), draw.one(256, 2**15, 2**16 - 1)) for _ in range(3)]
    score_bits = draw.one(*[8] * 6, 4, 1, 7, 10, 16)
    mult = draw.one(draw.int(2**30, 2**31 - 1), draw.int(2**30, 2**31 - 1), draw.int(1, 2**16), draw.one(1, 2**31 - 1))
    x = draw.buffers["qkv"].astype(np.int64).reshape(-1, tokens, 3, count, width)
    acc = np.einsum("nthd,nuhd->nhtu", x[:, :, 0] - zeros[0], x[:, :, 1] - zeros[1])
    if index is not None:
        acc = acc + draw.constants["s.bias"][draw.constants[index]].transpose(2, 0, 1)
    shift = shift_to(draw, acc * mult, score_bits)
    s_zero = draw.one(0, 2**score_bits - 1, *[2 ** (score_bits - 1)] * 3)
    scores = MatMul(
        y="s",
        a="q",
        b="k",
        mult=mult,
        shift=shift,
        a_zero=zeros[0],
        b_zero=zeros[1],
        index=index,
        y_zero=s_zero,
        bits=score_bits,
    )
    region = None
    if windows is not None:
        region = draw.one(None, draw.constant("region", 0, draw.one(1, 3, 255), (windows, tokens), "u8"))
    ops = softmax(draw, tokens, 2**score_bits, region, zeros[2])
    y_shape = (*lead, tokens, count * width)
    back = Permute(y="y", x="c", view=(*lead, count, tokens, width), perm=perm, shape=y_shape)
    return (*parts, scores, *ops, back)


def context_zero(draw: Draw, v_zero: int, bits: int) -> int:
    """Draw a zero point of the context, mostly at the same relative position as that of V."""
    return min(int(draw.one(*[v_zero / 255] * 4, 0, 0.5, 1) * (2**bits - 1)), 2**bits - 1)


def exponentials(draw: Draw, codes: int, tokens: int) -> None:
    """Draw a table of exponentials, or one that is unsorted, constant, short, long or mostly zero."""
    real = exp_table(draw.one(1e-4, *[2 / codes, 6 / codes, 12 / codes, 30 / codes] * 2, 30.0), codes, tokens)
    most = min((2**31 - 1) // tokens, 2**30)
    length = draw.one(1, 2, codes, codes + 3)
    wild = draw.rng.integers(0, most, length, endpoint=True) * (draw.rng.random(length) < draw.one(0.2, 1))
    wild[0] = draw.one(1, most, max(wild[0], 1))
    draw.constants["a.table"] = draw.one(*[real] * 5, wild, np.full(length, most)).astype(np.int32)


def log2_codes(draw: Draw, tokens: int, codes: int, region: str | None, v_zero: int) -> Case:
    exponentials(draw, codes, tokens)
    a_bits, bits = draw.one(2, 3, 4, 4), draw.one(1, 5, *[8] * 5, 12)
    mult = draw.int(2**30, 2**31 - 1)
    shift = draw.one(*[37 + 2**a_bits - bits] * 9, 1, 62)
    return (
        LogSoftmax(y="a", x="s", bits=a_bits, region=region),
        ShiftMatMul(
            y="c",
            a="a",
            v="v",
            mult=mult,
            shift=shift,
            v_zero=v_zero,
            a_bits=a_bits,
            zero_code=region is not None or bool(draw.int(0, 1)),
            y_zero=context_zero(draw, v_zero, bits),
            bits=bits,
        ),
    )


def uniform(draw: Draw, tokens: int, codes: int, region: str | None, v_zero: int) -> Case:
    exponentials(draw, codes, tokens)
    a_bits, bits = draw.one(1, 4, 7, *[8] * 5, 10), draw.one(1, 5, *[8] * 5, 12)
    top = draw.one(*[(2**44 * (2**a_bits - 1), 44)] * 4, (2**44 * 300, 44), (1, 1), (2**58 - 1, 52), (2**40, 40))
    mult, shift = draw.int(2**30, 2**31 - 1), draw.one(*[38 + a_bits - bits] * 9, 1, 62)
    return (
        Softmax(y="a", x="s", mult=top[0], shift=top[1], bits=a_bits, region=region),
        MatMul(
            y="c",
            a="a",
            b="v",
            mult=mult,
            shift=shift,
            a_zero=draw.one(0, 0, 1, 2**a_bits - 1),
            b_zero=v_zero,
            b_rows=True,
            y_zero=context_zero(draw, v_zero, bits),
            bits=bits,
        ),
    )


def relative(draw: Draw, tokens: int, codes: int, region: str | None, v_zero: int) -> Case:
    a_last = draw.one(1, 3, 15, 15, 100, 255)
    largest = draw.one(1, 100, 255, 2**15 - 1, 2**15)
    levels = draw.rng.integers(0, largest, a_last + 1, endpoint=True)
    table = draw.rng.integers(0, a_last, draw.one(1, *[codes // 2 + 1, codes, codes + 1] * 2), endpoint=True)
    if draw.int(0, 1):  # sorted like real tables
        levels, table = np.sort(levels)[::-1].copy(), np.sort(table)
    if a_last == 255 and draw.int(0, 1):
        levels, largest, table[0] = np.zeros(0, np.int64), 255, 255
        table[-1] = 0 if region is not None and len(table) > 1 else table[-1]
    else:
        levels[table[0]] = largest
        if region is not None and len(table) > 1 and table[-1] != table[0]:
            levels[table[-1]] = 0
    draw.constants["a.table"] = table.astype(np.uint8)
    if region is not None and (len(table) == 1 or table[-1] == table[0]):
        region = None
    bits = draw.one(1, 5, *[8] * 5, 12)
    shift = 36 - bits + largest.bit_length()
    mult, shift = draw.one(*[(draw.int(2**28, 2**29 - 1), shift)] * 6, (0, 62), (2**29 - 1, 1), (1, 2))
    return (
        RowCodes(y="a", x="s", region=region),
        Attend(
            y="c",
            a="a",
            v="v",
            mult=mult,
            shift=shift,
            levels=tuple(levels.tolist()),
            v_zero=v_zero,
            y_zero=context_zero(draw, v_zero, bits),
            bits=bits,
        ),
    )


def mixed(draw: Draw, tokens: int, codes: int, region: str | None, v_zero: int) -> Case:
    """Draw the softmax of one kind and the product with V of another: valid, although no recipe produces it."""
    kinds = (log2_codes, uniform, relative)
    first, second = draw.rng.permutation(3)[:2]
    _, times_v = kinds[second % 2](draw, tokens, codes, None, v_zero)  # not Attend, which reads only codes of RowCodes
    softmax, _ = kinds[first if first != second % 2 else 2](draw, tokens, codes, region, v_zero)
    if isinstance(times_v, ShiftMatMul):  # its codes must have a_bits bits
        last = 2**times_v.a_bits - 1
        times_v = msgspec.structs.replace(times_v, zero_code=bool(draw.int(0, 1)))
        if isinstance(softmax, Softmax):
            softmax = msgspec.structs.replace(softmax, bits=times_v.a_bits)
        else:
            table = draw.constants["a.table"]
            draw.constants["a.table"] = np.where(
                np.arange(len(table)) == draw.int(0, len(table) - 1), last, table % (last + 1)
            ).astype(np.uint8)
    return softmax, times_v


WIDE: dict[str, Callable[[Draw], Case]] = {
    "linear": linear,
    "linear + lookup": linear_lookup,
    "linear + add": linear_add,
    "layernorm": layernorm,
    "layernorm, last bits": last_bits,
    "attention, log2": partial(heads, softmax=log2_codes),
    "attention, uniform": partial(heads, softmax=uniform),
    "attention, relative": partial(heads, softmax=relative),
    "attention, mixed": partial(heads, softmax=mixed),
}


def accepted(draw: Draw, ops: Case) -> bool:
    """Return whether no op can overflow (all proofs hold), so that verify() accepts the ops."""
    values: dict[str, Any] = dict(draw.values)
    for op in ops:
        values[op.y], proofs = op.infer(Scope(values, draw.constants, op.y))
        if not all(proof.holds for proof in proofs):
            return False
    return True
