"""Write a drawn figure to its file, or check that the file is current."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def write_or_check(path: Path, drawn: str, script: str, description: str | None) -> None:
    """Write the figure. With --check on the command line, exit with an error instead if the file differs.

    script: the name of the script that draws it   description: for --help
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        path.write_text(drawn, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != drawn:
        sys.exit(f"{path.name}: out of date. Run benchmarks/{script}.")
