"""`fqvit table` gives the same rows with several workers as in a single process, and resumes after a worker is lost."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.cli.command_line import fqvit
from tests.distributed.together import ends, start

WORDS = ["table", "--models", "fmnist_vit", "--methods", "minmax,fq-vit,ema", "--images", 100, "--limit", 100, "--json"]


def rows(result: dict) -> list[dict]:
    return [{key: value for key, value in row.items() if not key.endswith("seconds")} for row in result["rows"]]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_lost_worker_ends_the_run_and_the_next_run_resumes_it(tmp_path: Path) -> None:
    cells, single = tmp_path / "cells", fqvit(*WORDS, "--cache", tmp_path / "single").json
    words = ["-m", "fqvit", *WORDS, "--cache", cells]
    processes = start([words] * 2, FQVIT_LOST_AFTER="3")
    until = time.monotonic() + 60
    while not list(cells.glob("result-*.json")) and time.monotonic() < until:
        time.sleep(0.01)
    processes[1].kill()
    first, _ = ends(processes)
    assert first[0] == 2 and first[1] == "" and len(first[2].splitlines()) == 1 and "lost" in first[2], first
    assert not list(cells.glob(".*"))
    finished = {path: path.stat().st_mtime_ns for path in cells.iterdir()}
    found = ends(start([words] * 2))
    assert [code for code, _, _ in found] == [0, 0], found
    result = json.loads(found[0][1])
    assert result["reused"] >= 1 and rows(result) == rows(single) and found[1][1] == ""
    assert all(path.stat().st_mtime_ns == written for path, written in finished.items())
