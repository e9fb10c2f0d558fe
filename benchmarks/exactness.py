"""Check that the native engine matches the reference bit for bit: compare all logits on a folder of images.

    .venv/bin/python benchmarks/exactness.py deit_tiny.fqvit vit_tiny.fqvit --data DIR [--limit 50] [--isa avx2,scalar]

The reference runs once for all instruction sets, at about 0.25 s per image for a tiny model. The exit code is 1 if any logit
differs.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

import fqvit
from fqvit import _native
from fqvit.runtime.native import Engine
from fqvit.runtime.reference import Reference
from fqvit.system.progress import track

BATCH = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE.fqvit")
    parser.add_argument("--data", required=True, help="a folder of images, with or without subfolders")
    parser.add_argument("--limit", type=int, help="use at most this many images, evenly spaced")
    parser.add_argument(
        "--isa",
        default=",".join(_native.instruction_sets()),
        help="comma-separated instruction sets (default: all that this CPU supports)",
    )
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    sets = arguments.isa.split(",")
    wrong = [compare(path, sets, arguments.data, arguments.limit, arguments.threads) for path in arguments.files]
    sys.exit(1 if any(wrong) else 0)


def compare(path: str, sets: list[str], data: str, limit: int | None, threads: int | None) -> int:
    """Print one line per instruction set and return the total number of logits that differ."""
    program = fqvit.Program.load(path)
    folder = fqvit.ImageFolder.unlabelled(data, program.header.preprocess)
    folder = folder.limit(limit) if limit else folder
    reference, engines = Reference(program), {isa: Engine(program, threads, isa=isa) for isa in sets}
    images, logits, wrong, images_wrong = 0, 0, dict.fromkeys(sets, 0), dict.fromkeys(sets, 0)
    seconds = dict.fromkeys(sets, 0.0)
    for batch in track(folder.batches(BATCH), -(-len(folder) // BATCH), path):
        expected = reference.run(batch.images)
        images, logits = images + len(expected), logits + expected.size
        for isa, engine in engines.items():
            start = time.perf_counter()
            differs = engine.run(batch.images) != expected
            seconds[isa] += time.perf_counter() - start
            wrong[isa] += int(np.count_nonzero(differs))
            images_wrong[isa] += int(differs.any(axis=tuple(range(1, differs.ndim))).sum())
    for isa in sets:
        print(
            f"{path}: {isa}: {images_wrong[isa]} of {images} images and {wrong[isa]} of {logits} logits differ;"
            f" {1000 * seconds[isa] / max(images, 1):.1f} ms per image",
            flush=True,
        )
    return sum(wrong.values())


if __name__ == "__main__":
    main()
