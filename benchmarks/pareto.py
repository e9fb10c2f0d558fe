"""Draw docs/assets/sizes.svg: top-1 of DeiT-Tiny against file size, for recipes and bit widths.

    .venv/bin/python benchmarks/pareto.py [--check]

The rows come from results/table.csv (benchmarks/paper.py) and results/sizes.csv (docs/measurements/sizes.md has its commands).
A new row in either is a new dot. --check writes nothing and fails if the committed figure is out of date.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from figure_file import write_or_check

from fqvit.report.pareto import read_rows, size_accuracy
from fqvit.report.svg import standalone

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURE = ROOT / "docs" / "assets" / "sizes.svg"
MODEL = "deit_tiny_patch16_224"
LEFT_OUT = ("minmax", "ema", "percentile", "omse", "fq-vit-8", "fq-vit-original")  # same file size as fq-vit


def draw() -> str:
    measured, float_top1 = read_rows(RESULTS / "table.csv", MODEL)
    measured += read_rows(RESULTS / "sizes.csv", MODEL)[0]
    shown = [replace(row, method=row.method.partition("@")[0]) for row in measured if row.method not in LEFT_OUT]
    return standalone(size_accuracy(shown, float_top1, "DeiT-Tiny, 1,000 ImageNet validation images, integer programs"))


if __name__ == "__main__":
    write_or_check(FIGURE, draw(), "pareto.py", __doc__)
