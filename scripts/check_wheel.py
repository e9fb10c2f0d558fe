"""Check an installed wheel, without a compiler or torch: run `fqvit doctor`, golden programs and golden detectors.

python scripts/check_wheel.py
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

import fqvit
from fqvit.detect.program import DetectorProgram
from fqvit.runtime.native import instruction_sets

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"


def check_programs() -> None:
    files = sorted(GOLDEN.glob("*.fqvit"))
    if not files:
        sys.exit(f"{GOLDEN}: no .fqvit files, expected golden programs. Run the script in a checkout.")
    for file in files:
        expected = np.load(file.with_suffix(".npz"))
        outputs = {"reference": fqvit.runtime.reference.run(fqvit.Program.load(file), expected["images"])}
        for isa in instruction_sets():
            outputs[isa] = fqvit.Engine(file, isa=isa).run(expected["images"])
        for name, output in outputs.items():
            if not np.array_equal(output, expected["output"]):
                sys.exit(f"{file.name}: {name} returned different integers, expected those in {file.stem}.npz.")
        print(f"{file.name}: integers match ({', '.join(outputs)})")


def check_detectors() -> None:
    for file in sorted((GOLDEN / "detectors").glob("*.fqvit")):
        expected = np.load(file.with_suffix(".npz"))
        program = DetectorProgram.load(file)
        detector = program.ready()
        for i, image in enumerate(expected["pictures"]):
            found = detector.detect(program.prepare(Image.fromarray(image)))
            for part in ("boxes", "scores", "labels", "probabilities"):
                if not np.array_equal(getattr(found, part), expected[f"{part}{i}"]):
                    sys.exit(f"{file.name}: the detector returned different {part}, expected those in {file.stem}.npz.")
        print(f"{file.name}: boxes, scores, labels and masks match")


def main() -> None:
    print(f"Python {platform.python_version()}, {platform.machine()}, numpy {np.__version__}")
    subprocess.run([sys.executable, "-m", "fqvit", "doctor"], check=True)
    check_programs()
    check_detectors()
    if "torch" in sys.modules:
        sys.exit("torch: imported while programs ran, expected that running a program does not import torch.")


if __name__ == "__main__":
    main()
