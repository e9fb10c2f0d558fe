"""A process that only runs an integer detector, for benchmarks/detector.py: what it needs at most, as JSON.

    .venv/bin/python benchmarks/detector_memory.py FILE.fqvit PHOTOGRAPH

Torch is never imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from PIL import Image

from fqvit.detect.images import prepare
from fqvit.detect.program import DetectorProgram


def peak() -> float:
    """MB. Of this program alone: ru_maxrss would begin with what the process was that started it."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 1024


def main() -> None:
    found = {"start": peak()}
    program = DetectorProgram.load(sys.argv[1])
    ready = program.ready(threads=1)
    found["loaded"] = peak()
    image = prepare(Image.open(sys.argv[2]), program.settings)
    count = len(list(ready.detect(image).masks()))
    found["detected"] = peak()
    assert "torch" not in sys.modules
    print(json.dumps({name: round(value, 1) for name, value in found.items()} | {"detections": count}))


if __name__ == "__main__":
    main()
