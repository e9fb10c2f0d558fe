"""Find the commit of the working tree, which benchmarks record with their results."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str:
    """Return the short hash of HEAD, with a plus sign if src/ or native/ has uncommitted changes."""
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "src", "native")
    return _git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
