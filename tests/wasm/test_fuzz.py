"""Test that the WebAssembly modules accept and reject the same files as the native library. `make fuzz-wasm` tries more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wasm.campaign import campaign, judge_program
from tests.wasm.node import ROOT, VARIANTS, Node

SEEDS = sorted((ROOT / "native" / "fuzz" / "seeds").iterdir())


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_seeds_of_the_fuzzer_give_the_same_bits_as_the_native_library(variant: str, tmp_path: Path) -> None:
    with Node(variant) as node:
        outcomes = [judge_program(node, path.read_bytes(), tmp_path / path.name, 0) for path in SEEDS]
    assert outcomes.count("accepted") > len(SEEDS) / 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_mutated_files_are_accepted_or_rejected_as_in_the_native_library(variant: str) -> None:
    counts, findings = campaign(variant, 150, 7)
    assert not findings
    assert counts["program: accepted"] > 0 and counts["program: rejected"] > 0
