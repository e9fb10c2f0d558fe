"""A process that only runs a detector's integer programs, for benchmarks/detector.py: what it needs at most, as JSON.

    .venv/bin/python benchmarks/detector_memory.py FOLDER HEIGHT WIDTH PROPOSALS BOXES

FOLDER has pyramid.fqvit, box.fqvit and mask.fqvit. Torch is never imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.heads import Head
from fqvit.ir.program import Program
from fqvit.ir.resize import resized
from fqvit.runtime.native import Engine


def peak() -> float:
    """MB. Of this program alone: ru_maxrss would begin with what the process was that started it."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 1024


def random_codes(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def main() -> None:
    folder, (height, width, proposals, boxes) = Path(sys.argv[1]), map(int, sys.argv[2:])
    found = {"start": peak()}
    engine = Engine(resized(Program.load(folder / "pyramid.fqvit"), height, width), 1)
    found["loaded"] = peak()
    engine.run_all(random_codes(1, height, width, 3))
    found["pyramid"] = peak()
    for name, count in (("box", proposals), ("mask", boxes)):
        head = Head(Program.load(folder / f"{name}.fqvit"), 1)
        head.run_all(random_codes(count, *head.input.shape))
        found[name] = peak()
    assert "torch" not in sys.modules
    print(json.dumps({name: round(value, 1) for name, value in found.items()}))


if __name__ == "__main__":
    main()
