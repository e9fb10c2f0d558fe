"""Parse the arguments that scripts about one model share: model, --weights, --calib, --data and --recipes."""

from __future__ import annotations

import argparse


def model_parser(description: str | None, recipes: str) -> argparse.ArgumentParser:
    """Return a parser with the shared arguments. recipes: the default of --recipes"""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--calib", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--recipes", default=recipes, help="comma-separated NAME[@W/A/ATTN]")
    return parser
