"""The Makefile writes a stamp file only after a step has succeeded. Nothing is installed here: pip is a stub."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(folder: Path, *words: str) -> str:
    """Run make, which must succeed, in a folder whose .venv contains only stamp files."""
    (folder / ".venv").mkdir(exist_ok=True)
    done = subprocess.run(
        ["make", "--no-print-directory", "-f", str(ROOT / "Makefile"), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_failed_installation_of_the_oracles_is_ignored_and_retried(tmp_path: Path) -> None:
    stamp, words = tmp_path / ".venv" / ".oracles", ("-o", ".venv/.dev", "oracles")
    for _ in range(2):
        assert "install" in make(tmp_path, *words, "PIP=false")
        assert not stamp.exists()
    make(tmp_path, *words, "PIP=true")
    assert stamp.exists()
    assert "install" not in make(tmp_path, *words, "PIP=false")


def test_an_installed_torch_is_kept(tmp_path: Path) -> None:
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\necho "$1" >> pip.log\n')
    pip.chmod(0o755)
    (tmp_path / "constraints.txt").touch()
    make(tmp_path, ".venv/.torch", f"PIP={pip}", "PYTHON=true")
    assert (tmp_path / "pip.log").read_text() == "show\n"
    pip.write_text('#!/bin/sh\necho "$1 $3" >> pip.log\ntest "$1" = install -a "$3" != -c\n')
    (tmp_path / ".venv" / ".torch").unlink()
    make(tmp_path, ".venv/.torch", f"PIP={pip}", "PYTHON=true")
    assert (tmp_path / "pip.log").read_text().splitlines()[1:] == ["show torch", "install -c", "install torch"]
