"""Check an installed wheel, without a compiler or torch: run `fqvit doctor`, golden programs and golden detectors.

python scripts/check_wheel.py [--page]

--page: also check that the installation contains the page of `fqvit web`, as the wheels that are published do.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

import fqvit
from fqvit.detect.program import DetectorProgram
from fqvit.errors import FqvitError
from fqvit.runtime.native import instruction_sets
from fqvit.web.page import page_html

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


def check_page() -> None:
    try:
        page = page_html(with_model=False)
    except FqvitError as error:
        sys.exit(f"{error}")
    # The modules are inside as gzip files in base64, which begin with H4sI.
    if page.count(b"H4sI") < 2:
        sys.exit("index.html: has no WebAssembly modules, expected the page that `make wasm web` builds.")
    print(f"page of fqvit web: {len(page)} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="check that the installation contains the page of fqvit web")
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.machine()}, numpy {np.__version__}")
    subprocess.run([sys.executable, "-m", "fqvit", "doctor"], check=True)
    check_programs()
    check_detectors()
    if args.page:
        check_page()
    if "torch" in sys.modules:
        sys.exit("torch: imported while programs ran, expected that running a program does not import torch.")


if __name__ == "__main__":
    main()
