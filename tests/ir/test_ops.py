"""Tests of every op: numpy, torch and the slow definition agree, on random inputs and on extremes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fqvit.ir.attention import Attend, LogSoftmax, MatMul, RowCodes, ShiftMatMul, Softmax
from fqvit.ir.elementwise import Depthwise, Max, Multiply, Rotary
from fqvit.ir.kit import DTYPES, kit
from fqvit.ir.moves import Concat, Permute, Take
from fqvit.ir.ops import Add, LayerNorm, Linear, Lookup, Mean, Term
from fqvit.ir.packing import pack_codebooks, pack_codes
from fqvit.ir.program import AnyOp
from fqvit.ir.value import Scope
from fqvit.quant.exptable import exp_table
from tests.factories import assert_same
from tests.ir.draw import IMAGES, STYLES, Draw
from tests.ir.elementwise_cases import depthwise, maximum, multiply, rotary
from tests.ir.exponents import pack
from tests.ir.slow_ops import SLOW


def lookup(draw: Draw) -> AnyOp:
    bits, channels = draw.one(4, 8, 10, 16), 5
    draw.buffer("x", draw.one((channels,), (3, channels), (2, 3, channels)), bits)
    wide, last = draw.one(("u8", 255), ("u16", 65535))
    if draw.int(0, 1):
        draw.constant("y.table", 0, last, (2**bits,), wide)
        return Lookup(y="y", x="x")
    signed, end = draw.one(("i16", 2**15 - 1), ("i32", 2**30))
    draw.constant("y.table", -end, end, (2**bits,), signed)
    alpha = draw.constant("alpha", 0, draw.one(0, 4, 15), (channels,), "u8")
    y_bits = draw.one(1, 8, 16)
    zeros = tuple(draw.int(0, 2**y_bits - 1) for _ in range(int(draw.constants["alpha"].max()) + 1))
    return Lookup(y="y", x="x", alpha=alpha, y_zero=zeros, bits=y_bits)


def linear(draw: Draw) -> AnyOp:
    inner, outputs = draw.int(1, 9), draw.one(1, 3, 6)
    draw.buffer("x", draw.one((inner,), (3, inner), (2, 3, inner)), draw.one(4, 8, 16))
    group, width = draw.one(0, 2, 3, 8), draw.one(0, 0, 2, 3, 4, 5, 6, 6, 7)
    used, groups = width or 4, -(-inner // group) if group else 0
    codebooks = draw.one(0, 1, 3, 16) if group else 0
    codes = draw.integers(-(2 ** (used - 1)), 2 ** (used - 1) - 1, (outputs, inner), "i8")
    if codebooks:
        books = draw.constants["y.codebooks"] = draw.integers(-128, 127, (codebooks, 2**used), "i8")
        choice = draw.integers(0, codebooks - 1, (outputs, groups), "u8")
        w = books[choice[:, np.arange(inner) // group], codes + 2 ** (used - 1)]
        draw.constants["y.w"], draw.constants["y.choice"] = pack_codebooks(w, choice, books, group, used)
    elif group:
        exponent = draw.constant("y.exponent", 0, 8 - used, (outputs, groups), "u8")
        w = codes << draw.constants[exponent][:, np.arange(inner) // group].astype(np.int8)
        draw.constants["y.w"], draw.constants[exponent] = pack(w, draw.constants[exponent], group, used)
    elif width:
        draw.constants["y.w"] = pack_codes(codes, width)
    else:
        draw.constants["y.w"] = draw.integers(-127, 127, (outputs, inner), "i8")
    draw.constant("y.bias", -(2**20), 2**20, (outputs,), "i32")
    pairs = [draw.requantizer(2**15 * inner) for _ in range(outputs)]
    short = draw.int(0, 1)
    draw.constants["y.mult"] = np.array([m >> 15 * short for m, _ in pairs], np.uint16 if short else np.int32)
    draw.constants["y.shift"] = np.array([max(s - 15 * short, 1) for _, s in pairs], np.uint8)
    out = draw.one("codes", "codes", "acc", "i32")
    if out == "i32":
        draw.constants["y.shift"] = np.maximum(draw.constants["y.shift"], 31).astype(np.uint8)
    bits = draw.one(3, 8, 12)
    zero = draw.zero("z", outputs, bits)
    return Linear(y="y", x="x", out=out, y_zero=zero, bits=bits, group=group, width=width, codebooks=codebooks)


def layernorm(draw: Draw) -> AnyOp:
    channels, bits = draw.one(1, 2, 6, 33), draw.one(4, 8, 12, 16)
    draw.buffer("x", (4, channels), bits)
    if draw.int(0, 3) == 0:
        draw.buffers["x"][:, 1] = draw.int(0, 2**bits - 1)  # a constant row
    shift = draw.int(24, 46)
    reach = 2 ** (shift - 24)
    draw.constants["y.affine"] = np.stack(
        [draw.rng.integers(-64 * reach, 64 * reach, channels), draw.rng.integers(-(2**24), 2**24, channels)]
    ).astype(np.int32)
    zero, alpha = draw.zero("z", channels, bits), draw.alpha("alpha", channels, draw.one(3, 8))
    return LayerNorm(
        y="y",
        x="x",
        epsilon=draw.one(1, 7, 2**30),
        shift=shift,
        b_shift=max(shift - 20, 0),
        zero=zero,
        alpha=alpha,
        bits=draw.one(3, 8, 16),
        center=bool(draw.int(0, 1)),
        fraction=draw.one(16, 23, 24, 24),
    )


def add(draw: Draw) -> AnyOp:
    channels, bits = draw.one(1, 3, 6), draw.one(4, 8, 16)
    shape = (4, channels)
    draw.buffer("a", shape, bits)
    first = Term(x="a", mult=draw.int(0, 2**29), zero=draw.zero("az", channels, bits), alpha=draw.alpha("aa", channels, 8))
    second = draw.one("codes", "accumulator", "constant", "constant row")
    if second == "codes":
        draw.buffer("b", shape)
        term = Term(x="b", mult=draw.int(0, 2**30 - 1), zero=draw.zero("bz", channels), alpha=draw.alpha("ba", channels))
    elif second == "accumulator":
        draw.accumulator("b", shape, 2**30 - 1)
        draw.constant("bm", 0, 2**30 - 1, (channels,), "i32")
        term = Term(x="b", mult="bm")
    else:
        draw.constants["b"] = draw.integers(-32767, 32767, shape if second == "constant" else (channels,), "i16")
        term = Term(x="b", mult=draw.int(0, 2**30 - 1))
    terms = (first, term) if draw.int(0, 1) else (term, first)
    y_bits = draw.one(8, 16)
    y_zero, y_alpha = draw.zero("yz", channels, y_bits), draw.alpha("ya", channels, 8)
    return Add(y="y", terms=terms, shift=draw.one(1, 20, 40), y_zero=y_zero, y_alpha=y_alpha, bits=y_bits)


def take(draw: Draw) -> AnyOp:
    channels = draw.one(1, 3, 6)
    kind = draw.one(4, 8, 16, "i32")
    shape = draw.one((5, channels), (2, 3, channels))
    fill = 0
    if kind == "i32":
        draw.accumulator("x", shape)
    else:
        draw.buffer("x", shape, kind)
        fill = draw.zero("fill", channels, kind)
    rows = math.prod(shape[:-1])
    draw.constant("rows", -1, rows - 1, draw.one((7,), (2, 4), (2, 3, 2), (1,), ()), "i32")
    return Take(y="y", x="x", index="rows", fill=fill)


def permute(draw: Draw) -> AnyOp:
    view = draw.one((2, 3, 4), (4, 3, 2, 1), (24,), (2, 2, 2, 3))
    if draw.int(0, 1):
        draw.buffer("x", draw.one((24,), (4, 6)), draw.one(8, 16))
    else:
        draw.accumulator("x", draw.one((24,), (2, 12)))
    select = None
    left = list(view)
    if len(view) > 1 and draw.int(0, 1):
        axis = draw.int(0, len(view) - 1)
        select = (axis, draw.int(0, view[axis] - 1))
        del left[axis]
    perm = tuple(int(i) for i in draw.rng.permutation(len(left)))
    shape = draw.one((), (math.prod(left),), (1, math.prod(left)))
    return Permute(y="y", x="x", view=view, perm=perm, shape=shape, select=select)


def concat(draw: Draw) -> AnyOp:
    bits = draw.one(8, 16)
    draw.buffer("a", (3, 4), bits)
    draw.buffer("b", (1, 4), bits)
    draw.constant("token", 0, 2**bits - 1, (2, 4), "u8" if bits == 8 else "u16")
    return Concat(y="y", xs=draw.one(("token", "a"), ("a", "token", "b"), ("a",), ("a", "a", "token")))


def mean(draw: Draw) -> AnyOp:
    tokens, channels = draw.one(1, 2, 7), draw.one(1, 6)
    draw.buffer("x", (*draw.one((), (3,), (2, 2)), tokens, channels), 8)
    mult, shift = draw.requantizer(255 * tokens)
    zero, alpha = draw.zero("z", channels), draw.alpha("alpha", channels)
    skip = draw.int(0, tokens - 1)
    bits = draw.one(4, 8, 9, 16)
    return Mean(y="y", x="x", mult=mult, shift=shift, skip=skip, zero=zero, alpha=alpha, y_zero=draw.one(0, 9, 15), bits=bits)


def matmul(draw: Draw) -> AnyOp:
    m, n, inner, heads = draw.int(1, 5), draw.int(1, 5), draw.int(1, 7), draw.int(1, 3)
    lead = draw.one((heads,), (2, heads))
    rows = bool(draw.int(0, 1))
    draw.buffer("a", (*lead, m, inner), draw.one(4, 8))
    draw.buffer("b", (*lead, inner, n) if rows else (*lead, n, inner))
    index = None
    if draw.int(0, 1):
        draw.constant("y.bias", -(2**22), 2**22, (9, heads), "i32")
        index = draw.constant("index", 0, 8, (m, n), draw.one("u16", "i32"))
    mult, shift = draw.requantizer(2**16 * inner)
    if draw.int(0, 1):
        mult = draw.constant("mults", 0, draw.one(mult, 2**31 - 1), (heads,), "i32")
    zeros = [draw.one(0, 255, draw.int(0, 255)) for _ in range(2)]
    bits = draw.one(4, 8, 16)
    return MatMul(
        y="y",
        a="a",
        b="b",
        mult=mult,
        shift=shift,
        a_zero=zeros[0],
        b_zero=zeros[1],
        b_rows=rows,
        index=index,
        y_zero=draw.one(0, 2**bits - 1, 5),
        bits=bits,
    )


def scores(draw: Draw) -> tuple[str | None, int]:
    """Draw scores x, a table y.table and perhaps regions; return the regions' name and the number of codes of x."""
    tokens, heads, bits = draw.one(1, 2, 5, 17), draw.int(1, 2), draw.one(4, 8, 8, 12, 16)
    windows = draw.one(None, 3)
    region = None
    if windows is None:
        draw.buffer("x", (heads, tokens, tokens), bits)
    else:
        draw.buffer("x", (windows, heads, tokens, tokens), bits)
        region = draw.one(None, draw.constant("region", 0, 2, (windows, tokens), "u8"))
    small = np.array([6, 3, 2, 1, 1, 0], np.int32)  # so small that an exponential of 1 is a large part of the sum
    draw.constants["y.table"] = draw.one(exp_table(draw.one(1e-4, 0.02, 0.1, 1.0, 30.0), 2**bits, tokens), small)
    return region, 2**bits


def log_softmax(draw: Draw) -> AnyOp:
    region, _ = scores(draw)
    return LogSoftmax(y="y", x="x", bits=draw.one(2, 3, 4), region=region)


def softmax(draw: Draw) -> AnyOp:
    region, _ = scores(draw)
    bits = draw.one(4, 8)
    mult, shift = draw.one((round(2**44 / draw.one(1.0, 1 / 255, 0.003)), 44), (1, 1), (2**58 - 1, 52), (2**40, 40))
    return Softmax(y="y", x="x", mult=mult, shift=shift, bits=bits, region=region)


def shift_matmul(draw: Draw) -> AnyOp:
    rows, tokens, width, bits = draw.int(1, 4), draw.one(1, 3, 9), draw.int(1, 4), draw.int(2, 4)
    lead = draw.one((2,), (3, 2))
    draw.buffer("a", (*lead, rows, tokens), bits)
    draw.buffer("v", (*lead, tokens, width), draw.one(4, 8))
    mult, shift = draw.requantizer(255 * tokens << 2**bits)
    y_bits = draw.one(4, 8)
    return ShiftMatMul(
        y="y",
        a="a",
        v="v",
        mult=mult,
        shift=shift,
        v_zero=draw.one(0, 128, 255),
        a_bits=bits,
        zero_code=bool(draw.int(0, 1)),
        y_zero=draw.one(0, 7, 2**y_bits - 1),
        bits=y_bits,
    )


def row_codes(draw: Draw) -> AnyOp:
    region, codes = scores(draw)
    # Table lengths for which most distances, only the largest distance or no distance reads the last entry.
    draw.constant("y.table", 0, draw.one(15, 255), (draw.one(1, 3, codes, codes + 1),), "u8")
    return RowCodes(y="y", x="x", region=region)


def attend(draw: Draw) -> AnyOp:
    rows, tokens, width, a_bits = draw.int(1, 4), draw.one(1, 3, 9), draw.int(1, 4), draw.one(2, 4, 8)
    lead = draw.one((2,), (3, 2))
    last = 2**a_bits - 1
    largest = draw.one(1, 3, 255, 2**15)
    levels = draw.rng.integers(0, largest, last + 1, endpoint=True)  # unsorted, with duplicates
    row_code, mask_code = draw.int(0, last), draw.one(None, draw.int(0, last))
    if a_bits == 8 and draw.int(0, 1):
        largest, levels, row_code, mask_code = 255, np.zeros(0, np.int64), 255, draw.one(None, 0)
    elif mask_code == row_code:
        mask_code = None
    elif mask_code is not None:
        levels[mask_code] = 0
    levels[row_code : row_code + 1] = largest
    draw.buffer("a", (*lead, rows, tokens), a_bits, row_code=row_code, mask_code=mask_code)
    draw.buffers["a"][..., draw.int(0, tokens - 1)] = row_code  # as RowCodes guarantees
    draw.buffer("v", (*lead, tokens, width), draw.one(4, 8))
    y_bits = draw.one(4, 8, 16)
    mult, shift = draw.one((draw.int(2**28, 2**29 - 1), 28 + largest.bit_length()), (0, 62), (2**29 - 1, 1), (1, 2))
    return Attend(
        y="y",
        a="a",
        v="v",
        mult=mult,
        shift=shift,
        levels=tuple(levels.tolist()),
        v_zero=draw.one(0, 128, 255),
        y_zero=draw.one(0, 7, 2**y_bits - 1),
        bits=y_bits,
    )


CASES: dict[type, Callable[[Draw], AnyOp]] = {
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


@pytest.mark.parametrize("place, known", [("CASES in test_ops.py", CASES), ("SLOW in slow_ops.py", SLOW)])
def test_every_op_has_a_case_and_a_slow_definition(place: str, known: dict[type, Any]) -> None:
    missing = [op.__name__ for op in get_args(AnyOp) if op not in known]
    assert not missing, f"{place} has no entry for {', '.join(missing)}"


def run_with(library: str, op: AnyOp, draw: Draw) -> np.ndarray[Any, Any]:
    with_kit = kit(library)
    constants = draw.constants
    if isinstance(op, Linear) and op.packed:  # as in Program.unpacked
        constants = constants | {op.part("w"): op.weights(Scope(draw.values, constants, op.y))}
        op = msgspec.structs.replace(op, group=0, width=0, codebooks=0)
    arrays = {name: with_kit.asarray(x) for name, x in (constants | draw.buffers).items()}
    return with_kit.numpy(op.run(with_kit, arrays.__getitem__))


def slowly(op: AnyOp, draw: Draw) -> np.ndarray[Any, Any]:
    """Return the result of the slow definition for all images."""

    def image(n: int) -> np.ndarray[Any, Any]:
        return SLOW[type(op)](op, lambda name: draw.buffers[name][n] if name in draw.buffers else draw.constants[name])

    return np.stack([image(n) for n in range(IMAGES)])


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), style=st.sampled_from(STYLES))
def test_numpy_torch_and_the_slow_definition_agree(kind: type, seed: int, style: str) -> None:
    draw = Draw(np.random.default_rng(seed), style)
    op = CASES[kind](draw)
    value, proofs = op.infer(Scope(draw.values, draw.constants, op.y))
    if not all(proof.holds for proof in proofs):
        return  # verify() rejects this op, so its result is undefined
    expected = slowly(op, draw)
    got = run_with("numpy", op, draw)
    assert_same(got, expected, f"{op}: numpy and the slow definition")
    assert_same(run_with("torch", op, draw), expected, f"{op}: torch and the slow definition")
    assert got.dtype == DTYPES[value.dtype] and got.shape == (IMAGES, *value.shape)
    assert got.min() >= value.lo and got.max() <= value.hi, "infer's bounds do not hold"


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_most_random_cases_are_accepted_by_verify(kind: type) -> None:
    accepted = 0
    for seed in range(40):
        draw = Draw(np.random.default_rng(seed), "random")
        op = CASES[kind](draw)
        accepted += all(proof.holds for proof in op.infer(Scope(draw.values, draw.constants, op.y))[1])
    assert accepted >= 24, f"verify() accepts only {accepted} of 40 cases"
