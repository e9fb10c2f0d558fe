"""Run the fuzzing targets without a fuzzer: all seeds are valid, and thousands of mutations of them reveal no fault.

`make fuzz` continues with coverage guidance, `make fuzz-files` with many files under sanitizers.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from fqvit.errors import FqvitError
from tests.robustness.fuzz.campaign import Files
from tests.robustness.fuzz.oracle import checked_line, judge_detector, judge_program
from tests.robustness.fuzz.readers import READERS
from tests.robustness.fuzz.rewrite import BY_READER, plain, randomly
from tests.robustness.fuzz.seeds import HERE, seeds_of

INCOMPLETE = "not a known layout of a vision transformer"  # the error for checkpoints with only a few tensors
ROUNDS = {"detector": 6, "safetensors": 60, "torch": 60, "npz": 60, "image": 150, "coco": 100}


@pytest.mark.parametrize("target", READERS)
def test_seeds_are_accepted(target: str, tmp_path: Path) -> None:
    path = tmp_path / f"file{READERS[target].ending}"
    for name, raw in seeds_of(target).items():
        path.write_bytes(raw)
        try:
            READERS[target].read(path)
        except FqvitError as error:
            assert INCOMPLETE in str(error), name


@pytest.mark.filterwarnings("ignore")  # Pillow warns about odd images that it then reads
@pytest.mark.parametrize("target", READERS)
def test_mutated_seeds_are_accepted_or_rejected_with_a_one_line_error(target: str, tmp_path: Path) -> None:
    path = tmp_path / f"file{READERS[target].ending}"
    rewrite, seeds = BY_READER.get(target, plain), list(seeds_of(target).values())
    for number in range(ROUNDS.get(target, 200)):
        rng = random.Random(number)
        path.write_bytes(rewrite(rng.choice(seeds), 1 << 18, rng, randomly(rng)))
        try:
            READERS[target].read(path)
        except FqvitError as error:
            checked_line(error, path)


def test_files_of_the_campaign_are_reproducible_and_reach_every_stage(tmp_path: Path) -> None:
    files, stages, path = Files(1), set(), tmp_path / "file.fqvit"
    for number in range(150):
        kind, raw = files.make(number)
        assert files.make(number) == (kind, raw)
        path.write_bytes(raw)
        outcome = (judge_detector if kind == "detector" else judge_program)(path, number)
        stages.add(outcome.partition(" | ")[0])
    assert {"container", "types", "verify", "accepted"} <= stages


@pytest.mark.parametrize("part", range(8))
def test_python_and_the_native_loader_accept_the_same_mutated_programs(part: int, tmp_path: Path) -> None:
    """judge_program also compares the results of accepted programs. `make fuzz-files` tries many more files."""
    files, path, outcomes = Files(2), tmp_path / "file.fqvit", Counter[str]()
    for number in range(part * 500, (part + 1) * 500):
        kind, raw = files.make(number)
        if kind == "program":
            path.write_bytes(raw)
            outcomes[judge_program(path, number).partition(" | ")[0]] += 1
    assert outcomes["accepted"] > 50 and outcomes["verify"] > 100, outcomes


def test_seeds_stay_small() -> None:
    assert sum(path.stat().st_size for path in (HERE / "seeds").rglob("*") if path.is_file()) < 300_000
