"""Every op of the native engine matches the reference bit for bit on every instruction set, for random and extreme inputs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fqvit.ir.value import Scope
from fqvit.runtime.reference import run
from tests.ir.draw import STYLES, Draw
from tests.ir.test_ops import CASES
from tests.runtime.programs import compare_with_reference, program_with
from tests.runtime.wide import accepted
from tests.runtime.wide_moves import EVERY_WIDE


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), style=st.sampled_from(STYLES))
def test_every_op_matches_the_reference(kind: type, seed: int, style: str) -> None:
    draw = Draw(np.random.default_rng(seed), style)
    op = CASES[kind](draw)
    if not all(proof.holds for proof in op.infer(Scope(draw.values, draw.constants, op.y))[1]):
        return  # verify() rejects it, so its result is undefined
    compare_with_reference(*program_with(draw, op), f"{op}", 1 + seed % 3)


@pytest.mark.parametrize("kind", EVERY_WIDE)
@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), style=st.sampled_from(STYLES))
def test_vector_sized_ops_match_the_reference_with_and_without_fusion(kind: str, seed: int, style: str) -> None:
    draw = Draw(np.random.default_rng(seed), style)
    ops = EVERY_WIDE[kind](draw)
    if accepted(draw, ops):
        compare_with_reference(*program_with(draw, *ops), f"{ops}", 1 + seed % 3)


@pytest.mark.parametrize("kind", [kind for kind in EVERY_WIDE if "last bits" not in kind])
def test_most_vector_sized_cases_are_accepted_and_use_many_codes(kind: str) -> None:
    verified, varied = 0, 0
    for seed in range(60):
        draw = Draw(np.random.default_rng(seed), "random")
        ops = EVERY_WIDE[kind](draw)
        if accepted(draw, ops):
            verified += 1
            program, images = program_with(draw, *ops)
            varied += len(np.unique(run(program, images))) > 2
    assert verified >= 40 and varied >= 15, f"of 60 cases, {verified} were accepted and {varied} use more than two codes"
