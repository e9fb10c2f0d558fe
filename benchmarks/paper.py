"""Reproduce the paper's tables on DeiT-Tiny and ViT-Tiny: write results/table.csv, ablation.csv and sweep_k.csv.

    .venv/bin/python benchmarks/paper.py --data-root ROOT [--cache DIR] [--only table,ablate,sweep-k]
    .venv/bin/python benchmarks/paper.py --data-root ROOT --only table --models deit_tiny --methods w6a6,w4a4

ROOT has weights/*.safetensors, imagenet/calib and imagenet/val. Runs `fqvit table`, `ablate` and `sweep-k`, which cache
finished cells, so that a restarted run continues where it was interrupted. Machine and commit are added to every row. Older
rows of other models and methods are kept.
"""

from __future__ import annotations

import argparse
import csv
import io
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from version import commit

LATER = ",".join(f"{name}@{bits}" for name in ("ptq4vit", "repq-vit") for bits in ("8/8/8", "6/6/6", "4/4/4"))
METHODS = (
    f"minmax,ema,percentile,omse,partial,bit-split,ptq-vit,{LATER},"
    "fq-vit-8,fq-vit,fq-vit-original,fqvit@8/8/8,fqvit,fast,w6a6,w4,w4a4"
)
MODELS = "deit_tiny,vit_tiny"
RESULTS = Path(__file__).parent / "results"
FILES = {"table": "table.csv", "ablate": "ablation.csv", "sweep-k": "sweep_k.csv"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True, type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--only", default="table,ablate,sweep-k")
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--methods", default=METHODS, help="comma-separated methods, for `table` only")
    given = parser.parse_args()
    root: Path = given.data_root
    models = ",".join(f"{name}={root / 'weights' / f'{name}_patch16_224.safetensors'}" for name in given.models.split(","))
    common = ["--models", models, "--calib", root / "imagenet" / "calib", "--data", root / "imagenet" / "val"]
    if given.cache is not None:
        common += ["--cache", given.cache]
    for command in given.only.split(","):
        own = ["--methods", given.methods] if command == "table" else []
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.csv"
            subprocess.run([sys.executable, "-m", "fqvit", command, *map(str, common), *own, "-o", str(out)], check=True)
            rows = list(csv.DictReader(io.StringIO(out.read_text(encoding="utf-8"))))
        for row in rows:
            row |= {"machine": platform.machine(), "commit": commit()}
        write(RESULTS / FILES[command], rows)


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write measured rows, in the place of older rows of the same model and method, or else after the rows of their model."""
    with path.open(newline="") as file:
        kept = list(csv.DictReader(file))
    models = list(dict.fromkeys(row["model"] for row in [*kept, *rows]))
    merged = {(row["model"], row["method"]): row for row in [*kept, *rows]}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for model in models for (name, _), row in merged.items() if name == model)


if __name__ == "__main__":
    main()
