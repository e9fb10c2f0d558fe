"""Mutate the recorded calls that build a native engine: the engine rejects or runs them, and never crashes.

Accepted records give the same bits on every instruction set, with and without fusion, on one and on two threads, and codes
stay within their number of bits. See also: records.py (records calls), native/fuzz (a similar fuzzer in C++, with sanitizers).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fqvit import _native
from tests.factories import assert_same
from tests.ir.draw import STYLES, Draw
from tests.ir.test_ops import CASES
from tests.robustness.hostile.records import Recorded, recorded
from tests.runtime.programs import ISAS, program_with
from tests.runtime.test_networks import lowered
from tests.runtime.wide import WIDE, accepted

DTYPES = (np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64)
ENDS = (  # boundary values of shifts, sizes, zero points and multipliers
    0,
    1,
    -1,
    2,
    15,
    16,
    31,
    32,
    62,
    63,
    127,
    128,
    255,
    256,
    2**15,
    2**16 - 1,
    2**28,
    2**29,
    2**30,
    2**31 - 1,
    -(2**31),
    2**40,
)
FAR = (2**58, 2**62, 2**63 - 1, -(2**63))  # boundary values of 64-bit arithmetic
# {op: index of the number of bits among the integers of its record}
BITS = {"linear": 1, "layernorm": 3, "add": 1, "mean": 4, "matmul": 6, "attend": 4}
BITS |= {"log_softmax": 0, "softmax": 2, "shift_matmul": 6}
KINDS = (*(kind.__name__ for kind in CASES), *WIDE, "vit", "padded swin")


@cache
def valid(kind: str, seed: int) -> Recorded:
    """Record a valid program of a kind in KINDS."""
    if kind in ("vit", "padded swin"):
        return recorded(lowered(kind, ("fqvit", "fq-vit", "minmax")[seed % 3])[2])
    by_name = {case.__name__: lambda draw, case=case: (CASES[case](draw),) for case in CASES} | WIDE
    while True:
        draw = Draw(np.random.default_rng(seed), STYLES[seed % 4])
        ops = by_name[kind](draw)
        if accepted(draw, ops):
            return recorded(program_with(draw, *ops)[0])
        seed += 1000


def alter(rng: np.random.Generator, program: Recorded) -> None:
    """Change one record, mostly a late one: the first ones only reshape pixels."""
    late = int(len(program.records) * rng.beta(3, 1))
    record = program.records[late]
    what = rng.integers(0, 10)
    if what < 3 and record.ints:
        i = rng.integers(len(record.ints))
        record.ints[i] = int(rng.choice([record.ints[i] + 1, record.ints[i] - 1, *ENDS, *FAR]))
    elif what < 5 and record.inputs:
        record.inputs[rng.integers(len(record.inputs))] = int(rng.integers(-1, len(program.records) + 2))
    elif what == 5:
        record.tag = str(rng.choice([r.tag for r in program.records if r.tag]))
    elif record.arrays:
        i = rng.integers(len(record.arrays))
        record.arrays[i] = altered(rng, record.arrays[i])
    if rng.integers(0, 20) == 0:
        program.output = int(rng.integers(-1, len(program.records) + 2))


def altered(rng: np.random.Generator, array: Any) -> Any:
    """Change the type, shape or values of an array."""
    what = rng.integers(0, 8)
    array = np.atleast_1d(array)
    if array.size == 0:
        return np.zeros(rng.integers(1, 9), rng.choice(DTYPES)) if what < 4 else array
    if what == 0:
        return array.astype(rng.choice(DTYPES))
    if what == 1:
        return array.reshape(-1)[: rng.integers(0, array.size + 1)]
    if what == 2:
        return array.reshape(array.shape[::-1])
    if what == 3:
        return np.concatenate([array, array[:1]]) if array.ndim else array.reshape(1)
    info = np.iinfo(array.dtype)
    array = array.copy()
    ends = [v for v in (*ENDS, *FAR, info.min, info.max) if info.min <= v <= info.max]
    chosen = np.array(rng.random(array.shape) < rng.choice([0, 0.1, 1]))
    chosen.flat[rng.integers(array.size)] = True
    array[chosen] = rng.choice(ends) if what < 7 else rng.choice(ends, chosen.sum())
    return array


def outcome(program: Recorded, isa: str, threads: int, keep: bool) -> Any:
    """Return the engine, or the message with which it rejects the program."""
    try:
        return program.build(isa, threads, keep)
    except (_native.BadProgram, TypeError) as error:
        return str(error)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_altered_records_are_rejected_or_give_the_same_bits_everywhere(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    program = valid(kind, int(rng.integers(0, 12))).copy()
    for _ in range(rng.integers(1, 3)):
        alter(rng, program)
    kept = outcome(program, "scalar", 1, True)
    if isinstance(kept, str):
        assert all(outcome(program, isa, 1, False) == kept for isa in ISAS), kept
        return
    images = rng.choice([0, 255, 7, 128], (3, *program.image)).astype(np.uint8)
    if rng.integers(0, 2):
        images = rng.integers(0, 256, images.shape, dtype=np.uint8)
    expected = []
    for image in images:
        expected.append(kept.run(image[None])[0])
        codes = {  # values that hold codes; a linear op writes codes if ints[0] is 0
            number: record
            for number, record in enumerate(program.records, 1)
            if record.tag in BITS and not (record.tag == "linear" and record.ints[0] != 0)
        }
        for record, found in zip(codes.values(), kept.buffers(image[None], list(codes)), strict=True):
            assert int(found.max()) < 2 ** record.ints[BITS[record.tag]], record
    for isa in ISAS:
        assert_same(program.build(isa, 2, False).run(images), np.stack(expected), f"{isa}: fused and unfused ops")
        with_all = program.build(isa, 1, True)
        assert_same(with_all.run(images), np.stack(expected), f"{isa}: unfused ops and scalar")


def test_some_altered_programs_are_accepted() -> None:
    """Otherwise the test above would run nothing."""
    count = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        program = valid(KINDS[seed % len(KINDS)], 0).copy()
        alter(rng, program)
        count += not isinstance(outcome(program, "scalar", 1, True), str)
    assert 40 <= count <= 160, count
