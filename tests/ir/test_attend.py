"""Tests of RowCodes, Attend, Lookup with alpha and their sites: faults that verify() rejects, and its overflow proofs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fqvit.errors import FqvitError
from fqvit.ir.attention import Attend, MatMul, RowCodes, ShiftMatMul
from fqvit.ir.kit import NumpyKit, kit
from fqvit.ir.moves import Permute
from fqvit.ir.ops import Lookup
from fqvit.ir.program import Program, Site
from fqvit.ir.value import Proof, Scope, Value
from tests.factories import assert_same, few, many
from tests.ir.slow_ops import attend as slow_attend
from tests.ir.test_verify import HEADS, REGION, SCORES, C, Constants, program_of, with_header

CODES: Constants = {"a.table": np.array([0, 1, 2, 3], np.uint8), "region": REGION}
LEVELS = (8, 4, 2, 0)


def attention(table: Any = None, region: str | None = None, between: tuple[Any, ...] = (), **fields: Any) -> Program:
    """Return a program of scores, RowCodes, the ops `between` and Attend on 2 windows, 2 heads, 2 tokens and 3 channels."""
    attend = Attend(**{"y": "y", "a": "a", "v": "h", "mult": 2**28, "shift": 31, "levels": LEVELS, **fields})
    table = np.array(table, np.uint8) if isinstance(table, list) else table
    constants = CODES if table is None else CODES | {"a.table": table}
    return program_of([HEADS, SCORES, RowCodes(y="a", x="s", region=region), *between, attend], constants, output="x")


def lookup(table: Any, alpha: Any, zeros: tuple[int, ...] = (3, 7), bits: int = 8) -> Program:
    op = Lookup(y="y", x="x", alpha="alpha", y_zero=zeros, bits=bits)
    return program_of([op], {"y.table": np.asarray(table), "alpha": np.asarray(alpha)})


TABLE, ALPHA = np.zeros(256, np.int16), np.array([0, 1, 0, 1, 1, 0], np.uint8)
WIDE = MatMul(y="w", a="h", b="h", mult=1, shift=1, bits=16)
MOVED = Permute(y="p", x="a", view=(2, 2, 2, 2), perm=(0, 1, 2, 3))

REJECTED: dict[str, tuple[Callable[[], Program], str]] = {
    "more codes than levels": (lambda: attention(levels=(8, 4, 2)), "y: 3 levels for codes up to 3"),
    "no levels, and rows without the code 255": (lambda: attention(levels=()), "y: a row of 'a' may lack the largest weight"),
    "257 levels": (lambda: attention(levels=(8, *range(256))), "y: 257 levels"),
    "a negative level": (lambda: attention(levels=(8, -4, 2, 0)), r"y: levels must be in 0\.\.2\^15"),
    "only levels of 0": (lambda: attention(levels=(0, 0, 0, 0)), r"y: levels must be in 0\.\.2\^15"),
    "a level above 2^15": (lambda: attention(levels=(2**15 + 1, 4, 2, 0)), r"y: levels must be in 0\.\.2\^15"),
    "a level of 10^40": (lambda: attention(levels=(10**40, 4, 2, 0)), r"y: levels must be in 0\.\.2\^15"),
    "a largest level that rows may lack": (
        lambda: attention(levels=(4, 8, 2, 0)),
        "y: a row of 'a' may lack the largest weight",
    ),
    "a largest level that no code reaches": (lambda: attention(levels=(8, 4, 2, 0, 9)), "y: a row of 'a' may lack"),
    "a table whose first code does not have the largest weight": (
        lambda: attention([1, 0, 2, 3]),
        "y: a row of 'a' may lack the largest weight",
    ),
    "codes that row_codes did not write": (lambda: attention(a="s", levels=()), "y: a row of 's' may lack the largest weight"),
    "codes that were permuted": (lambda: attention(between=(MOVED,), a="p"), "y: a row of 'p' may lack the largest weight"),
    "a mask code whose weight is not 0": (
        lambda: attention(region="region", levels=(8, 4, 2, 1)),
        "y: 'a' is masked by a code whose weight is not 0",
    ),
    "a table without a mask code": (lambda: attention([0, 3, 1], "region"), "y: 'a' is masked by a code whose weight is not 0"),
    "a mask code of largest weight": (
        lambda: attention([0], "region"),
        "y: 'a' is masked by a code whose weight is not 0",
    ),
    "a mult of 2^29": (lambda: attention(mult=2**29), "y: mult must be in"),
    "a negative mult": (lambda: attention(mult=-1), "y: mult must be in"),
    "a mult of 10^40": (lambda: attention(mult=10**40), "y: mult must be in"),
    "shift 0": (lambda: attention(shift=0), "y: shift must be in"),
    "shift 63": (lambda: attention(shift=63), "y: shift must be in"),
    "a zero point of V beyond 16 bits": (lambda: attention(v_zero=2**16), "y: zero point outside"),
    "a negative zero point of V": (lambda: attention(v_zero=-1), "y: zero point outside"),
    "a zero point that is not a code": (lambda: attention(y_zero=256), "y: y_zero is outside"),
    "17 bits": (lambda: attention(bits=17), "y: bits is 17"),
    "a V without heads": (lambda: attention(v="x"), "y: 'x' has shape"),
    "a V of 16 bits": (lambda: attention(between=(WIDE,), v="w"), "y: 'w' is u16, expected u8"),
    "a signed table": (lambda: attention(np.array([0, 1], np.int8)), "a: constant 'a.table' is int8"),
    "an int32 table": (lambda: attention(np.array([0, 1], np.int32)), "a: constant 'a.table' is int32"),
    "an empty table": (lambda: attention(np.zeros(0, np.uint8)), "a: constant 'a.table' has shape"),
    "a table of two axes": (lambda: attention(np.zeros((1, 4), np.uint8)), "a: constant 'a.table' has shape"),
    "regions that are missing": (lambda: attention(region="none"), "a: constant 'none' is missing"),
    "regions of the wrong shape": (lambda: attention(region="a.table"), "a: constant 'a.table' has shape"),
    "row codes of a buffer without heads": (lambda: program_of([RowCodes(y="a", x="x")], CODES), "a: 'x' has shape"),
    "row codes read as log2 codes of the wrong number of bits": (
        lambda: program_of([HEADS, SCORES, RowCodes(y="a", x="s"), ShiftMatMul(y="y", a="a", v="h", mult=1, shift=1)], CODES),
        "y: 'a' holds codes up to 3",
    ),
    "fewer zero points than values of alpha": (lambda: lookup(TABLE, ALPHA * 2), "y: 2 zero points, expected 3"),
    "alpha above 15": (lambda: lookup(TABLE, ALPHA * 16), "y: constant 'alpha' has a shift above 15"),
    "alpha for the wrong number of channels": (lambda: lookup(TABLE, ALPHA[1:]), "y: constant 'alpha' has shape"),
    "alpha as uint16": (lambda: lookup(TABLE, ALPHA.astype(np.uint16)), "y: constant 'alpha' is uint16"),
    "alpha with a table of codes": (lambda: lookup(TABLE.astype(np.uint8), ALPHA), "y: constant 'y.table' is uint8"),
    "alpha with a table that is too short": (lambda: lookup(TABLE[:255], ALPHA), "y: constant 'y.table' has shape"),
    "a zero point of a table that is not a code": (lambda: lookup(TABLE, ALPHA, (3, 256)), r"y: y_zero is outside 0\.\.255"),
    "a negative zero point": (lambda: lookup(TABLE, ALPHA, (-1, 3)), r"y: y_zero is outside 0\.\.255"),
    "codes of 17 bits": (lambda: lookup(TABLE, ALPHA, bits=17), "y: bits is 17"),
    "a table that could overflow": (
        lambda: lookup(np.full(256, 2**31 - 1, np.int32), ALPHA),
        "y: y before its clamp can reach",
    ),
    "a signed table without alpha": (
        lambda: program_of([Lookup(y="y", x="x")], {"y.table": TABLE}),
        "y: constant 'y.table' is int16",
    ),
    "a missing alpha": (
        lambda: program_of([Lookup(y="y", x="x", alpha="k", y_zero=(0,))], {"y.table": TABLE}),
        "y: constant 'k' is",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_verify_rejects(case: str) -> None:
    make, message = REJECTED[case]
    with pytest.raises(FqvitError, match=f"^{message}") as caught:
        make().verify()
    assert "\n" not in str(caught.value)


def test_verify_accepts_the_same_programs_without_the_fault() -> None:
    attention().verify()
    attention(region="region").verify()
    attention(mult=0).verify()
    attention(levels=(8, 8, 8, 8)).verify()  # all weights equal: the plain mean
    attention([0], None).verify()
    attention([255, 7, 0], "region", levels=()).verify()
    lookup(TABLE, ALPHA).verify()


STEPS: Constants = {
    "steps": np.full(C, 9, np.uint16),
    "some": np.array([1, 0] * 3, np.uint16),
    "zeros": np.zeros(C, np.uint8),
    "short": np.zeros(C - 1, np.uint8),
}
SITES = {
    "missing steps": (Site("norm", 8, (0.5,), (3,), steps="none"), "constant 'none' is missing"),
    "steps of 8 bits": (Site("norm", 8, (0.5,), (3,), steps="zeros"), "constant 'zeros' is uint8"),
    "a step of 0": (Site("norm", 8, (0.5,), (3,), steps="some"), "constant 'some' has a step of 0"),
    "two scales": (Site("norm", 8, (0.5, 1.0), (3,), steps="steps"), "2 scales with steps for 6 channels, expected 1, or 3"),
    "no scale": (Site("norm", 8, (), (3,), steps="steps"), "0 scales with steps for 6 channels, expected 1, or 3"),
    "no zero point": (Site("norm", 8, (0.5,), (), steps="steps"), "0 zero points"),
    "four zero points": (Site("norm", 8, (0.5,), (1, 2, 3, 4), steps="steps"), "4 zero points for 6 channels"),
    "missing zero points": (Site("norm", 8, (0.5,), "none", steps="steps"), "constant 'none' is missing"),
    "zero points for five channels": (
        Site("norm", 8, (0.5,), "short", steps="steps"),
        "constant 'short' has shape",
    ),
    "named zero points without steps": (
        Site("norm", 8, (0.5,) * 5, "zeros"),
        "zero names a constant, but there are no steps",
    ),
    "a constant with a name of one letter": (Site("norm", 8, (0.5,), "z"), "zero names a constant, but there are no steps"),
    "too few levels": (Site("attention", 8, levels=(1, 0)), "2 levels for codes up to 255"),
    "only levels of 0": (Site("attention", 8, levels=(0,) * 256), "no level above 0"),
    "levels and steps": (Site("attention", 8, (0.5,), (3,), steps="none", levels=(1,) * 256), "more than one of log2"),
    "levels and log2": (Site("attention", 8, log2=True, levels=(1,) * 256), "more than one of log2"),
}


@pytest.mark.parametrize("case", SITES)
def test_verify_rejects_a_site_with(case: str) -> None:
    site, message = SITES[case]
    with pytest.raises(FqvitError, match=f"^site x: {message}"):
        with_header(program_of([], STEPS), sites={"x": site}).verify()


@pytest.mark.parametrize("zero, zeros", [((3,), [3] * C), ((1, 2, 3), [1, 1, 2, 2, 3, 3]), ("zeros", [0] * C)])
def test_a_site_with_steps_has_one_scale_and_one_zero_point_per_channel(zero: Any, zeros: list[int]) -> None:
    site = Site("norm", 8, (0.5,), zero, steps="steps")
    with_header(program_of([], STEPS), sites={"x": site}).verify()
    scale, found = site.scales_and_zeros(STEPS)
    assert scale.tolist() == [4.5] * C and found.tolist() == zeros


def test_a_site_survives_json() -> None:
    for site in (Site("qkv", 8, (0.5,), "zeros", steps="steps"), Site("attention", 4, levels=LEVELS)):
        assert msgspec.json.decode(msgspec.json.encode(site), type=Site) == site


@many
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 5, 40]), st.sampled_from([255, 65535]), st.booleans())
def test_every_row_has_the_code_of_distance_0_and_other_regions_are_masked(
    seed: int, entries: int, last: int, masked: bool
) -> None:
    """Attend relies on these two properties of RowCodes, for any scores and any table."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, rng.choice([1, 30, last + 1]), (2, 3, 2, 7, 7)).astype(np.uint8 if last == 255 else np.uint16)
    table, region = rng.integers(0, 256, entries).astype(np.uint8), rng.integers(0, 3, (3, 7)).astype(np.uint8)
    op = RowCodes(y="y", x="x", region="region" if masked else None)
    arrays = {"x": x, "y.table": table, "region": region}
    known = Value("u8" if last == 255 else "u16", x.shape[1:], 0, last)
    value, _ = op.infer(Scope({"x": known}, arrays, "y"))
    codes = op.run(NumpyKit(), arrays.__getitem__)
    assert (codes == value.row_code).any(-1).all() and codes.max() <= value.hi
    assert (value.mask_code is None) == (not masked)
    if masked:
        elsewhere = (region[:, :, None] != region[:, None, :])[None, :, None]
        assert (codes[np.broadcast_to(elsewhere, codes.shape)] == value.mask_code).all()


def proved(op: Attend, tokens: int, **known: Any) -> list[Proof]:
    """Return the proofs of an Attend with rows of `tokens` tokens. known: further facts about its codes."""
    values = {"a": Value("u8", (1, 1, tokens), 0, 255, **known), "v": Value("u8", (1, tokens, 1), 0, 255)}
    return op.infer(Scope(values, {}, "y"))[1]


# The largest numbers of tokens T with 255 * T * L < 2^31, if the largest level L is 2^15 and if it is 255.
LIMITS = {"2^15": (257, (2**15,) + (0,) * 255, 0), "8 bits": (33025, (), 255)}


@pytest.mark.parametrize("case", LIMITS)
@pytest.mark.parametrize("v_zero", [0, 255])
def test_the_longest_accepted_row_reaches_its_bound_and_one_more_token_is_rejected(case: str, v_zero: int) -> None:
    tokens, levels, row_code = LIMITS[case]
    op = Attend(y="y", a="a", v="v", mult=2**29 - 1, shift=62, levels=levels, v_zero=v_zero, y_zero=2**15, bits=16)
    acc = proved(op, tokens, row_code=row_code)[0]
    largest = max(levels, default=255)
    assert acc.what == "acc" and acc.bound == 255 * tokens * largest < 2**31
    assert not proved(op, tokens + 1, row_code=row_code)[0].holds
    # All weights are the largest, and all values are as far from the zero point as possible.
    arrays = {
        "a": np.full((1, 1, 1, tokens), row_code, np.uint8),
        "v": np.full((1, 1, tokens, 1), 255 - v_zero, np.uint8),
    }
    expected = slow_attend(op, {name: x[0] for name, x in arrays.items()}.__getitem__)
    for library in ("numpy", "torch"):
        with_kit = kit(library)
        got = op.run(with_kit, {name: with_kit.asarray(x) for name, x in arrays.items()}.__getitem__)
        assert_same(with_kit.numpy(got)[0], expected, library)


@few
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 9, 257]), st.sampled_from([0, 1, 2**28, 2**29 - 1]), st.booleans())
def test_the_proofs_of_attend_hold_for_any_weights(seed: int, tokens: int, mult: int, extreme: bool) -> None:
    rng = np.random.default_rng(seed)
    levels = np.where(rng.random(256) < 0.5, rng.integers(0, 2**15 + 1, 256), 0)
    levels[0] = 2**15
    v_zero, shift = int(rng.choice([0, 100, 255])), int(rng.integers(1, 63))
    op = Attend(y="y", a="a", v="v", mult=mult, shift=shift, levels=tuple(levels.tolist()), v_zero=v_zero)
    bounds = {proof.what: proof for proof in proved(op, tokens, row_code=0)}
    assert all(proof.holds for proof in bounds.values())
    weights = levels[rng.integers(0, 256, tokens) * (rng.random(tokens) < rng.random())]
    weights[0] = 2**15
    v = rng.choice([0, 255], tokens) if extreme else rng.integers(0, 256, tokens)
    for values in (v, np.where(v > v_zero, 255, v_zero), np.where(v < v_zero, 0, v_zero)):
        acc = sum(int(w) * (int(x) - v_zero) for w, x in zip(weights, values, strict=True))
        total = int(weights.sum())
        numerator = mult * 2**15 + total // 2
        row = numerator // total
        assert abs(acc) <= bounds["acc"].bound and numerator <= bounds["M numerator"].bound
        assert row <= mult < 2**29  # a kernel may store the multiplier of a row in 32 bits
        assert abs(acc * row) + 2 ** (shift - 1) <= bounds["y before its shift"].bound
