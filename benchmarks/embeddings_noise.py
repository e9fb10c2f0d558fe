"""Compare the error of integer embeddings with random noise: how many nearest neighbours change, and what the error looks like.

    .venv/bin/python benchmarks/embeddings_noise.py

Reads what embeddings.py keeps in --work; run that first, with 1,000 queries.

Noise: adds a random vector to every float embedding of queries and gallery, with a length that gives the wanted cosine between
the original and the sum (COSINES). Prints the agreement of nearest neighbours, as the mean of five draws.

Error of VARIANT on the gallery, where all embeddings are normalized to length 1. Prints
- the share of the mean squared error that is the same for all images, and the share that a linear map of the embedding predicts
  (ridge regression on 700 images, with the best of RIDGES on the other 300);
- the neighbour error of VARIANT, and the neighbour error if each error vector is replaced by a random vector of the same
  length. The neighbour error is the standard deviation, in thousandths, of the error of the cosines between an image and its
  eight nearest images, after subtracting the mean error of the eight, which does not change their order.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from embeddings import Floats, neighbours
from numpy.typing import NDArray
from version import ROOT

COSINES = (0.999, 0.998, 0.997, 0.996)
DRAWS = 5
NEAREST = 8  # neighbours per image
TRAINED = 700  # images that the linear map is fitted to
RIDGES = (0.1, 1.0, 10.0, 100.0)  # penalties, as multiples of the mean eigenvalue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "embeddings")
    parser.add_argument("--variant", default="embedding-884-0-128", help="name of a gallery in --work")
    arguments = parser.parse_args()
    work = arguments.work
    queries, gallery = kept(work / "dinov2-1000" / "float-queries"), kept(work / "dinov2" / "float-gallery")
    exact = neighbours(queries, gallery)
    random = np.random.default_rng(0)
    for cosine in COSINES:
        found = [neighbours(noisy(queries, cosine, random), noisy(gallery, cosine, random)) for _ in range(DRAWS)]
        print(f"cosine {cosine}: agreement {100 * np.mean([each == exact for each in found]):.1f} %")
    integer = kept(work / "dinov2" / f"{arguments.variant}-gallery")
    vectors, error = normal(gallery), normal(integer) - normal(gallery)
    same = (error.mean(0) ** 2).sum() / (error**2).sum(1).mean()
    print(f"{arguments.variant}: {100 * same:.1f} % of the error is the same for all images")
    print(f"{arguments.variant}: {100 * predicted_share(normal(integer), error, random):.1f} % of the error is linear")
    noise = random.standard_normal(error.shape)
    noise *= np.linalg.norm(error, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    print(f"{arguments.variant}: neighbour error {neighbour_error(integer, gallery):.2f}")
    print(f"random vectors of the same lengths: neighbour error {neighbour_error(vectors + noise, gallery):.2f}")


def kept(folder: Path) -> Floats:
    """Return the embeddings of a folder written by embeddings.embed."""
    return np.concatenate(
        [np.load(path)["embedding"] for path in sorted(folder.glob("*.npz"), key=lambda path: int(path.stem))]
    )


def normal(vectors: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return vectors [N, C] divided by their lengths."""
    found: NDArray[np.float64] = vectors.astype(np.float64) / np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    return found


def noisy(vectors: Floats, cosine: float, random: np.random.Generator) -> Floats:
    """Add to each row a random vector that is nearly orthogonal to it; the cosine of row and sum is then about `cosine`."""
    noise = random.standard_normal(vectors.shape)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    return (vectors + noise * lengths * np.sqrt(cosine**-2 - 1)).astype(np.float32)


def neighbour_error(found: NDArray[np.floating], exact: NDArray[np.floating]) -> float:
    """Return the neighbour error of embeddings [N, C], in thousandths."""
    ours, theirs = (part @ part.T for part in (normal(found), normal(exact)))
    np.fill_diagonal(theirs, -1)
    nearest = np.argsort(-theirs, 1)[:, :NEAREST]
    error = np.take_along_axis(ours - theirs, nearest, 1)
    return 1000 * float((error - error.mean(1, keepdims=True)).std())


def predicted_share(vectors: NDArray[np.float64], error: NDArray[np.float64], random: np.random.Generator) -> float:
    """Return the share of the error [N, C] that a linear map of the vectors [N, C] predicts, on images it was not fitted to.

    Negative if the map is worse than no map.
    """
    order = random.permutation(len(vectors))
    (x, e), (others, rest) = ((vectors[part], error[part]) for part in (order[:TRAINED], order[TRAINED:]))
    mean, constant = x.mean(0), e.mean(0)
    square, product = (x - mean).T @ (x - mean), (x - mean).T @ (e - constant)
    shares = []
    for ridge in RIDGES:
        penalty = ridge * np.trace(square) / len(square) * np.eye(len(square))
        left = rest - constant - (others - mean) @ np.linalg.solve(square + penalty, product)
        shares.append(1 - (left**2).sum() / (rest**2).sum())
    return float(max(shares))


if __name__ == "__main__":
    main()
