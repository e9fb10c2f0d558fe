"""Send SIGINT and SIGTERM to commands on a terminal at random moments, from the first import to the last output."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections import Counter
from pathlib import Path

from PIL import Image

from fqvit import DetectorProgram, FqvitError, Program
from fqvit.inference.embeddings import read as read_embeddings
from tests.robustness.faults import terminal
from tests.robustness.faults.jobs import JOBS, leftovers

COMMANDS: dict[str, tuple[object, ...]] = {
    "quantize": JOBS["quantize"].words,
    "table": JOBS["table"].words,
    "eval": ("eval", "new.fqvit", "--limit", 300),
    "eval float": ("eval", "fmnist_vit", "--limit", 100),
    "embed": JOBS["embed"].words,
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
OUT = ("out.fqvit", "out", "out.json", "out.csv", "out.html", "out.safetensors", "cells", ".out.safetensors.parts")


def campaign(name: str, home: Path, signum: int, times: int, seed: int = 0) -> tuple[Counter[int], list[str]]:
    """Interrupt a command `times` times, at moments spread over its run time. Return counts of exit codes, and faults.

    Allowed exit codes: 128 + signum; 0 if the command had finished; -signum (killed by the signal, which shells show as
    128 + signum) while Python itself starts or exits and no handler is installed.
    """
    words, rng = ["-m", "fqvit", *COMMANDS[name]], random.Random(f"{name} {signum} {seed}")
    counts: Counter[int] = Counter()
    faults: list[str] = []
    whole = terminal.run(words, home)
    assert whole.code == 0 and not unfinished(home), whole.screen
    for number in range(times):
        clean(home)
        after = whole.seconds * (number + rng.random()) / times
        # A terminal sends Ctrl-C to all processes of the command; `kill` and supervisors send SIGTERM to the first one only.
        ended = terminal.run(words, home, signum, after, group=signum == signal.SIGINT)
        counts[ended.code] += 1
        found = ended.faults((128 + signum, -signum, 0)) + unfinished(home)
        faults += [f"{after:.2f} s of {whole.seconds:.2f}: {fault}" for fault in found]
    clean(home)
    return counts, faults


def unfinished(home: Path) -> list[str]:
    """List incomplete outputs and temporary files."""
    cells = home / "cells"
    left = [f"left {path.name}" for path in (*leftovers(home), *(leftovers(cells) if cells.is_dir() else []))]
    return left + [f"{name} is incomplete" for name in OUT if not _complete(home / name)]


def _complete(path: Path) -> bool:
    if path.is_dir():
        return all(_complete(file) for file in path.iterdir())
    if not path.exists():
        return True
    try:
        if path.suffix == ".fqvit":
            (DetectorProgram if b"fqvit_detector" in path.read_bytes() else Program).load(path)
        elif path.suffix == ".json":
            json.loads(path.read_bytes())
        elif path.suffix == ".safetensors":
            read_embeddings(path)
        elif path.suffix == ".png":
            with Image.open(path) as image:
                image.load()
        return path.suffix != ".html" or path.read_text().rstrip().endswith("</html>")
    except (FqvitError, ValueError, OSError):
        return False


def clean(home: Path) -> None:
    for path in (*(home / name for name in OUT), *leftovers(home)):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
