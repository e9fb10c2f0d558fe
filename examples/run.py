"""Run a .fqvit file on images, without torch: python examples/run.py FILE.fqvit IMAGE..."""

from __future__ import annotations

import sys

import numpy as np
from PIL import Image

import fqvit

file, *paths = sys.argv[1:]
try:
    engine = fqvit.Engine(file)
    preprocess = engine.header.preprocess
    pixels = np.stack([preprocess.apply(Image.open(path)) for path in paths])  # uint8 [N, H, W, C]
except fqvit.FqvitError as error:
    sys.exit(str(error))
for path, scores in zip(paths, engine.run(pixels)):  # int32 [classes]
    best = int(scores.argmax())
    name = engine.classes[best] if engine.classes else str(best)
    print(f"{path}: {name}, {scores[best] * engine.header.output.scale:.2f}")
