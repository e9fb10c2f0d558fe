"""Draw docs/assets/figure1.svg, the paper's Figure 1 for our models, from results/ablation.csv.

    .venv/bin/python benchmarks/figure1.py [--check]

The CSV file is written by benchmarks/paper.py. --check writes nothing and fails if the committed figure is out of date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fqvit.study.figure1 import draw
from fqvit.study.table import read_csv

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "ablation.csv"
FIGURE = ROOT / "docs" / "assets" / "figure1.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    drawn = draw(read_csv(RESULTS.read_text(encoding="utf-8")))
    if not parser.parse_args().check:
        FIGURE.write_text(drawn, encoding="utf-8")
    elif FIGURE.read_text(encoding="utf-8") != drawn:
        sys.exit(f"{FIGURE.name}: out of date. Run benchmarks/figure1.py.")


if __name__ == "__main__":
    main()
