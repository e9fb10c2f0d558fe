"""Checks an installed fqvit on a machine without compiler and torch: doctor, then a small golden program with known bits.

python scripts/check_wheel.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import fqvit

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"


def main() -> None:
    subprocess.run([sys.executable, "-m", "fqvit", "doctor"], check=True)
    files = sorted(GOLDEN.glob("*.fqvit"))
    if not files:
        sys.exit(f"{GOLDEN}: no golden programs there")
    for file in files:
        expected = np.load(file.with_suffix(".npz"))
        engine = fqvit.Engine(file)
        for name, output in (
            ("engine", engine.run(expected["images"])),
            ("reference", fqvit.runtime.reference.run(fqvit.Program.load(file), expected["images"])),
        ):
            if not np.array_equal(output, expected["output"]):
                sys.exit(f"{file.name}: the {name} gives other integers than it did when the file was made")
        print(f"{file.name}: same integers, {engine.isa}")
    if "torch" in sys.modules:
        sys.exit("torch was imported to run a program")


if __name__ == "__main__":
    main()
