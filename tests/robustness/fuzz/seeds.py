"""The committed seeds as bytes."""

from __future__ import annotations

import gzip
from pathlib import Path

HERE = Path(__file__).resolve().parent


def seeds_of(target: str) -> dict[str, bytes]:
    """By name; those that are kept packed are unpacked."""
    found = {}
    for path in sorted((HERE / "seeds" / target).iterdir()):
        raw = path.read_bytes()
        found[path.name.removesuffix(".gz")] = gzip.decompress(raw) if path.suffix == ".gz" else raw
    return found


def golden() -> dict[str, bytes]:
    """Whole small networks, as programs."""
    return {path.name: path.read_bytes() for path in sorted((HERE.parents[1] / "golden").glob("*.fqvit"))}
