"""Tests of codebooks: packing, the Linear that stores them, and the constants that verify() rejects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fqvit.errors import FqvitError
from fqvit.ir import packing
from fqvit.ir.moves import Concat
from fqvit.ir.ops import Add, Linear, Term
from fqvit.ir.packing import pack_codebooks, unpack_codebooks
from fqvit.ir.program import Program
from fqvit.runtime.reference import Reference
from tests.factories import assert_same, few, many
from tests.ir.test_verify import C, T, linear_parts, program_of

GROUP, BOOKS = 4, 3  # for C = 6 inputs: the second group has only 2


def random_weights(
    rng: np.random.Generator, outputs: int, inputs: int, group: int, books: int, width: int = 4
) -> tuple[Any, Any, Any]:
    """Return w i8 [O, K], choice u8 [O, G] and codebooks i8 [B, 2^width]."""
    codebooks = rng.integers(-128, 127, (books, 2**width), np.int8, endpoint=True)
    choice = rng.integers(0, books, (outputs, -(-inputs // group)), np.uint8)
    codes = rng.integers(0, 2**width, (outputs, inputs))
    return codebooks[choice[:, np.arange(inputs) // group], codes], choice, codebooks


@many
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 70), st.integers(2, 40), st.integers(1, 16), st.integers(2, 7)
)
def test_unpack_inverts_pack(seed: int, outputs: int, inputs: int, group: int, books: int, width: int) -> None:
    w, choice, codebooks = random_weights(np.random.default_rng(seed), outputs, inputs, group, books, width)
    codes, choices = pack_codebooks(w, choice, codebooks, group, width)
    assert codes.dtype == choices.dtype == np.uint8
    assert codes.shape == (outputs, -(-inputs * width // 8)) and choices.shape == (outputs, (choice.shape[1] + 1) // 2)
    again = unpack_codebooks(codes, choices, codebooks, inputs, group, width)
    assert again.dtype == np.int8
    assert_same(again, w, "unpacked weights")


def test_codes_are_unsigned_and_low_nibbles_come_first() -> None:
    """The example of docs/reference/format.md."""
    codebooks = np.array([[-90, -25, 25, 90], [-128, -4, 3, 127]], np.int8)
    w = np.array([[-90, 90, 127, -4, 25]], np.int8)
    codes, choices = pack_codebooks(w, np.array([[0, 1, 0]], np.uint8), codebooks, 2, 2)
    assert codes.tolist() == [[0x7C, 0x02]] and choices.tolist() == [[0x10, 0x00]]


def test_equal_levels_are_packed_as_the_first_one() -> None:
    codebooks = np.array([[5, 0, 0, 5]], np.int8)
    codes, _ = pack_codebooks(np.array([[0, 5, 5, 0]], np.int8), np.zeros((1, 1), np.uint8), codebooks, 4, 2)
    assert codes.tolist() == [[0b01_00_00_01]]


def test_large_layers_are_looked_up_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    w, choice, codebooks = random_weights(np.random.default_rng(0), 9, 11, 3, 5)
    expected = pack_codebooks(w, choice, codebooks, 3)
    for block in (1, 11, 12, 40):  # a block has whole rows, at least one
        monkeypatch.setattr(packing, "BLOCK", block)
        codes, choices = pack_codebooks(w, choice, codebooks, 3)
        assert_same(codes, expected[0], "codes")
        assert_same(unpack_codebooks(codes, choices, codebooks, 11, 3), w, "unpacked weights")


@pytest.mark.parametrize(
    "w, choice, codebooks",
    [
        ([3], [0], [[0, 1, 2, 4]]),  # no such level
        ([4], [1], [[0, 1, 2, 4], [0, 1, 2, 3]]),  # a level of the other codebook
        ([1], [1], [[0, 1, 2, 4]]),  # no such codebook
        ([1], [0], [[0, 1, 2]]),  # not 2^width levels
        ([1], [0], [[0, 1, 2, 3]] * 17),
    ],
)
def test_pack_asserts_that_weights_are_levels_of_their_codebooks(w: Any, choice: Any, codebooks: Any) -> None:
    with pytest.raises(AssertionError):
        pack_codebooks(np.array([w], np.int8), np.array([choice], np.uint8), np.array(codebooks, np.int8), 2, 2)


def linear_with(weights: tuple[Any, Any, Any], group: int = GROUP, width: int = 0, /, **changes: Any) -> Program:
    """Return a program with one packed Linear on 4 tokens of 6 channels; changes replace its constants, None removes one."""
    w, choice, codebooks = weights
    codes, choices = pack_codebooks(w, choice, codebooks, group, width or 4)
    parts = linear_parts("y", len(w)) | {"y.w": codes, "y.choice": choices, "y.codebooks": codebooks}
    parts |= {f"y.{name}": array for name, array in changes.items() if array is not None}
    for name in (name for name, array in changes.items() if array is None):
        del parts[f"y.{name}"]
    op = Linear(y="y", x="x", out="acc", group=group, width=width, codebooks=len(codebooks))
    return program_of([op, Concat(y="z", xs=("x",))], parts)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@few
@given(seed=st.integers(0, 2**32 - 1), group=st.integers(2, 9), books=st.integers(1, 16), width=st.sampled_from([0, 2, 3, 7]))
def test_a_linear_multiplies_by_the_levels_of_its_codebooks(
    library: Any, seed: int, group: int, books: int, width: int
) -> None:
    rng = np.random.default_rng(seed)
    weights = random_weights(rng, 5, C, group, books, width or 4)
    program = linear_with(weights, group, width)
    images = rng.integers(0, 256, (2, 4, 2, 3), dtype=np.uint8)
    seen: dict[str, Any] = {}
    Reference(program, library).run(images, lambda name, x: seen.update({name: x.copy()}))
    expected = images.reshape(2, T, C).astype(np.int64) @ weights[0].T.astype(np.int64) + program.constants["y.bias"]
    assert_same(seen["y"], expected, "accumulators")


WEIGHTS = random_weights(np.random.default_rng(0), 5, C, GROUP, BOOKS)


def test_unpacked_programs_have_plain_weights_only() -> None:
    program = linear_with(WEIGHTS)
    plain = program_of([Linear(y="y", x="x", out="acc"), Concat(y="z", xs=("x",))], linear_parts("y") | {"y.w": WEIGHTS[0]})
    assert program.unpacked().ops == plain.ops and program.unpacked().constants.keys() == plain.constants.keys()
    assert program.verify() == plain.verify() == program.unpacked().verify()
    assert program.constants["y.w"].dtype == np.uint8 and program.header.version == 2


def test_one_linear_can_use_the_codebooks_of_another() -> None:
    first = with_extra_op(Linear(y="s", x="x", out="acc", group=GROUP, codebooks=BOOKS, weights_of="y"))
    program = Program(first.header, {**first.constants, "s.bias": first.constants["y.bias"]})
    unpacked = program.unpacked().constants
    assert_same(unpacked["y.w"], WEIGHTS[0], "weights")
    assert not {"s.w", "y.choice", "y.codebooks"} & unpacked.keys()


@pytest.mark.parametrize("width", range(2, 8))
def test_verify_accepts_every_width(width: int) -> None:
    linear_with(random_weights(np.random.default_rng(width), 5, C, GROUP, 16, width), GROUP, width).verify()


def changed(**constants: Any) -> Program:
    return linear_with(WEIGHTS, **constants)


def with_field(books: Any = None, /, **fields: Any) -> Program:
    program = linear_with(WEIGHTS) if books is None else linear_with(WEIGHTS, codebooks=books)
    ops = tuple(msgspec.structs.replace(op, **fields) if isinstance(op, Linear) else op for op in program.ops)
    return Program(msgspec.structs.replace(program.header, ops=ops), program.constants)


def with_extra_op(op: Any) -> Program:
    program = linear_with(WEIGHTS)
    return Program(msgspec.structs.replace(program.header, ops=(*program.ops, op)), program.constants)


ODD_WEIGHTS = random_weights(np.random.default_rng(1), 5, 5, 2, BOOKS)  # 5 inputs, 3 groups: both have a padding nibble


def odd(**changes: Any) -> Program:
    codes, choices = pack_codebooks(*ODD_WEIGHTS, 2)
    parts = {"odd.w": codes, "odd.choice": choices, "odd.codebooks": ODD_WEIGHTS[2], "odd.bias": np.zeros(5, np.int32)}
    parts |= linear_parts("t", 5) | {f"odd.{name}": change(parts[f"odd.{name}"]) for name, change in changes.items()}
    ops = [Linear(y="t", x="x"), Linear(y="odd", x="t", out="acc", group=2, codebooks=BOOKS)]
    return program_of(ops, parts, output="t")


def reader_of(constant: str) -> Program:
    return with_extra_op(Add(y="s", terms=(Term(x="x", mult=1), Term(x=constant, mult=1)), shift=1))


REJECTED: dict[str, tuple[Callable[[], Program], str]] = {
    "17 codebooks": (lambda: with_field(codebooks=17), "y: codebooks is 17, expected 0 to 16"),
    "-1 codebooks": (lambda: with_field(codebooks=-1), "y: codebooks is -1, expected 0 to 16"),
    "10^30 codebooks": (lambda: with_field(codebooks=10**30), "y: codebooks is 10+, expected 0 to 16"),
    "no group": (lambda: with_field(group=0), "y: codebooks is 3, but group is 0, expected 2 to 65536"),
    "a width but no group": (lambda: with_field(group=0, width=4), "y: codebooks is 3, but group is 0"),
    "group 1": (lambda: with_field(group=1), "y: group is 1, expected 0 or 2 to 65536"),
    "width 8": (lambda: with_field(width=8), "y: width is 8, expected 0 or 2 to 7"),
    "more codebooks than stored": (lambda: with_field(codebooks=4), "'y.codebooks' has shape"),
    "fewer codebooks than stored": (lambda: with_field(codebooks=2), "'y.codebooks' has shape"),
    "choice 2 of 2 codebooks": (lambda: with_field(WEIGHTS[2][:2], codebooks=2), "'y.choice' has codebook 2, expected 0 to 1"),
    "codes of another width": (lambda: with_field(width=2), "'y.w' has shape"),
    "choice 15": (lambda: changed(choice=np.full((5, 1), 0xF0, np.uint8)), "'y.choice' has codebook 15, expected 0 to 2"),
    "no choices": (lambda: changed(choice=None), "y: constant 'y.choice' is missing"),
    "no codebooks": (lambda: changed(codebooks=None), "y: constant 'y.codebooks' is missing"),
    "no codes": (lambda: changed(w=None), "y: constant 'y.w' is missing"),
    "exponents only": (lambda: with_field(codebooks=0), "constant 'y.exponent' is missing"),
    "int8 weights": (lambda: changed(w=WEIGHTS[0]), "'y.w' is int8, expected u8"),
    "unsigned levels": (lambda: changed(codebooks=np.zeros((BOOKS, 16), np.uint8)), "is uint8, expected i8"),
    "8 levels for 4 bits": (lambda: changed(codebooks=np.zeros((BOOKS, 8), np.int8)), "'y.codebooks' has shape"),
    "flat codebooks": (lambda: changed(codebooks=np.zeros(BOOKS * 16, np.int8)), "'y.codebooks' has shape"),
    "one byte per choice": (lambda: changed(choice=np.zeros((5, 2), np.uint8)), "'y.choice' has shape"),
    "a nonzero padding code": (
        lambda: odd(w=lambda codes: codes | np.uint8([0, 0, 0x10])),
        "odd: constant 'odd.w' has a padding bit that is not 0",
    ),
    "a nonzero padding choice": (
        lambda: odd(choice=lambda choices: choices | np.uint8([0, 0x10])),
        "odd: constant 'odd.choice' has a padding bit that is not 0",
    ),
    "codes as an operand": (lambda: reader_of("y.w"), "s: reads 'y.w'"),
    "choices as an operand": (lambda: reader_of("y.choice"), "s: reads 'y.choice'"),
    "codebooks as an operand": (lambda: reader_of("y.codebooks"), "s: reads 'y.codebooks'"),
    "the weights of an op with fewer codebooks": (
        lambda: with_extra_op(Linear(y="s", x="x", out="acc", group=GROUP, codebooks=2, weights_of="y")),
        r"s: codebooks is 2, but 'y' \(weights_of\) has 3",
    ),
    "the weights of an op with exponents": (
        lambda: with_extra_op(Linear(y="s", x="x", out="acc", group=GROUP, weights_of="y")),
        r"s: codebooks is 0, but 'y' \(weights_of\) has 3",
    ),
    "version 1": (
        lambda: Program(msgspec.structs.replace(linear_with(WEIGHTS).header, version=1), linear_with(WEIGHTS).constants),
        "format version 1, but linear ops with a width or codebooks need 2",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_verify_rejects(case: str) -> None:
    make, message = REJECTED[case]
    with pytest.raises(FqvitError, match=message) as caught:
        make().verify()
    assert "\n" not in str(caught.value)


def test_verify_accepts_the_same_weights_without_the_fault() -> None:
    for program in (linear_with(WEIGHTS), odd(), with_field(), with_extra_op(Concat(y="s", xs=("x",)))):
        program.verify()
