"""Read the committed seed files of the fuzzing targets."""

from __future__ import annotations

import gzip
from pathlib import Path

HERE = Path(__file__).resolve().parent


def seeds_of(target: str) -> dict[str, bytes]:
    """Return the decompressed seeds of a target as {name: bytes}."""
    found = {}
    for path in sorted((HERE / "seeds" / target).iterdir()):
        raw = path.read_bytes()
        found[path.name.removesuffix(".gz")] = gzip.decompress(raw) if path.suffix == ".gz" else raw
    return found


def golden() -> dict[str, bytes]:
    """Return {name: bytes} of the golden programs, which are small whole networks."""
    folder = HERE.parents[1] / "golden"
    named = {f"outputs_{path.name}": path.read_bytes() for path in sorted((folder / "outputs").glob("*.fqvit"))}
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.fqvit"))} | named
