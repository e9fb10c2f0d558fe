"""Print the peak memory of a process that only runs an integer detector, as JSON in MiB.

    .venv/bin/python benchmarks/detector_memory.py FILE.fqvit IMAGE

The process never imports torch. `start`, `loaded` and `detected` are the peaks so far after each of these steps.
"""

from __future__ import annotations

import json
import sys

from PIL import Image

from fqvit.bench.worker import peak_memory
from fqvit.detect.program import DetectorProgram


def peak() -> float:
    """Return the peak memory of this process in MiB."""
    return (peak_memory() or 0) / 2**20


def main() -> None:
    found = {"start": peak()}
    program = DetectorProgram.load(sys.argv[1])
    ready = program.ready(threads=1)
    found["loaded"] = peak()
    image = program.prepare(Image.open(sys.argv[2]))
    count = len(list(ready.detect(image).masks()))
    found["detected"] = peak()
    assert "torch" not in sys.modules
    print(json.dumps({name: round(value, 1) for name, value in found.items()} | {"detections": count}))


if __name__ == "__main__":
    main()
