"""Tests of engines under many threads, for a few seconds: correct bits, damaged files rejected, no file left open.

See also: scripts/soak.py (`make soak` runs it for longer).
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SOAK = ROOT / "scripts" / "soak.py"


def test_eight_threads_get_the_right_bits_from_shared_and_own_engines() -> None:
    words = [sys.executable, "-X", "dev", "-W", "error", SOAK, "--worker", ROOT / "tests" / "golden", "--seconds", "3"]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == [] and found["files"] == 0
    assert all(found["counts"].get(what, 0) > 0 for what in ("shared", "own", "new", "rejected")), found["counts"]


def test_memory_growth_is_distinguished_from_noise() -> None:
    spec = importlib.util.spec_from_file_location("soak", SOAK)
    assert spec is not None and spec.loader is not None
    soak = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(soak)
    flat = soak.growth([(t / 2, 90_000_000 + 4_000_000 * (t % 2)) for t in range(1000)])
    grown = soak.growth([(t / 2, 90_000_000 + 20_000 * t) for t in range(1000)])
    assert flat["last_mb"] == pytest.approx(flat["first_mb"]) and abs(flat["mb_per_hour"]) < 1
    assert grown["last_mb"] > 1.1 * grown["first_mb"] and grown["mb_per_hour"] == pytest.approx(144)
