"""List pairs of near-duplicate images: python examples/near_duplicates.py FILE.fqvit FOLDER [MIN_COSINE]

FILE.fqvit outputs an embedding, for example after `fqvit quantize --output embedding`. Each image is compared with the ten
that are nearest to it, itself included. The result is the same on every machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

import fqvit

if len(sys.argv) < 3:
    sys.exit("usage: python examples/near_duplicates.py FILE.fqvit FOLDER [MIN_COSINE]")
file, folder, min_cosine = [*sys.argv[1:], "0.98"][:3]
paths = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in {".jpg", ".jpeg", ".png", ".webp"})
try:
    images = fqvit.load(file).embed(paths)
    found = fqvit.nearest(images, images, count=10)
except fqvit.FqvitError as error:
    sys.exit(str(error))

for i, (rows, scores) in enumerate(zip(found.rows, found.scores / 2**24)):
    for row, cosine in zip(rows, scores):
        if row > i and cosine >= float(min_cosine):
            print(f"{cosine:.4f}  {paths[i]}  {paths[row]}")
