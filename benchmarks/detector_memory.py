"""Print the peak memory of a process that only runs an integer detector, as JSON in MiB.

    .venv/bin/python benchmarks/detector_memory.py FILE.fqvit IMAGE

The process never imports torch. `start`, `loaded` and `detected` are the peak memory at the start, after
loading the file and after detecting objects.
"""

from __future__ import annotations

import json
import sys

from PIL import Image

from fqvit.bench.worker import peak_memory
from fqvit.detect.fixed.detector import IntegerDetector


def peak() -> float:
    """Return the peak memory of this process in MiB."""
    return (peak_memory() or 0) / 2**20


def main() -> None:
    found = {"start": peak()}
    detector = IntegerDetector(sys.argv[1], threads=1)
    found["loaded"] = peak()
    count = len(list(detector.detect_image(Image.open(sys.argv[2])).masks()))
    found["detected"] = peak()
    assert "torch" not in sys.modules
    print(json.dumps({name: round(value, 1) for name, value in found.items()} | {"detections": count}))


if __name__ == "__main__":
    main()
