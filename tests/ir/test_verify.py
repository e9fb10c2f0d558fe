"""Tests of Program.verify(): the programs that it rejects. See also: test_proofs.py (its proofs hold)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.ir.attention import LogSoftmax, MatMul, ShiftMatMul, Softmax
from fqvit.ir.moves import Concat, Permute, Take
from fqvit.ir.ops import Add, LayerNorm, Linear, Lookup, Mean, Term
from fqvit.ir.program import Header, Output, Program, Site, version_of
from fqvit.runtime.reference import Reference

Constants = dict[str, np.ndarray[Any, Any]]
T, C = 4, 6  # the test programs read 4 tokens of 6 channels: 4 x 2 pixels of 3 colours


def program_of(ops: list[Any], constants: Constants, output: str | None = None, kind: Any = "tokens") -> Program:
    """Make a program whose first op writes the pixels to buffer x, u8 [T, C]; `ops` follow."""
    preprocess = Preprocess(4, 2, 3, 4, "bicubic", (0.5,) * 3, (0.5,) * 3)
    tokens = Permute(y="x", x="pixels", view=(T, C), perm=(0, 1))
    whole = (tokens, *ops)
    header = Header(
        version=version_of(whole),
        model="test",
        preprocess=preprocess,
        ops=whole,
        output=Output(output or whole[-1].y, kind, 1.0),
        sites={},
        recipe={},
        source="",
        images=1,
    )
    return Program(header, constants)


def linear_parts(name: str, outputs: int = 5, inputs: int = C) -> Constants:
    rng = np.random.default_rng(0)
    return {
        f"{name}.w": rng.integers(-127, 127, (outputs, inputs), dtype=np.int8),
        f"{name}.bias": rng.integers(-999, 999, outputs, dtype=np.int32),
        f"{name}.mult": np.full(outputs, 2**30, np.int32),
        f"{name}.shift": np.full(outputs, 38, np.uint8),
    }


def with_linear(**changes: Any) -> Program:
    """Make a program with one Linear. changes: replacements of its constants; None removes a constant."""
    parts = linear_parts("y")
    for key, value in changes.items():
        if value is None:
            del parts[f"y.{key}"]
        else:
            parts[f"y.{key}"] = value
    return program_of([Linear(y="y", x="x")], parts)


AFFINE = np.ones((2, C), np.int32)
SCORES = MatMul(y="s", a="h", b="h", mult=2**30, shift=40)
HEADS = Permute(y="h", x="x", view=(2, 2, 2, 3), perm=(0, 1, 2, 3))
TABLE = np.array([2**20, 2**10, 0], np.int32)
REGION = np.zeros((2, 2), np.uint8)
SOFTMAX = LogSoftmax(y="a", x="s", region="region")
MASKED: Constants = {"a.table": TABLE, "region": REGION}


def norm(**fields: Any) -> LayerNorm:
    return LayerNorm(**{"y": "y", "x": "x", "epsilon": 1, "shift": 30, "b_shift": 10, **fields})


def plus(*terms: Term, **fields: Any) -> Add:
    return Add(**{"y": "y", "terms": terms, "shift": 20, **fields})


def x_term(**fields: Any) -> Term:
    return Term(**{"x": "x", "mult": 2**20, **fields})


def shifted_table(**fields: Any) -> Program:
    """Make a program with one Lookup that has alpha."""
    constants = {"y.table": np.zeros(256, np.int16), "al": np.full(C, 2, np.uint8)}
    return program_of([Lookup(**{"y": "y", "x": "x", "alpha": "al", "y_zero": (0, 0, 0), **fields})], constants)


REJECTED: dict[str, tuple[Callable[[], Program], str]] = {
    "weights of the wrong dtype": (lambda: with_linear(w=np.zeros((5, C), np.int16)), "y: constant 'y.w' is int16"),
    "weights of the wrong shape": (lambda: with_linear(w=np.zeros((5, C + 1), np.int8)), "y: constant 'y.w' has shape"),
    "weights with an extra axis": (lambda: with_linear(w=np.zeros((5, C, 1), np.int8)), "y: constant 'y.w' has shape"),
    "no weights": (lambda: with_linear(w=None), "y: constant 'y.w' is missing"),
    "no bias": (lambda: with_linear(bias=None), "y: constant 'y.bias' is missing"),
    "no outputs": (lambda: with_linear(w=np.zeros((0, C), np.int8)), "y: constant 'y.w' has shape"),
    "too few multipliers": (lambda: with_linear(mult=np.ones(4, np.int32)), "y: constant 'y.mult' has shape"),
    "a negative multiplier": (lambda: with_linear(mult=np.full(5, -1, np.int32)), "y: mult must be in"),
    "shift 0": (lambda: with_linear(shift=np.zeros(5, np.uint8)), "y: shift must be in 1..62"),
    "shift 63": (lambda: with_linear(shift=np.full(5, 63, np.uint8)), "y: shift must be in 1..62"),
    "a float constant": (lambda: with_linear(extra=np.ones(1, np.float32)), "'y.extra' is float32: only integers"),
    "float64 weights": (lambda: with_linear(w=np.ones((5, C))), "'y.w' is float64: only integers"),
    "a boolean constant": (lambda: with_linear(extra=np.ones(1, bool)), "'y.extra' is bool: only integers"),
    "an unsigned 32-bit constant": (lambda: with_linear(extra=np.ones(1, np.uint32)), "'y.extra' is uint32"),
    "a big-endian bias": (lambda: with_linear(bias=np.ones(5, ">i4")), "'y.bias' is >i4"),
    "an accumulator that overflows": (
        lambda: program_of(
            [Linear(y="blocks.0.fc", x="x")],
            linear_parts("blocks.0.fc") | {"blocks.0.fc.bias": np.full(5, 2**31 - 1, np.int32)},
        ),
        "blocks.0.fc: acc can reach [0-9]+, which does not fit 31 bits",
    ),
    "scores that overflow their 32 bits": (
        lambda: program_of([Linear(y="y", x="x", out="i32")], linear_parts("y") | {"y.shift": np.full(5, 1, np.uint8)}),
        "y: y can reach",
    ),
    "a buffer written twice": (
        lambda: program_of([Lookup(y="x", x="x")], {"x.table": np.zeros(256, np.uint8)}),
        "written twice",
    ),
    "an op writing the pixels": (lambda: program_of([Mean(y="pixels", x="x", mult=1, shift=1)], {}), "pixels: written twice"),
    "a buffer read before it is written": (
        lambda: program_of([Mean(y="a", x="b", mult=1, shift=1), Mean(y="b", x="x", mult=1, shift=1)], {}),
        "a: reads 'b' before",
    ),
    "a buffer that reads itself": (lambda: program_of([Mean(y="a", x="a", mult=1, shift=1)], {}), "a: reads 'a' before"),
    "an output that nothing writes": (lambda: program_of([], {}, "nothing"), "output: no op writes 'nothing'"),
    "a constant with the name of a buffer": (
        lambda: program_of([Take(y="y", x="x", index="pixels")], {"pixels": np.zeros(3, np.int32)}),
        "pixels",
    ),
    "a constant with the name of a later buffer": (
        lambda: program_of([Mean(y="y", x="x", mult=1, shift=9)], {"y": np.zeros(3, np.int32)}),
        "'?y'?",
    ),
    "an index past the end": (
        lambda: program_of([Take(y="y", x="x", index="i")], {"i": np.array([T], np.int32)}),
        "outside 4 rows",
    ),
    "an index below -1": (
        lambda: program_of([Take(y="y", x="x", index="i")], {"i": np.array([-2], np.int32)}),
        "outside 4 rows",
    ),
    "a missing index": (lambda: program_of([Take(y="y", x="x", index="i")], {}), "y: constant 'i' is missing"),
    "an int64 index": (lambda: program_of([Take(y="y", x="x", index="i")], {"i": np.array([0])}), "'i' is int64"),
    "a fill value that is not a code": (
        lambda: program_of([Take(y="y", x="x", index="i", fill=256)], {"i": np.array([-1], np.int32)}),
        "fill is outside",
    ),
    "a table that is too short": (
        lambda: program_of([Lookup(y="y", x="x")], {"y.table": np.zeros(255, np.uint8)}),
        "'y.table' has shape",
    ),
    "a signed table": (lambda: program_of([Lookup(y="y", x="x")], {"y.table": np.zeros(256, np.int8)}), "'y.table' is int8"),
    "a view that does not fit": (lambda: program_of([Permute(y="y", x="x", view=(5, 5), perm=(0, 1))], {}), "view"),
    "a negative view": (lambda: program_of([Permute(y="y", x="x", view=(-4, -6), perm=(0, 1))], {}), "view"),
    "a wrong permutation": (lambda: program_of([Permute(y="y", x="x", view=(T, C), perm=(0, 0))], {}), "perm"),
    "a shape that does not fit": (
        lambda: program_of([Permute(y="y", x="x", view=(T, C), perm=(0, 1), shape=(25,))], {}),
        "shape",
    ),
    "a selection outside its axis": (
        lambda: program_of([Permute(y="y", x="x", view=(T, C), perm=(0,), select=(0, T))], {}),
        "select",
    ),
    "more axes than numpy supports": (
        lambda: program_of([Permute(y="y", x="x", view=(1,) * 70 + (T, C), perm=tuple(range(72)))], {}),
        "y: ",
    ),
    "concat of nothing": (lambda: program_of([Concat(y="y", xs=())], {}), "y: concatenates only constants"),
    "concat of constants only": (lambda: program_of([Concat(y="y", xs=("t",))], {"t": np.zeros((2, C), np.uint8)}), "y: "),
    "concat of different widths": (
        lambda: program_of([Concat(y="y", xs=("x", "t"))], {"t": np.zeros((2, C + 1), np.uint8)}),
        "'t' does not match the dtype and channels of 'x'",
    ),
    "concat of different dtypes": (
        lambda: program_of([Concat(y="y", xs=("x", "t"))], {"t": np.zeros((2, C), np.int32)}),
        "'t' does not match the dtype and channels of 'x'",
    ),
    "a mean of no rows": (
        lambda: program_of([Mean(y="y", x="x", mult=1, shift=1, skip=T)], {}),
        "skip is 4 for",
    ),
    "a mean from a negative row": (
        lambda: program_of([Mean(y="y", x="x", mult=1, shift=1, skip=-1)], {}),
        "skip is -1 for",
    ),
    "a mean with shift -1": (lambda: program_of([Mean(y="y", x="x", mult=1, shift=-1)], {}), "shift must be in"),
    "a mean with mult 2^31": (lambda: program_of([Mean(y="y", x="x", mult=2**31, shift=1)], {}), "mult must be in"),
    "17 bits": (lambda: program_of([Mean(y="y", x="x", mult=1, shift=1, bits=17)], {}), "bits is 17"),
    "0 bits": (lambda: program_of([Mean(y="y", x="x", mult=1, shift=1, bits=0)], {}), "bits is 0"),
    "a zero point beyond 64 bits": (lambda: program_of([Mean(y="y", x="x", mult=1, shift=1, y_zero=10**30)], {}), "y: "),
    "a zero point of 2^63 - 1": (
        lambda: program_of([Mean(y="y", x="x", mult=1, shift=1, y_zero=2**63 - 1)], {}),
        "y: ",
    ),
    "a sum's zero point beyond 64 bits": (lambda: program_of([plus(x_term(), x_term(), y_zero=10**30)], {}), "y: "),
    "a product's zero point beyond 64 bits": (
        lambda: program_of([MatMul(y="y", a="x", b="x", mult=1, shift=1, y_zero=10**30)], {}),
        "y: ",
    ),
    "an input zero point beyond 64 bits": (
        lambda: program_of([MatMul(y="y", a="x", b="x", mult=1, shift=1, a_zero=10**30)], {}),
        "y: zero point outside",
    ),
    "four zero points for six channels": (lambda: program_of([norm(zero=(1, 2, 3, 4))], {"y.affine": AFFINE}), "4 zero points"),
    "no zero points": (lambda: program_of([norm(zero=())], {"y.affine": AFFINE}), "0 zero points"),
    "a power-of-two factor above 15": (
        lambda: program_of([norm(alpha="al")], {"y.affine": AFFINE, "al": np.full(C, 16, np.uint8)}),
        "shift above 15",
    ),
    "epsilon 0": (lambda: program_of([norm(epsilon=0)], {"y.affine": AFFINE}), "epsilon"),
    "epsilon 2^62": (lambda: program_of([norm(epsilon=2**62)], {"y.affine": AFFINE}), "y: D can reach"),
    "a layernorm with shift 63": (lambda: program_of([norm(shift=63)], {"y.affine": AFFINE}), "shift must be in"),
    "a layernorm with b_shift -1": (lambda: program_of([norm(b_shift=-1)], {"y.affine": AFFINE}), "b_shift in"),
    "a layernorm with shift 0": (lambda: program_of([norm(shift=0)], {"y.affine": AFFINE}), "shift must be in"),
    "a layernorm with b_shift 33": (lambda: program_of([norm(b_shift=33)], {"y.affine": AFFINE}), "b_shift in"),
    "a shifted table with -1 bits": (lambda: shifted_table(bits=-1), "bits is -1"),
    "a shifted table with 17 bits": (lambda: shifted_table(bits=17), "bits is 17"),
    "a sum with one multiplier too large": (
        lambda: program_of([plus(x_term(), x_term(mult="m"))], {"m": np.array([1, 2**30, 1, 1, 1, 1], np.int32)}),
        "mult must be in",
    ),
    "a sum with one negative multiplier": (
        lambda: program_of([plus(x_term(), x_term(mult="m"))], {"m": np.array([1, -1, 1, 1, 1, 1], np.int32)}),
        "mult must be in",
    ),
    "one shift of 0": (lambda: with_linear(shift=np.array([9, 0, 9, 9, 9], np.uint8)), "y: shift must be in 1..62"),
    "one shift of 63": (lambda: with_linear(shift=np.array([9, 63, 9, 9, 9], np.uint8)), "y: shift must be in 1..62"),
    "a layernorm that overflows": (
        lambda: program_of([norm(b_shift=32)], {"y.affine": np.full((2, C), 2**31 - 1, np.int32)}),
        "y: y before its shift can reach",
    ),
    "a sum of different shapes": (
        lambda: program_of([plus(x_term(), Term(x="b", mult=1))], {"b": np.zeros((T + 1, C), np.int16)}),
        "has shape",
    ),
    "a sum with mult 2^30": (lambda: program_of([plus(x_term(), x_term(mult=2**30))], {}), "mult must be in"),
    "a sum whose shift plus y_alpha exceeds 62": (
        lambda: program_of([plus(x_term(), x_term(), shift=60, y_alpha="al")], {"al": np.full(C, 3, np.uint8)}),
        "shift must be in",
    ),
    "a sum with shift 0": (lambda: program_of([plus(x_term(), x_term(), shift=0)], {}), "shift must be in"),
    "a sum of constants only": (
        lambda: program_of([plus(Term(x="b", mult=1), Term(x="b", mult=1))], {"b": np.zeros((T, C), np.int16)}),
        "y: ",
    ),
    "a sum of tokens and one pooled row": (
        lambda: program_of([Mean(y="m", x="x", mult=1, shift=1), plus(x_term(), Term(x="m", mult=1))], {}),
        "y: ",
    ),
    "a sum of a pooled row and a constant with several tokens": (
        lambda: program_of(
            [Mean(y="m", x="x", mult=1, shift=1), plus(Term(x="m", mult=1), Term(x="b", mult=1))],
            {"b": np.zeros((T, C), np.int16)},
        ),
        "y: ",
    ),
    "a sum that overflows": (
        lambda: program_of(
            [plus(x_term(), Term(x="b", mult=2**30 - 1, alpha="al"))],
            {"b": np.full((T, C), 2**31 - 1, np.int32), "al": np.full(C, 15, np.uint8)},
        ),
        "y: sum can reach",
    ),
    "a matrix product of different widths": (
        lambda: program_of([Permute(y="h", x="x", view=(C, T), perm=(0, 1)), MatMul(y="y", a="x", b="h", mult=1, shift=1)], {}),
        r"shapes \[4, 6\] and \[6, 4\] do not match",
    ),
    "an attention table that starts at 0": (
        lambda: program_of([HEADS, SCORES, LogSoftmax(y="a", x="s")], {"a.table": np.zeros(4, np.int32)}),
        "positive at 0",
    ),
    "a negative exponential": (
        lambda: program_of([HEADS, SCORES, LogSoftmax(y="a", x="s")], {"a.table": np.array([5, -1], np.int32)}),
        "negative",
    ),
    "an attention table that overflows": (
        lambda: program_of([HEADS, SCORES, LogSoftmax(y="a", x="s")], {"a.table": np.full(3, 2**30, np.int32)}),
        "a: sum of exponentials can reach",
    ),
    "5-bit attention": (
        lambda: program_of([HEADS, SCORES, LogSoftmax(y="a", x="s", bits=5)], {"a.table": TABLE}),
        "bits is 5",
    ),
    "regions of the wrong shape": (
        lambda: program_of([HEADS, SCORES, SOFTMAX], {"a.table": TABLE, "region": np.zeros((2, 3), np.uint8)}),
        "'region' has shape",
    ),
    "attention times V that ignores the mask": (
        lambda: program_of([HEADS, SCORES, SOFTMAX, ShiftMatMul(y="y", a="a", v="h", mult=1, shift=1)], MASKED),
        "y: 'a' is masked",
    ),
    "attention times V that ignores the mask, after a permutation": (
        lambda: program_of(
            [
                HEADS,
                SCORES,
                SOFTMAX,
                Permute(y="p", x="a", view=(2, 2, 2, 2), perm=(0, 1, 2, 3)),
                ShiftMatMul(y="y", a="p", v="h", mult=1, shift=1),
            ],
            MASKED,
        ),
        "y: 'p' is masked",
    ),
    "attention times V with the wrong number of bits": (
        lambda: program_of(
            [HEADS, SCORES, SOFTMAX, ShiftMatMul(y="y", a="a", v="h", mult=1, shift=1, zero_code=True, a_bits=3)], MASKED
        ),
        "holds codes up to 15",
    ),
    "a softmax with mult 2^58": (
        lambda: program_of([HEADS, SCORES, Softmax(y="a", x="s", mult=2**58, shift=52)], {"a.table": TABLE}),
        "mult in",
    ),
    "a softmax with shift 53": (
        lambda: program_of([HEADS, SCORES, Softmax(y="a", x="s", mult=1, shift=53)], {"a.table": TABLE}),
        "shift must be in",
    ),
    "the wrong number of class names": (
        lambda: program_of(
            [Mean(y="m", x="x", mult=1, shift=1), Linear(y="y", x="m", out="i32")],
            linear_parts("y") | {"classes": np.frombuffer(b"one\ntwo", np.uint8)},
            kind="logits",
        ),
        "2 class names for 5 logits",
    ),
}


def with_header(program: Program, **fields: Any) -> Program:
    return Program(msgspec.structs.replace(program.header, **fields), program.constants)


def test_sites_and_outputs_name_only_existing_buffers_and_constants() -> None:
    good = program_of([], {"al": np.zeros(C, np.uint8), "short": np.zeros(C - 1, np.uint8)})
    with_header(good, sites={"x": Site("norm", 8, (0.5,), (3,), "al")}).verify()
    with_header(good, output=Output("x", "tokens", 1.0, 0, "al")).verify()
    for sites in ({"nowhere": Site("norm", 8)}, {"x": Site("norm", 8, alpha="none")}, {"x": Site("norm", 8, alpha="short")}):
        with pytest.raises(FqvitError, match=f"site {next(iter(sites))}: "):
            with_header(good, sites=sites).verify()
    with pytest.raises(FqvitError, match="output: constant 'short' has shape"):
        with_header(good, output=Output("x", "tokens", 1.0, 0, "short")).verify()


@pytest.mark.parametrize("case", REJECTED)
def test_verify_rejects(case: str) -> None:
    make, message = REJECTED[case]
    program = make()
    with pytest.raises(FqvitError, match=message) as caught:
        program.verify()
    assert "\n" not in str(caught.value)


def test_verify_accepts_the_same_programs_without_the_fault() -> None:
    with_linear().verify()
    program_of([norm()], {"y.affine": AFFINE}).verify()
    program_of([plus(x_term(), x_term())], {}).verify()
    context = ShiftMatMul(y="y", a="a", v="h", mult=1, shift=1, zero_code=True)
    program_of([HEADS, SCORES, SOFTMAX, context], MASKED, output="x").verify()


def test_verify_returns_the_proofs_of_all_ops_in_order() -> None:
    found = program_of([norm(), Linear(y="z", x="y", out="acc")], {"y.affine": AFFINE, **linear_parts("z")}, "x").verify()
    assert [(proof.buffer, proof.what) for proof in found.proofs] == [
        *(("y", what) for what in ("D", "t numerator", "t", "y before its shift")),
        ("z", "acc"),
    ]


def test_reference_rejects_a_program_that_does_not_verify() -> None:
    with pytest.raises(FqvitError, match="'y.w' is missing"):
        Reference(with_linear(w=None))


def test_no_op_has_a_float_in_its_json() -> None:
    for make, _ in REJECTED.values():
        text = msgspec.json.encode(make().header.ops).decode()
        assert "." not in text.replace("blocks.0.fc", "")
