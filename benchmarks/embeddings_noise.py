"""Measure how much noise nearest neighbours tolerate: add random vectors to float embeddings and count unchanged neighbours.

    .venv/bin/python benchmarks/embeddings_noise.py

Reads the float embeddings that embeddings.py keeps in --work; run embeddings.py first, with 1,000 queries. Every embedding of
queries and gallery gets its own random vector, whose length determines the cosine between the original and the noisy embedding
(COSINES). Prints the mean agreement of five draws.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from embeddings import Floats, neighbours
from version import ROOT

COSINES = (0.999, 0.998, 0.997, 0.996)
DRAWS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "embeddings")
    work = parser.parse_args().work
    queries, gallery = kept(work / "dinov2-1000" / "float-queries"), kept(work / "dinov2" / "float-gallery")
    exact = neighbours(queries, gallery)
    random = np.random.default_rng(0)
    for cosine in COSINES:
        found = [neighbours(noisy(queries, cosine, random), noisy(gallery, cosine, random)) for _ in range(DRAWS)]
        print(f"cosine {cosine}: agreement {100 * np.mean([each == exact for each in found]):.1f} %")


def kept(folder: Path) -> Floats:
    """Return the embeddings of a folder written by embeddings.embed."""
    return np.concatenate(
        [np.load(path)["embedding"] for path in sorted(folder.glob("*.npz"), key=lambda path: int(path.stem))]
    )


def noisy(vectors: Floats, cosine: float, random: np.random.Generator) -> Floats:
    """Add to each row a random vector that is nearly orthogonal to it; the cosine of row and sum is then about `cosine`."""
    noise = random.standard_normal(vectors.shape)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    return (vectors + noise * lengths * np.sqrt(cosine**-2 - 1)).astype(np.float32)


if __name__ == "__main__":
    main()
