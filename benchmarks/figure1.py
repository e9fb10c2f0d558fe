"""Draw docs/assets/figure1.svg, the paper's Figure 1 for our models, from results/ablation.csv.

    .venv/bin/python benchmarks/figure1.py [--check]

The CSV file is written by benchmarks/paper.py. --check writes nothing and fails if the committed figure is out of date.
"""

from __future__ import annotations

from pathlib import Path

from figure_file import write_or_check

from fqvit.study.figure1 import draw
from fqvit.study.table import read_csv

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "ablation.csv"
FIGURE = ROOT / "docs" / "assets" / "figure1.svg"


if __name__ == "__main__":
    write_or_check(FIGURE, draw(read_csv(RESULTS.read_text(encoding="utf-8"))), "figure1.py", __doc__)
