"""Mutate programs: the native engine rejects or runs them, and never crashes.

Every instruction set rejects the same files with the same message. Accepted programs give the same bits on every instruction
set, with and without fusion, on one and on two threads, and codes stay within their number of bits. See also:
tests/robustness/fuzz (compares with Python's loader and the reference), native/fuzz (a similar fuzzer in C++, with sanitizers).
"""

from __future__ import annotations

import json
import random
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fqvit import _native
from fqvit.ir.file import PROGRAM, container
from fqvit.ir.program import Program, encode_header
from tests.factories import assert_same
from tests.ir.draw import STYLES, Draw
from tests.ir.test_ops import CASES
from tests.robustness.fuzz.mutate import Seed, mutated
from tests.runtime.programs import ISAS, program_with
from tests.runtime.test_networks import lowered
from tests.runtime.wide import WIDE, accepted

KINDS = (*(kind.__name__ for kind in CASES), *WIDE, "vit", "padded swin")
# {op: the default number of bits of its codes}
BITS = {"linear": 8, "layernorm": 8, "add": 8, "mean": 8, "matmul": 8, "attend": 8, "log_softmax": 4, "softmax": 8}
BITS |= {"shift_matmul": 8, "multiply": 8, "rotary": 8, "depthwise": 8}
MOST_BYTES = 8 << 20  # programs with larger buffers are loaded but not run


@cache
def valid(kind: str, seed: int) -> Seed:
    """Make a valid file of a kind in KINDS."""
    if kind in ("vit", "padded swin"):
        return written(lowered(kind, ("fqvit", "fq-vit", "minmax")[seed % 3])[2])
    by_name = {case.__name__: lambda draw, case=case: (CASES[case](draw),) for case in CASES} | WIDE
    while True:
        draw = Draw(np.random.default_rng(seed), STYLES[seed % 4])
        ops = by_name[kind](draw)
        if accepted(draw, ops):
            return written(program_with(draw, *ops)[0])
        seed += 1000


def written(program: Program) -> Seed:
    return Seed.of(container(PROGRAM, encode_header(program.header), program.fingerprint(), program.constants))


def outcome(raw: bytes, isa: str, threads: int, keep: bool) -> _native.Model | str:
    """Return the loaded program, or the message with which it is rejected."""
    try:
        return _native.load_memory(raw, threads, isa, keep, 2**62)
    except _native.BadProgram as error:
        return str(error)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_mutated_programs_are_rejected_or_give_the_same_bits_everywhere(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    raw = mutated(rng, valid(kind, rng.randrange(12)))
    kept = outcome(raw, "scalar", 1, True)
    if isinstance(kept, str):
        assert all(outcome(raw, isa, 1, False) == kept for isa in ISAS), kept
        return
    header = json.loads(kept.header)
    shape = (header.get("input") or {}).get("shape") or [header["preprocess"][axis] for axis in ("height", "width", "channels")]
    if kept.run_bytes > MOST_BYTES:
        assert not any(isinstance(outcome(raw, isa, 2, False), str) for isa in ISAS)
        return
    images = np.random.default_rng(seed).choice([0, 255, 7, 128], (3, *shape)).astype(np.uint8)
    if rng.randrange(2):
        images = np.random.default_rng(seed).integers(0, 256, images.shape, dtype=np.uint8)
    codes = [op for op in header["ops"] if op["op"] in BITS and op.get("out", "codes") == "codes"]
    expected = []
    for image in images:
        expected.append(kept.run(image[None], False)[0][0])
        for op, found in zip(codes, kept.buffers(image[None], [op["y"] for op in codes]), strict=True):
            assert int(found.max()) < 2 ** op.get("bits", BITS[op["op"]]), op
    for isa in ISAS:
        for threads, keep in ((2, False), (1, True)):
            model = outcome(raw, isa, threads, keep)
            assert not isinstance(model, str), model
            assert_same(
                model.run(images, False)[0], np.stack(expected), f"{isa}: {'unfused' if keep else 'fused'} ops and scalar"
            )


def test_some_mutated_programs_are_accepted() -> None:
    """Otherwise the test above would run nothing."""
    count = 0
    for seed in range(200):
        rng = random.Random(seed)
        count += not isinstance(outcome(mutated(rng, valid(KINDS[seed % len(KINDS)], 0)), "scalar", 1, True), str)
    assert 40 <= count <= 160, count
