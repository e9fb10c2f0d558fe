"""SIGINT and SIGTERM at random moments of real commands on a terminal: from the first import to the last word."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

from tests.faults import terminal
from tests.faults.jobs import JOBS, digest, leftovers

COMMANDS: dict[str, tuple[object, ...]] = {
    "quantize": JOBS["quantize"].words,
    "table": JOBS["table"].words,
    "eval": ("eval", "new.fqvit", "--limit", 300),
    "eval float": ("eval", "fmnist_vit", "--limit", 100),
    "onnx": JOBS["onnx"].words,
    "c": JOBS["c"].words,
    "vectors": JOBS["vectors"].words,
    "report": ("report", "new.fqvit", "--limit", 50, "-o", "out.html"),
    "bench": ("bench", "new.fqvit", "--against", "torch", "--rounds", 2),
    "detect quantize": JOBS["detect quantize"].words,
    "detect eval": ("detect", "eval", "shapes.fqvit", "--data", "val", "--annotations", "instances_val.json"),
    "detect predict": ("detect", "predict", "shapes.fqvit", "val", "-o", "out.json"),
    "detect draw": ("detect", "draw", "shapes.fqvit", "val", "-o", "out"),
}
OUT = ("out.fqvit", "out", "out.json", "out.csv", "out.html", "cells")


def campaign(name: str, home: Path, signum: int, times: int, seed: int = 0) -> tuple[Counter[int], list[str]]:
    """Moments are spread over the time that the command takes. Returns how often each exit code came, and faults.

    Exit codes: 128 + signum; 0 where the signal came when all was done; that of the signal itself in the few hundredths of a
    second in which Python starts or ends and nobody else can take it.
    """
    words, luck = ["-m", "fqvit", *COMMANDS[name]], random.Random(f"{name} {signum} {seed}")
    counts: Counter[int] = Counter()
    faults: list[str] = []
    whole = terminal.run(words, home)
    assert whole.code == 0, whole.screen
    known = {path: digest(home / path) for path in OUT}
    for number in range(times):
        _clean(home)
        after = whole.seconds * (number + luck.random()) / times
        # A terminal sends Ctrl-C to all processes of the command, `kill` and supervisors send SIGTERM to the first.
        ended = terminal.run(words, home, signum, after, alone=signum != terminal.signal.SIGINT)
        counts[ended.code] += 1
        found = ended.faults((128 + signum, -signum, 0))
        found += [
            f"left {path.name}"
            for path in (*leftovers(home), *(leftovers(home / "cells") if (home / "cells").is_dir() else []))
        ]
        found += [f"{path} is not whole" for path in ("out.fqvit",) if digest(home / path) not in (None, known[path])]
        faults += [f"{signum} after {after:.2f} s of {whole.seconds:.2f}: {fault}" for fault in found]
    _clean(home)
    return counts, faults


def _clean(home: Path) -> None:
    for path in (*(home / name for name in OUT), *leftovers(home)):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
