"""Compare embeddings and tokens of a program with those of the float model: cosines and nearest neighbours. Needs no torch.

The cosine between the float and the integer vector of an image shows how far the vector moved; neighbour agreement shows
whether a search among the same images still finds the same image. See also: inference/search.py (integer cosines),
compare.py (errors per site), pairs.py (classifiers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fqvit.errors import FqvitError
from fqvit.inference.embeddings import SIGNS, Info, decode
from fqvit.inference.search import BinaryIndex, Index
from fqvit.ir.program import Program

Floats = NDArray[np.float64]
Vectors = NDArray[np.floating[Any]]
Integers = np.ndarray[Any, Any]

COMPARED_KINDS = ("embedding", "pooled", "tokens", "map", SIGNS)
TIE = 1e-6  # float cosines closer than this count as equal: float32 vectors are not more precise
QUERIES = 256  # rows of the matrix of float cosines that are in memory at a time
FEWEST = 3  # images needed to compare neighbours: of two images, each is the neighbour of the other


class OutputSimilarity(msgspec.Struct, frozen=True):
    """How close an output of the program is to that of the float model.

    mean_cosine, first_percentile, worst: mean, first percentile and minimum of the cosine similarities of all images. For
    tokens, the cosine of an image is the mean over its tokens; for sign bits, it is the cosine of vectors of +1 and -1
    worst_image: the name of the image with the lowest cosine
    neighbour_agreement: percent of images whose nearest neighbour among the other images, by integer cosine, is also the
    nearest by the cosine of the float model; None for tokens and for fewer than three images
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    images: int
    mean_cosine: float
    first_percentile: float
    worst: float
    worst_image: str
    neighbour_agreement: float | None


@dataclass(frozen=True)
class Neighbours:
    """The nearest other image of every image, i64 [N]: by integer and by float cosine. same: bool [N], ties count as same."""

    by_integer: NDArray[np.int64]
    by_float: NDArray[np.int64]
    same: NDArray[np.bool_]

    @property
    def agreement(self) -> float:
        return 100 * float(self.same.mean())


@dataclass
class OutputVectors:
    """One output of a program and of the float model, accumulated from batches. Keeps vectors, but not tokens."""

    info: Info
    names: list[str] = field(default_factory=list)
    cosines: list[float] = field(default_factory=list)
    codes: list[Integers] = field(default_factory=list)
    floats: list[Vectors] = field(default_factory=list)

    def add(self, names: Sequence[str], floats: Vectors, codes: Integers) -> Floats:
        """Add an output of N images: floats of the float model, codes of the program. Returns their cosines [N]."""
        if not np.isfinite(floats).all():
            said = f"{self.info.name}: the float model gives NaN or infinite values"
            raise FqvitError(f"{said}. Check the weights and the images.")
        exact, decoded = self.comparable(floats, codes)
        found = cosines(exact, decoded)
        self.names += names
        self.cosines += found.tolist()
        if len(self.info.shape) == 1:
            self.codes.append(codes)
            self.floats.append(exact)
        return found

    def comparable(self, floats: Vectors, codes: Integers) -> tuple[Vectors, Vectors]:
        """Return the values of the float model and of the program [N, ..., C]. Packed sign bits are unpacked to +1 and -1."""
        exact = decode(self.info, floats.astype(np.uint8)) if self.info.kind == SIGNS else floats
        return exact, decode(self.info, codes)

    def neighbours(self) -> Neighbours | None:
        """Find the nearest neighbour of every image among the others; None for tokens and for fewer than FEWEST images."""
        if len(self.info.shape) != 1 or len(self.names) < FEWEST:
            return None
        nearest, best, chosen = float_neighbours(np.concatenate(self.floats), own := self._integer_neighbours())
        return Neighbours(own, nearest, chosen >= best - TIE)

    def _integer_neighbours(self) -> NDArray[np.int64]:
        codes = np.concatenate(self.codes)
        if self.info.kind == SIGNS:
            rows = BinaryIndex(codes).search(codes, count=2).rows
        elif self.info.alpha:
            values = ((codes.astype(np.int64) - self.info.zero) << np.array(self.info.alpha)).astype(np.int32)
            rows = Index(values).search(values, count=2).rows
        else:
            rows = Index(codes, self.info.zero).search(codes, self.info.zero, count=2).rows
        # An image is its own best match, unless others are equal to it.
        return np.where(rows[:, 0] == np.arange(len(rows)), rows[:, 1], rows[:, 0])

    def worst(self, count: int) -> list[int]:
        """Return the positions of the images with the lowest cosines, lowest first; among equal cosines, the earlier first."""
        order: list[int] = np.argsort(np.array(self.cosines), kind="stable")[:count].tolist()
        return order

    def result(self, neighbours: Neighbours | None) -> OutputSimilarity:
        """Summarize the images. neighbours: the result of neighbours()"""
        if not self.names:
            raise FqvitError(f"{self.info.name}: no images were read. Pass a folder with at least one readable image.")
        values, lowest = np.array(self.cosines), self.worst(1)[0]
        return OutputSimilarity(
            name=self.info.name,
            kind=self.info.kind,
            shape=self.info.shape,
            dtype=self.info.dtype,
            images=len(values),
            mean_cosine=float(values.mean()),
            first_percentile=float(np.quantile(values, 0.01)),
            worst=float(values[lowest]),
            worst_image=self.names[lowest],
            neighbour_agreement=None if neighbours is None else neighbours.agreement,
        )


def cosines(first: Vectors, second: Vectors) -> Floats:
    """Return the cosine between the vectors [N, ..., C] of each image, averaged over all axes between N and C: f64 [N].

    The cosine of two zero vectors is 1; the cosine of a zero vector and any other vector is 0.
    """
    a, b = (each.astype(np.float64) for each in (first, second))
    dots, squares = (a * b).sum(-1), (a * a).sum(-1) * (b * b).sum(-1)
    found = np.where(squares > 0, dots / np.sqrt(np.where(squares > 0, squares, 1)), ((a == 0) & (b == 0)).all(-1))
    mean: Floats = np.clip(found, -1, 1).reshape(len(a), -1).mean(1)
    return mean


def float_neighbours(vectors: Vectors, chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Return the nearest other row of every row of `vectors` [N, C], its cosine, and the cosine of the row in `chosen` [N]."""
    wide = vectors.astype(np.float64)
    unit = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-300)
    nearest, best, own = [], [], []
    for start in range(0, len(unit), QUERIES):
        rows = np.arange(start, min(start + QUERIES, len(unit)))
        scores = unit[rows] @ unit.T
        scores[rows - start, rows] = -np.inf
        nearest.append(scores.argmax(1))
        best.append(scores.max(1))
        own.append(scores[rows - start, chosen[rows]])
    return np.concatenate(nearest), np.concatenate(best), np.concatenate(own)


def described_outputs(program: Program) -> list[Info]:
    """Describe all outputs of a program, as Engine.outputs does, without loading it into an engine."""
    buffers, found = program.verify().buffers, []
    for output in program.header.outputs:
        value = buffers[output.buffer]
        alpha = () if output.alpha is None else tuple(program.constants[output.alpha].tolist())
        found.append(Info(output.label, output.kind, output.scale, output.zero, value.dtype, value.shape, alpha))  # type: ignore[arg-type]
    return found
