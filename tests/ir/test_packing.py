"""Tests of packed weights: packing, the Linear that stores them, and the constants that verify() rejects."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fqvit.errors import FqvitError
from fqvit.ir.moves import Concat
from fqvit.ir.ops import Add, Linear, Term
from fqvit.ir.packing import pack_codes, unpack_codes
from fqvit.ir.program import Program
from fqvit.runtime.reference import Reference, run
from tests.factories import assert_same, few, many
from tests.ir.exponents import pack, unpack
from tests.ir.test_verify import C, T, linear_parts, program_of

GROUP = 4  # for C = 6 inputs: the second group has only 2


def random_weights(rng: np.random.Generator, outputs: int, inputs: int, group: int) -> tuple[Any, Any]:
    """Return w i8 [O, K] and exponent u8 [O, G], including the extremes of both."""
    exponent = rng.integers(0, 5, (outputs, -(-inputs // group)), dtype=np.uint8)
    codes = rng.choice(np.array([-8, -7, -1, 0, 1, 7, int(rng.integers(-8, 8))]), (outputs, inputs))
    return (codes * 2 ** exponent[:, np.arange(inputs) // group].astype(np.int64)).astype(np.int8), exponent


@many
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 70), st.integers(2, 40))
def test_unpack_inverts_pack(seed: int, outputs: int, inputs: int, group: int) -> None:
    w, exponent = random_weights(np.random.default_rng(seed), outputs, inputs, group)
    codes, exponents = pack(w, exponent, group)
    assert codes.dtype == exponents.dtype == np.uint8
    assert codes.shape == (outputs, (inputs + 1) // 2) and exponents.shape == (outputs, (exponent.shape[1] + 1) // 2)
    again = unpack(codes, exponents, inputs, group)
    assert again.dtype == np.int8
    assert_same(again, w, "unpacked weights")


def test_even_columns_are_in_low_nibbles_and_the_padding_nibble_is_0() -> None:
    w = np.array([[1, -1, 7, -8, 3 * 16]], np.int8)
    codes, exponents = pack(w, np.array([[0, 0, 4]], np.uint8), 2)
    assert codes.tolist() == [[0xF1, 0x87, 0x03]] and exponents.tolist() == [[0x00, 0x04]]


def test_unpack_and_pack_are_inverse_for_all_codes_and_exponents() -> None:
    """One row per byte of codes and pair of exponents: 256 x 25. Each nibble fills one group of two weights."""
    rows = [(byte, low, high) for byte in range(256) for low in range(5) for high in range(5)]
    codes = np.array([[byte & 15 | (byte & 15) << 4, byte >> 4 | (byte >> 4) << 4] for byte, _, _ in rows], np.uint8)
    exponents = np.array([[low + 16 * high] for _, low, high in rows], np.uint8)
    w = unpack(codes, exponents, 4, 2)
    signed = [*range(8), *range(-8, 0)]  # the value of each nibble
    for found, (byte, low, high) in zip(w.tolist(), rows, strict=True):
        a, b = signed[byte % 16] * 2**low, signed[byte // 16] * 2**high
        assert found == [a, a, b, b], (byte, low, high)
    unpacked_exponents = np.stack([exponents[:, 0] & 15, exponents[:, 0] >> 4], 1)
    again, same = pack(w, unpacked_exponents, 2)
    assert_same(again, codes, "codes")
    assert_same(same, exponents, "exponents")


@many
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 70), st.integers(2, 40), st.integers(2, 7))
def test_unpack_inverts_pack_at_every_width(seed: int, outputs: int, inputs: int, group: int, width: int) -> None:
    rng, half = np.random.default_rng(seed), 2 ** (width - 1)
    codes = rng.integers(-half, half, (outputs, inputs), dtype=np.int8)
    packed = pack_codes(codes, width)
    assert packed.dtype == np.uint8 and packed.shape == (outputs, -(-inputs * width // 8))
    assert_same(unpack_codes(packed, inputs, width), codes, "unpacked weights")
    for row, one in zip(packed, codes, strict=True):  # a row is one number; its least significant bits are the first code
        number = int.from_bytes(row.tobytes(), "little")
        assert number == sum((int(code) % 2**width) << width * k for k, code in enumerate(one))
    exponent = rng.integers(0, 9 - width, (outputs, -(-inputs // group)), dtype=np.uint8)
    w = codes * (1 << exponent[:, np.arange(inputs) // group]).astype(np.int8)
    assert_same(unpack(*pack(w, exponent, group, width), inputs, group, width), w, "weights in groups")


def test_four_6_bit_codes_fill_three_bytes() -> None:
    """The example of docs/reference/format.md."""
    assert pack_codes(np.array([[1, -1, 31, -32, 5]], np.int8), 6).tolist() == [[0xC1, 0xFF, 0x81, 0x05]]


def test_all_6_bit_codes_unpack_at_every_place() -> None:
    codes = np.array([[np.roll(np.arange(-32, 32), place) for place in range(4)]], np.int8).reshape(4, 64)
    assert_same(unpack_codes(pack_codes(codes, 6), 64, 6), codes, "codes")


def test_the_extremes_of_int8_unpack() -> None:
    assert unpack(np.array([[0x78]], np.uint8), np.array([[4]], np.uint8), 2, 2).tolist() == [[-128, 112]]


@pytest.mark.parametrize("w, exponent", [(3, 1), (8, 0), (-9, 0), (32, 5)])
def test_pack_asserts_that_weights_are_codes_times_powers_of_two(w: int, exponent: int) -> None:
    with pytest.raises(AssertionError):
        pack(np.full((1, 2), w, np.int8), np.full((1, 1), exponent, np.uint8), 2)


def packed_linear(w: Any, exponent: Any, group: int = GROUP, /, **changes: Any) -> Program:
    """Return a program with one packed Linear on 4 tokens of 6 channels; changes replace its constants, None removes one."""
    codes, exponents = pack(w, exponent, group)
    parts = linear_parts("y", len(w)) | {"y.w": codes, "y.exponent": exponents}
    parts |= {f"y.{name}": array for name, array in changes.items() if array is not None}
    for name in (name for name, array in changes.items() if array is None):
        del parts[f"y.{name}"]
    return program_of([Linear(y="y", x="x", out="acc", group=group), Concat(y="z", xs=("x",))], parts)


def some_weights(seed: int = 0, group: int = GROUP) -> tuple[Any, Any]:
    return random_weights(np.random.default_rng(seed), 5, C, group)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@few
@given(seed=st.integers(0, 2**32 - 1), group=st.integers(2, 9), pixels=st.sampled_from(["random", 0, 255]))
def test_a_packed_linear_multiplies_by_its_unpacked_weights(library: Any, seed: int, group: int, pixels: Any) -> None:
    rng = np.random.default_rng(seed)
    w, exponent = random_weights(rng, 5, C, group)
    if seed % 3 == 0:
        w, exponent = np.full_like(w, (112, -128)[seed % 2]), np.full_like(exponent, 4)
    program = packed_linear(w, exponent, group)
    shape = (2, 4, 2, 3)
    images = rng.integers(0, 256, shape, dtype=np.uint8) if pixels == "random" else np.full(shape, pixels, np.uint8)
    seen: dict[str, Any] = {}
    Reference(program, library).run(images, lambda name, x: seen.update({name: x.copy()}))
    expected = images.reshape(2, T, C).astype(np.int64) @ w.T.astype(np.int64) + program.constants["y.bias"]
    assert_same(seen["y"], expected, "accumulators")


def test_packed_and_plain_weights_give_the_same_ops_and_proofs() -> None:
    w, exponent = some_weights()
    program = packed_linear(w, exponent)
    plain = program_of([Linear(y="y", x="x", out="acc"), Concat(y="z", xs=("x",))], linear_parts("y") | {"y.w": w})
    assert program.unpacked().ops == plain.ops and program.unpacked().constants.keys() == plain.constants.keys()
    assert program.verify() == plain.verify() == program.unpacked().verify()
    assert program.fingerprint() != plain.fingerprint()


def test_unpacked_leaves_programs_without_packed_weights_unchanged() -> None:
    plain = program_of([Linear(y="y", x="x")], linear_parts("y"))
    assert plain.unpacked().fingerprint() == plain.fingerprint()


def test_the_reference_unpacks_weights_and_leaves_the_program_packed() -> None:
    program = packed_linear(*some_weights())
    reference = Reference(program)
    assert reference.constants["y.w"].dtype == np.int8 and "y.exponent" not in reference.constants
    assert reference.program is program and program.constants["y.w"].dtype == np.uint8


def test_a_linear_without_group_ignores_exponents() -> None:
    parts = linear_parts("y")
    plain = program_of([Linear(y="y", x="x")], parts)
    # A constant that no op reads is ignored.
    stray = program_of([Linear(y="y", x="x")], parts | {"y.exponent": np.full((1, 1), 255, np.uint8)})
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 2, 3), dtype=np.uint8)
    assert_same(run(stray, images), run(plain, images), "codes")
    assert b"group" not in msgspec.json.encode(plain.ops)


W, EXPONENT = some_weights()
ZERO_CODES = np.zeros((5, 3), np.uint8)
ODD = Linear(y="odd", x="t", out="acc", group=2)  # 5 inputs, 3 groups: both constants have a padding nibble
ODD_INPUT = Linear(y="t", x="x")
ODD_PARTS = {"odd.w": ZERO_CODES, "odd.exponent": np.zeros((5, 2), np.uint8), "odd.bias": np.zeros(5, np.int32)}


def odd(**changes: Any) -> Program:
    parts = linear_parts("t", 5) | ODD_PARTS | {f"odd.{name}": array for name, array in changes.items()}
    return program_of([ODD_INPUT, ODD], parts, output="t")


def with_group(group: Any) -> Program:
    program = packed_linear(W, EXPONENT)
    ops = tuple(msgspec.structs.replace(op, group=group) if isinstance(op, Linear) else op for op in program.ops)
    return Program(msgspec.structs.replace(program.header, ops=ops), program.constants)


def with_extra_op(op: Any) -> Program:
    program = packed_linear(W, EXPONENT)
    return Program(msgspec.structs.replace(program.header, ops=(*program.ops, op)), program.constants)


def changed(**constants: Any) -> Program:
    return packed_linear(W, EXPONENT, **constants)


PADDED = ZERO_CODES.copy()
PADDED[3, 2] = 0x10
REJECTED: dict[str, tuple[Any, str]] = {
    "exponent 5": (lambda: changed(exponent=np.full((5, 1), 0x05, np.uint8)), "'y.exponent' has exponent 5"),
    "exponent 15": (
        lambda: changed(exponent=np.full((5, 1), 0xF0, np.uint8)),
        "exponent 15, expected 0 to 4",
    ),
    "no exponents": (lambda: changed(exponent=None), "y: constant 'y.exponent' is missing"),
    "no codes": (lambda: changed(w=None), "y: constant 'y.w' is missing"),
    "int8 weights with a group": (lambda: changed(w=W), "'y.w' is int8, expected u8"),
    "int8 weights in the packed shape": (
        lambda: changed(w=ZERO_CODES.astype(np.int8)),
        "'y.w' is int8, expected u8",
    ),
    "signed exponents": (lambda: changed(exponent=np.zeros((5, 1), np.int8)), "is int8, expected u8"),
    "one byte per code": (lambda: changed(w=np.zeros((5, C), np.uint8)), "'y.w' has shape"),
    "codes for fewer inputs": (lambda: changed(w=np.zeros((5, 2), np.uint8)), "'y.w' has shape"),
    "one byte per exponent": (lambda: changed(exponent=np.zeros((5, 2), np.uint8)), "'y.exponent' has shape"),
    "one row of exponents": (lambda: changed(exponent=np.zeros((1, 1), np.uint8)), "'y.exponent' has shape"),
    "flat exponents": (lambda: changed(exponent=np.zeros(5, np.uint8)), "'y.exponent' has shape"),
    "no outputs": (lambda: changed(w=np.zeros((0, 3), np.uint8)), "'y.w' has shape"),
    "a nonzero padding code": (lambda: odd(w=PADDED), "odd: constant 'odd.w' has a padding bit that is not 0"),
    "a nonzero padding exponent": (
        lambda: odd(exponent=np.full((5, 2), 0x10, np.uint8)),
        "odd: constant 'odd.exponent' has a padding bit that is not 0",
    ),
    "group 1": (lambda: with_group(1), "y: group is 1, expected 0 or 2 to 65536"),
    "group -4": (lambda: with_group(-4), "y: group is -4"),
    "group 65537": (lambda: with_group(2**16 + 1), "y: group is 65537"),
    "group 10^30": (lambda: with_group(10**30), "y: group is 10+, expected"),
    "packed weights without a group": (lambda: with_group(0), "'y.w' is uint8, expected i8"),
    "packed weights as an operand": (
        lambda: with_extra_op(Add(y="s", terms=(Term(x="x", mult=1), Term(x="y.w", mult=1)), shift=1)),
        "s: reads 'y.w'",
    ),
    "exponents as an operand": (
        lambda: with_extra_op(Concat(y="s", xs=("x", "y.exponent"))),
        "s: reads 'y.exponent'",
    ),
}


def narrow(width: int, w: Any = None, group: int = 0) -> Program:
    """Return a program whose Linear has weights of `width` bits. w: its constant; None: valid zeros"""
    parts = linear_parts("y") | {"y.w": np.zeros((5, -(-C * max(width, 1) // 8)), np.uint8) if w is None else w}
    return program_of([Linear(y="y", x="x", width=width, group=group), Concat(y="z", xs=("x",))], parts)


REJECTED |= {
    "width 1": (lambda: narrow(1), "y: width is 1, expected 0 or 2 to 7"),
    "width 8": (lambda: narrow(8), "y: width is 8"),
    "width -6": (lambda: narrow(-6), "y: width is -6"),
    "width 10^30": (lambda: narrow(6, group=0) and narrow(10**30, np.zeros((5, 5), np.uint8)), "y: width is 10+"),
    "int8 weights with a width": (lambda: narrow(6, W), "'y.w' is int8, expected u8"),
    "6-bit codes for more inputs": (lambda: narrow(6, np.zeros((5, 6), np.uint8)), "'y.w' has shape"),
    "a nonzero padding bit": (lambda: narrow(6, np.full((5, 5), 0x10, np.uint8)), "'y.w' has a padding bit that is not 0"),
    "a width with a group but no exponents": (lambda: narrow(6, group=2), "constant 'y.exponent' is missing"),
    "a width in version 1": (
        lambda: Program(msgspec.structs.replace(narrow(6).header, version=1), narrow(6).constants),
        "format version 1, but linear ops with a width or codebooks need 2",
    ),
}


@pytest.mark.parametrize("width", range(2, 8))
def test_verify_accepts_every_width(width: int) -> None:
    program = narrow(width)
    program.verify()
    (op,) = (op for op in program.unpacked().ops if isinstance(op, Linear))
    assert op.width == 0 and program.header.version == 2 and program.unpacked().constants["y.w"].shape == (5, C)


@pytest.mark.parametrize("case", REJECTED)
def test_verify_rejects_packed_weights_with(case: str) -> None:
    make, message = REJECTED[case]
    with pytest.raises(FqvitError, match=message) as caught:
        make().verify()
    assert "\n" not in str(caught.value)


def test_verify_accepts_the_same_weights_without_the_fault() -> None:
    for program in (packed_linear(W, EXPONENT), odd(), with_group(GROUP), with_extra_op(Concat(y="s", xs=("x",)))):
        program.verify()


@pytest.mark.parametrize("group", [2, 2**16])
def test_the_smallest_and_the_largest_group_are_accepted(group: int) -> None:
    packed_linear(np.ones((5, C), np.int8), np.zeros((5, -(-C // group)), np.uint8), group).verify()


def test_overflow_proofs_use_the_unpacked_weights() -> None:
    w, exponent = np.full((5, C), -128, np.int8), np.full((5, 2), 4, np.uint8)
    bound = 128 * 255 * C
    near = np.full(5, bound - 2**31 + 1, np.int32)
    packed_linear(w, exponent, bias=near).verify()
    with pytest.raises(FqvitError, match=f"y: acc can reach {2**31}, which does not fit 31 bits"):
        packed_linear(w, exponent, bias=near - 1).verify()
