"""Programs that compute every case of a small domain, and their expected results in Python integers.

The image has 256 x 256 pixels of two channels: every pair of bytes once, so that one image is the whole domain. A case is a
program and the exact integers of some of its buffers; nothing here calls fqvit.ir.fixed, an op's run() or numpy's arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fqvit.ir.attention import Attend, LogSoftmax, MatMul, RowCodes, ShiftMatMul, Softmax
from fqvit.ir.moves import Concat, Permute
from fqvit.ir.ops import Add, LayerNorm, Linear, Lookup, Mean, Term
from fqvit.ir.program import INPUT, AnyOp, Program
from fqvit.quant.exptable import exp_table
from tests.runtime.programs import program_of

BYTES = range(256)
PAIRS = [(a, b) for a in BYTES for b in BYTES]
IMAGE = np.array(PAIRS, np.uint8).reshape(1, 256, 256, 2)
# (mult, shift): zero, one half, ties at every odd product, powers of two and their neighbours, the largest mult and shift.
REQUANTIZERS = [
    (0, 62),
    (1, 1),
    (3, 2),
    (2**30, 31),
    (2**30, 38),
    (2**30 + 1, 37),
    (2**31 - 1, 37),
    (2**31 - 1, 46),
    (2**31 - 1, 62),
    (1518500250, 39),
    (1, 62),
]


@dataclass(frozen=True)
class Case:
    """A program for IMAGE and the expected integers of some of its buffers."""

    program: Program
    expected: dict[str, list[int]]


def half_up(numerator: int, shift: int) -> int:
    """floor(numerator / 2^shift + 1/2)"""
    return (2 * numerator + 2**shift) // 2 ** (shift + 1)


def half_up_ratio(numerator: int, denominator: int) -> int:
    """floor(numerator / denominator + 1/2)"""
    return (2 * numerator + denominator) // (2 * denominator)


def clamp(value: int, bits: int) -> int:
    return min(max(value, 0), 2**bits - 1)


A = Permute(y="a", x=INPUT, view=(256, 256, 2), perm=(0, 1), select=(2, 0))  # [256, 256]: the row number of each pixel
B = Permute(y="b", x=INPUT, view=(256, 256, 2), perm=(0, 1), select=(2, 1))  # the column number of each pixel
COLUMN = Permute(y="column", x="a", view=(256, 256), perm=(0,), select=(1, 0), shape=(256, 1))  # 0 .. 255
ROW = Permute(y="row", x="b", view=(256, 256), perm=(0,), select=(0, 0), shape=(1, 256))


def case(ops: list[AnyOp], constants: dict[str, Any], expected: dict[str, list[int]]) -> Case:
    """Return a case with these ops, preceded by those of A, B, COLUMN and ROW that they read."""
    kept, wanted = list(ops), {name for op in ops for name in op.inputs()}
    for op in (ROW, COLUMN, B, A):
        if op.y in wanted:
            kept.insert(0, op)
            wanted |= set(op.inputs())
    return Case(program_of(tuple(kept), constants, (256, 256, 2)), expected)


def sums() -> Case:
    """Residual sums of every pair of codes."""
    ops: list[AnyOp] = []
    expected = {}
    last = 2**30 - 1
    for i, (m, n, shift, za, zb, zy, bits) in enumerate(
        [
            (1, 1, 1, 0, 0, 0, 8),
            (1, 1, 1, 255, 255, 255, 8),
            (3, 5, 3, 128, 7, 100, 8),
            (2**29, 2**29, 30, 128, 128, 128, 8),
            (last, last, 31, 77, 200, 30000, 16),
            (last, 0, 30, 3, 0, 0, 16),
            (last, 1, 62, 0, 255, 1, 8),
            (715827883, 536870911, 30, 131, 119, 140, 8),
        ]
    ):
        y = f"y{i}"
        terms = (Term(x="a", mult=m, zero=za), Term(x="b", mult=n, zero=zb))
        ops.append(Add(y=y, terms=terms, shift=shift, y_zero=zy, bits=bits))
        expected[y] = [clamp(half_up((a - za) * m + (b - zb) * n, shift) + zy, bits) for a, b in PAIRS]
    return case(ops, {}, expected)


def weights() -> Case:
    """Every u8 times every i8 with every requantizer, with and without clamp."""
    ops: list[AnyOp] = []
    constants: dict[str, Any] = {}
    expected = {}
    signed = range(-128, 128)
    for i, (mult, shift) in enumerate(REQUANTIZERS):
        for out, bias in (("codes", 0), ("i32", 12345)):
            if out == "i32" and mult * 50000 >> shift >= 2**31:
                continue
            y, bits = f"{out}{i}", 8 if i % 2 else 16
            constants |= {f"{y}.w": np.array(signed, np.int8)[:, None], f"{y}.bias": np.full(256, bias, np.int32)}
            constants |= {f"{y}.mult": np.full(256, mult, np.int32), f"{y}.shift": np.full(256, shift, np.uint8)}
            ops.append(Linear(y=y, x="column", out=out, y_zero=128 if out == "codes" else 0, bits=bits))  # type: ignore[arg-type]
            exact = [half_up((x * w + bias) * mult, shift) for x in BYTES for w in signed]
            expected[y] = exact if out == "i32" else [clamp(value + 128, bits) for value in exact]
    return case(ops, constants, expected)


def products() -> Case:
    """Attention scores of every pair of u8 codes, with zero points."""
    ops: list[AnyOp] = [
        Permute(y="q", x="column", view=(256, 1), perm=(0, 1), shape=(1, 256, 1)),
    ]
    expected = {}
    for i, (mult, shift) in enumerate(REQUANTIZERS):
        za, zb, bits = (0, 128, 255, 91)[i % 4], (0, 131, 17)[i % 3], (8, 16)[i % 2]
        ops.append(MatMul(y=f"y{i}", a="q", b="q", mult=mult, shift=shift, a_zero=za, b_zero=zb, y_zero=100, bits=bits))
        expected[f"y{i}"] = [clamp(half_up((a - za) * (b - zb) * mult, shift) + 100, bits) for a, b in PAIRS]
    return case(ops, {}, expected)


def norms() -> Case:
    """LayerNorm of every row (a, b), with several epsilons. It takes the square root of D = (a - b)^2 + epsilon."""
    ops: list[AnyOp] = [Permute(y="rows", x=INPUT, view=(256, 256, 2), perm=(0, 1, 2), shape=(65536, 2))]
    constants: dict[str, Any] = {}
    expected = {}
    wide = ((2**30, -(2**29) - 1), (2**24 + 1, 20000 * 2**16), 40, 24)
    # These constants make every bit of the normalized value t visible where t is within 2^16 of its maximum.
    fine = ((2, 2), (2**17 - 2**25, 2**17 - 2**25), 1, 0)
    settings = [(1, 0, (0, 0), wide), (2, 128, (0, 3), wide), (20011, 255, (1, 0), wide), (2**40 + 1, 100, (15, 15), wide)]
    settings += [(1, 0, (0, 0), fine), (3, 9, (2, 2), fine)]
    for i, (epsilon, zero, alpha, (g, b, shift, b_shift)) in enumerate(settings):
        y, bits = f"y{i}", 16
        constants |= {f"{y}.affine": np.array([g, b], np.int32), f"{y}.alpha": np.array(alpha, np.uint8)}
        ops.append(
            LayerNorm(y=y, x="rows", epsilon=epsilon, shift=shift, b_shift=b_shift, zero=zero, alpha=f"{y}.alpha", bits=bits)
        )
        values = []
        for codes in PAIRS:
            v = [(code - zero) * 2**k for code, k in zip(codes, alpha, strict=True)]
            d = 2 * sum(x * x for x in v) - sum(v) ** 2 + epsilon
            j = (62 - d.bit_length()) // 2  # d * 4^j < 2^62
            root = math.isqrt(d * 4**j)
            for c in range(2):
                t = half_up_ratio((2 * v[c] - sum(v)) * 2 ** (24 + j), root)
                values.append(clamp(half_up(t * g[c] + b[c] * 2**b_shift, shift), bits))
        expected[y] = values
    return case(ops, constants, expected)


def means() -> Case:
    """Means of every pair of codes: two tokens per channel."""
    ops: list[AnyOp] = [Permute(y="tokens", x=INPUT, view=(65536, 2), perm=(1, 0))]
    expected = {}
    for i, (mult, shift) in enumerate(REQUANTIZERS):
        zero, skip = (0, 255, 128)[i % 3], i % 4 == 3
        ops.append(Mean(y=f"y{i}", x="tokens", mult=mult, shift=shift, skip=int(skip), zero=zero, y_zero=50))
        expected[f"y{i}"] = [clamp(half_up((b - zero + (0 if skip else a - zero)) * mult, shift) + 50, 8) for a, b in PAIRS]
    return case(ops, {}, expected)


def tables() -> Case:
    """Lookups of every code, without alpha and with every alpha from 0 to 15."""
    plain, wide = [(7 * x + 3) % 256 for x in BYTES], [(-32768 + 257 * x) for x in BYTES]
    zeros = tuple(16 * k for k in range(16))
    constants = {
        "plain.table": np.array(plain, np.uint8),
        "wide.table": np.array(wide, np.int16),
        "alpha": np.array([c % 16 for c in BYTES], np.uint8),
    }
    ops: list[AnyOp] = [Lookup(y="plain", x="a"), Lookup(y="wide", x="a", alpha="alpha", y_zero=zeros)]
    expected = {
        "plain": [plain[a] for a, _ in PAIRS],
        "wide": [clamp(half_up(wide[a], c % 16 + 1) + zeros[c % 16], 8) for a, c in PAIRS],
    }
    return case(ops, constants, expected)


def log2_code(total: int, part: int, bits: int) -> int:
    """Return the log2 code of part / total: n + 1 if r >= 1.5 * 2^n, else n.

    r = round(total / part), n = floor(log2(r)). Codes saturate at 2^bits - 1, which is also the code of part = 0.
    """
    last = 2**bits - 1
    if part == 0:
        return last
    r = half_up_ratio(total, part)
    top = r.bit_length() - 1
    return min(top + (2 * r >= 3 * 2**top), last)


def softmaxes() -> Case:
    """Softmaxes of every row of two scores, which read every entry of every table."""
    ops: list[AnyOp] = [Permute(y="x", x=INPUT, view=(65536, 2), perm=(0, 1), shape=(1, 65536, 2))]
    constants: dict[str, Any] = {}
    expected = {}
    made = {f"exp {scale}": exp_table(scale, 256, 2) for scale in (1e-3, 0.02, 0.07, 0.5, 3.0)}
    # 2^k, 1.5 * 2^k and their neighbours: the entries where codes change.
    edges = {round(f * 2**k) + d for k in range(1, 30) for f in (1, 1.5) for d in (-1, 0, 1)}
    made["edges"] = np.array([2**29, *sorted((e for e in edges if e < 2**29), reverse=True), 0], np.int32)[:256]
    made["small"] = np.array([6, 3, 2, 1, 1, 0], np.int32)
    made["ratios"] = np.array([2**29 // max(3 * d // 2, 1) for d in BYTES], np.int32)
    for name, table in made.items():
        exp = [int(table[min(d, len(table) - 1)]) for d in BYTES]
        rows = [(exp[max(a, b) - a], exp[max(a, b) - b]) for a, b in PAIRS]
        for bits in (2, 3, 4):
            y = f"log {name} {bits}"
            constants[f"{y}.table"] = table
            ops.append(LogSoftmax(y=y, x="x", bits=bits))
            expected[y] = [log2_code(sum(e), part, bits) for e in rows for part in e]
        y, mult = f"uniform {name}", 255 * 2**40 + 1
        constants[f"{y}.table"] = table
        ops.append(Softmax(y=y, x="x", mult=mult, shift=40))
        expected[y] = [clamp(half_up(part * half_up_ratio(mult, sum(e)), 40), 8) for e in rows for part in e]
    codes = [(200 - 3 * d) % 256 for d in BYTES]
    constants["codes.table"] = np.array(codes, np.uint8)
    ops.append(RowCodes(y="codes", x="x"))
    expected["codes"] = [codes[max(a, b) - x] for a, b in PAIRS for x in (a, b)]
    return case(ops, constants, expected)


def shifts() -> Case:
    """Every log2 code a times every value v, with one token per row: acc = (v - zero) * 2^(last - a)."""
    ops: list[AnyOp] = [Permute(y="v", x="row", view=(1, 256), perm=(0, 1), shape=(1, 1, 256))]
    constants: dict[str, Any] = {}
    expected = {}
    for bits in (2, 3, 4):
        last = 2**bits - 1
        constants[f"{bits}.codes.table"] = np.array([min(x, last) for x in BYTES], np.uint8)
        ops += [
            Lookup(y=f"{bits}.codes", x="column"),
            Permute(y=f"{bits}.a", x=f"{bits}.codes", view=(256, 1), perm=(0, 1), shape=(1, 256, 1)),
        ]
        for i, (mult, shift) in enumerate(REQUANTIZERS):
            zero, means_0, y = (0, 128, 255)[i % 3], i % 2 == 1, f"{bits}.y{i}"
            ops.append(
                ShiftMatMul(
                    y=y, a=f"{bits}.a", v="v", mult=mult, shift=shift, v_zero=zero, a_bits=bits, zero_code=means_0, y_zero=60
                )
            )
            expected[y] = []
            for x in BYTES:
                a = min(x, last)
                weight = 0 if means_0 and a == last else 2 ** (last - a)
                expected[y] += [clamp(half_up((v - zero) * weight * mult, shift) + 60, 8) for v in BYTES]
    return case(ops, constants, expected)


def attends() -> Case:
    """Attention over two tokens: the first has code 0 and value 40, the second every combination of code and value."""
    levels = tuple(2**15 - 128 * x for x in BYTES)
    constants: dict[str, Any] = {"codes.table": np.arange(256, dtype=np.uint8)}
    constants |= {"pair.w": np.array([[0], [-1]], np.int8), "pair.bias": np.array([255, 255], np.int32)}
    constants |= {"pair.mult": np.array([2, 2], np.int32), "pair.shift": np.array([1, 1], np.uint8)}
    constants |= {"values.w": np.array([[0], [1]], np.int8), "values.bias": np.array([40, 0], np.int32)}
    constants |= {"values.mult": np.array([2, 2], np.int32), "values.shift": np.array([1, 1], np.uint8)}
    ops: list[AnyOp] = [
        Linear(y="pair", x="column"),  # scores 255 and 255 - x, which become the codes 0 and x
        Permute(y="both", x="pair", view=(256, 2), perm=(0, 1), shape=(1, 256, 2)),
        RowCodes(y="codes", x="both"),
        Linear(y="values", x="column"),  # v of the two tokens: 40, and every byte
        Permute(y="v", x="values", view=(256, 2), perm=(1, 0), shape=(1, 2, 256)),
    ]
    expected = {}
    for i, (mult, shift) in enumerate([(2**29 - 1, 44), (2**28, 43), (357913941, 45), (1, 1), (0, 62), (2**29 - 1, 62)]):
        zero = (0, 128, 255)[i % 3]
        ops.append(
            Attend(
                y=f"y{i}", a="codes", v="v", mult=mult, shift=shift, levels=levels, v_zero=zero, y_zero=90, bits=(8, 16)[i % 2]
            )
        )
        expected[f"y{i}"] = []
        for x in BYTES:
            m = half_up_ratio(mult * levels[0], levels[0] + levels[x])
            for v in BYTES:
                acc = levels[0] * (40 - zero) + levels[x] * (v - zero)
                expected[f"y{i}"].append(clamp(half_up(acc * m, shift) + 90, (8, 16)[i % 2]))
    return case(ops, constants, expected)


CASES: dict[str, Callable[[], Case]] = {
    make.__name__: make for make in (sums, weights, products, norms, means, tables, softmaxes, shifts, attends)
}


def joined(case: Case) -> list[tuple[Program, list[int]]]:
    """Return one program per dtype, with its expected output: at most eight of the case's buffers, concatenated.

    These programs are for runtimes that return only the output of a program.
    """
    values = {op.y: op for op in case.program.ops}
    made = []
    for dtype in ("u8", "u16", "i32"):
        names = [y for y in case.expected if _dtype(values[y]) == dtype]
        names = names[:: -(-len(names) // 8) or 1]
        if names:
            ops = [op for op in case.program.ops if op.y not in case.expected or op.y in names]
            ops = ops[:-1]  # program_of appended the last op, and does so again below
            flat = [
                Permute(y=f"{y} flat", x=y, view=(len(case.expected[y]),), perm=(0,), shape=(len(case.expected[y]) // 256, 256))
                for y in names
            ]
            ops = [*ops, *flat, Concat(y="all", xs=tuple(op.y for op in flat))]
            program = program_of(tuple(ops), dict(case.program.constants), (256, 256, 2))
            made.append((program, [value for y in names for value in case.expected[y]]))
    return made


def _dtype(op: Any) -> str:
    return "i32" if getattr(op, "out", "") == "i32" else "u16" if getattr(op, "bits", 8) > 8 else "u8"


def check(found: dict[str, NDArray[Any]], expected: dict[str, list[int]], name: str) -> None:
    """Compare buffers; report the number of differences and the first one."""
    for y, values in expected.items():
        got = found[y].ravel()
        wrong = np.flatnonzero(got.astype(np.int64) != np.array(values, np.int64))
        where = f"{name}, {y}: {len(wrong)} of {len(values)} differ"
        assert got.shape == (len(values),) and not len(wrong), (
            f"{where}, first at {wrong[0]}: {got[wrong[0]]}, expected {values[wrong[0]]}"
        )
