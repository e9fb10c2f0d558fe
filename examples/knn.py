"""Classify images by their nearest neighbour, without training: python examples/knn.py FILE.fqvit GALLERY IMAGE...

GALLERY has one sub-folder of example images per class. FILE.fqvit outputs an embedding.
"""

from __future__ import annotations

import sys
from pathlib import Path

import fqvit

if len(sys.argv) < 4:
    sys.exit("usage: python examples/knn.py FILE.fqvit GALLERY IMAGE..., where GALLERY has one sub-folder per class")
file, gallery, *paths = sys.argv[1:]
examples = sorted(path for path in Path(gallery).glob("*/*") if path.suffix.lower() in {".jpg", ".jpeg", ".png", ".webp"})
try:
    model = fqvit.load(file)
    found = fqvit.nearest(model.embed(examples), model.embed(paths), count=1)
except fqvit.FqvitError as error:
    sys.exit(str(error))

for path, (row,), (score,) in zip(paths, found.rows, found.scores):
    print(f"{path}: {examples[row].parent.name} (cosine {score / 2**24:.3f} to {examples[row].name})")
