"""Classify images with a .fqvit file, without torch: python examples/run.py FILE.fqvit IMAGE..."""

from __future__ import annotations

import sys

import fqvit

if len(sys.argv) < 3:
    sys.exit("usage: python examples/run.py FILE.fqvit IMAGE...")
file, *paths = sys.argv[1:]
try:
    for path, scores in zip(paths, fqvit.load(file).classify(paths)):
        print(f"{path}: {scores[0].name or scores[0].index}, {scores[0].logit:.2f}")
except fqvit.FqvitError as error:
    sys.exit(str(error))
