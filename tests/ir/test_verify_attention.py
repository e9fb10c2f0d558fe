"""Tests of Program.verify() on attention ops: wrong shapes, regions and position biases. See also: test_verify.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from fqvit.errors import FqvitError
from fqvit.ir.attention import Attend, LogSoftmax, MatMul, RowCodes, ShiftMatMul, Softmax
from fqvit.ir.moves import Permute
from fqvit.ir.ops import Lookup
from fqvit.ir.program import Program
from tests.ir.test_verify import HEADS, SCORES, TABLE, T, program_of

THREE_TOKENS = Permute(y="t", x="x", view=(2, 2, 3, 2), perm=(0, 1, 2, 3))


def context(**fields: Any) -> ShiftMatMul:
    return ShiftMatMul(**{"y": "y", "a": "a", "v": "h", "mult": 1, "shift": 1, **fields})


REJECTED: dict[str, tuple[Callable[[], Program], str]] = {
    "a bias for scores without heads": (
        lambda: program_of(
            [MatMul(y="y", a="x", b="x", mult=1, shift=1, index="i")],
            {"y.bias": np.zeros((4, 1), np.int32), "i": np.zeros((T, T), np.uint16)},
        ),
        "y: a bias needs an axis of heads",
    ),
    "a bias index past the last row": (
        lambda: program_of(
            [HEADS, msgspec.structs.replace(SCORES, index="i")],
            {"s.bias": np.zeros((4, 2), np.int32), "i": np.full((2, 2), 4, np.uint16)},
        ),
        "s: constant 'i' points outside 4 rows",
    ),
    "one bias index past the last row": (
        lambda: program_of(
            [HEADS, msgspec.structs.replace(SCORES, index="i")],
            {"s.bias": np.zeros((4, 2), np.int32), "i": np.array([[0, 1], [4, 2]], np.uint16)},
        ),
        "s: constant 'i' points outside 4 rows",
    ),
    "scores whose range does not start at 0": (
        lambda: program_of(
            [HEADS, Lookup(y="t", x="h"), LogSoftmax(y="a", x="t")],
            {"t.table": np.full(256, 7, np.uint8), "a.table": TABLE},
        ),
        "a: scores must be unsigned codes",
    ),
    "regions of scores that are not square": (
        lambda: program_of([HEADS, LogSoftmax(y="a", x="h", region="r")], {"a.table": TABLE, "r": np.zeros((2, 3), np.uint8)}),
        "a: regions need square scores",
    ),
    "regions of a softmax without windows": (
        lambda: program_of(
            [Permute(y="h", x="x", view=(6, 2, 2), perm=(0, 1, 2)), Softmax(y="a", x="h", mult=1, shift=1, region="r")],
            {"a.table": TABLE, "r": np.zeros((6, 2), np.uint8)},
        ),
        r"a: regions need scores of shape \[W, H, T, T\]",
    ),
    "a softmax with mult 0": (
        lambda: program_of([HEADS, SCORES, Softmax(y="a", x="s", mult=0, shift=9)], {"a.table": TABLE}),
        "a: shift must be in 1..52 and mult in 1",
    ),
    "V with a different number of tokens": (
        lambda: program_of([HEADS, SCORES, LogSoftmax(y="a", x="s"), THREE_TOKENS, context(v="t")], {"a.table": TABLE}),
        r"y: shapes \[2, 2, 2, 2\] and \[2, 2, 3, 2\] do not match",
    ),
    "V with a different number of heads": (
        lambda: program_of(
            [
                HEADS,
                SCORES,
                LogSoftmax(y="a", x="s"),
                Permute(y="t", x="x", view=(2, 1, 2, 6), perm=(0, 1, 2, 3)),
                context(v="t"),
            ],
            {"a.table": TABLE},
        ),
        "y: shapes .* do not match",
    ),
    "attend with a different number of tokens": (
        lambda: program_of(
            [HEADS, SCORES, RowCodes(y="a", x="s"), THREE_TOKENS, Attend(y="y", a="a", v="t", mult=1, shift=1, levels=(1,))],
            {"a.table": np.zeros(2, np.uint8)},
        ),
        "y: shapes .* do not match",
    ),
    "5-bit attention codes times V": (  # V is all 0, so that the accumulator cannot overflow
        lambda: program_of(
            [HEADS, SCORES, Lookup(y="a", x="s"), Lookup(y="v", x="h"), context(v="v", a_bits=5)],
            {"a.table": np.arange(256, dtype=np.uint8) // 8, "v.table": np.zeros(256, np.uint8)},
        ),
        "y: 'a' holds codes up to 31, expected 5 bits",
    ),
    "attention times V with shift 63": (
        lambda: program_of([HEADS, SCORES, LogSoftmax(y="a", x="s"), context(shift=63)], {"a.table": TABLE}),
        "y: shift must be in",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_verify_rejects(case: str) -> None:
    make, message = REJECTED[case]
    with pytest.raises(FqvitError, match=message) as caught:
        make().verify()
    assert "\n" not in str(caught.value)


def test_verify_accepts_the_same_programs_without_the_fault() -> None:
    program_of([HEADS, SCORES, LogSoftmax(y="a", x="s"), context()], {"a.table": TABLE}, "x").verify()
    biased = {"s.bias": np.zeros((4, 2), np.int32), "i": np.full((2, 2), 3, np.uint16)}
    program_of([HEADS, msgspec.structs.replace(SCORES, index="i")], biased, "x").verify()
    mean = Attend(y="y", a="a", v="h", mult=1, shift=1, levels=(1,))
    program_of([HEADS, SCORES, RowCodes(y="a", x="s"), mean], {"a.table": np.zeros(2, np.uint8)}, "x").verify()
