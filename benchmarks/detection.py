"""Reproduce the paper's Table 2 on the small detectors of training/ and write results/detection.csv.

    make detector                       # trains the detectors; skip this if build/detect has them already
    .venv/bin/python benchmarks/detection.py [--folder build/detect] [--methods NAME[@W/A/ATTN],...] [--jobs 2]

Runs `fqvit detect quantize` and `fqvit detect eval` for every detector and method, one thread each. Finished rows are kept in
FOLDER/table, so an interrupted run continues. The published numbers are box AP of Swin-S on COCO, so compare only the ranking
of the methods.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from version import commit

METHODS = "float,minmax,ema,percentile,omse,fq-vit-8,fq-vit,fqvit@8/8/8,fqvit"
DETECTORS = ("mask_rcnn", "cascade")
PUBLISHED = {  # box AP, Mask R-CNN and Cascade Mask R-CNN
    "float": (48.5, 52.0),
    "minmax": (32.8, 35.2),
    "ema": (37.9, 40.4),
    "percentile": (41.6, 44.7),
    "omse": (42.6, 44.9),
    "fq-vit-8": (47.8, 51.4),
    "fq-vit": (47.2, 50.8),
}
KEPT = ("box_ap", "box_ap50", "box_ap75", "mask_ap", "mask_ap50", "mask_ap75", "images", "detections", "seconds_per_image")
RESULTS = Path(__file__).parent / "results" / "detection.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/detect"))
    parser.add_argument("--detectors", default=",".join(DETECTORS))
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=int, help="use at most this many validation images; the rows are kept separately")
    given = parser.parse_args()
    cells = [(name, method) for name in given.detectors.split(",") for method in given.methods.split(",")]
    with ThreadPoolExecutor(given.jobs) as pool:
        rows = list(pool.map(lambda cell: row(given.folder, *cell, given.limit), cells))
    # A run on only some of the detectors, methods or images does not replace the full table.
    whole = given.limit is None and (given.detectors, given.methods) == (",".join(DETECTORS), METHODS)
    with (RESULTS if whole else given.folder / "table" / "part.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def row(folder: Path, name: str, method: str, limit: int | None) -> dict[str, object]:
    """Return the row of one detector and method, from the file of an earlier run if there is one."""
    kept = folder / "table" / f"{name}-{method.replace('/', '').replace('@', '-')}{'' if limit is None else f'-{limit}'}.json"
    if not kept.is_file():
        kept.parent.mkdir(exist_ok=True)
        found = measured(folder, name, method, kept.with_suffix(".fqvit"), limit)
        temporary = kept.with_suffix(".part")
        temporary.write_text(json.dumps(found))
        temporary.rename(kept)
        print(name, method, found, flush=True)
    recipe = method.partition("@")[0]
    published = PUBLISHED.get(method)
    return {
        "detector": name,
        "method": recipe,
        **json.loads(kept.read_text()),
        "published_box_ap": "" if published is None or name not in DETECTORS else published[DETECTORS.index(name)],
        "machine": platform.machine(),
    }


def measured(folder: Path, name: str, method: str, file: Path, limit: int | None) -> dict[str, object]:
    """Quantize a detector to `file`, unless the method is "float", and evaluate it."""
    weights, shapes = folder / f"{name}.safetensors", folder / "shapes"
    recipe, _, bits = method.partition("@")
    target: list[object] = ["--weights", weights]
    made: dict[str, object] = {}
    if method != "float":
        options = ["--recipe", recipe, *(["--bits", bits] if bits else [])]
        made = fqvit("detect", "quantize", "--weights", weights, "--calib", shapes / "train", *options, "-o", file)
        target = [file]
    some = [] if limit is None else ["--limit", limit]
    threads = ["--threads", 1]
    data = ["--data", shapes / "val", "--annotations", shapes / "instances_val.json"]
    scores = fqvit("detect", "eval", *target, *data, *some, *threads)
    size = file.stat().st_size if method != "float" else 4 * parameters(weights)
    found = {"bits": made.get("bits", "float"), **{name: scores[name] for name in KEPT}, "bytes": size}
    return found | {"quantize_seconds": made.get("seconds", ""), "commit": commit()}


def fqvit(*words: object) -> dict[str, object]:
    """Run an fqvit command with --json and return its result."""
    command = [sys.executable, "-m", "fqvit", *map(str, words), "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    answer: dict[str, object] = json.loads(said.splitlines()[-1])
    return answer


def parameters(weights: Path) -> int:
    """Return the number of weights in a safetensors file."""
    from safetensors import safe_open

    with safe_open(weights, framework="numpy") as file:
        return sum(int(file.get_tensor(name).size) for name in file.keys())  # noqa: SIM118


if __name__ == "__main__":
    main()
