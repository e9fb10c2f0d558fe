"""Nearest-neighbour classification: an image gets the class of the most similar gallery image. Needs no training.

`class_scores` turns embeddings into one score per class, the highest cosine among the gallery images of the class, so that
accuracy.measure ranks classes as it does for logits. See also: inference/search.py (integer cosines).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fqvit.data.images import Batch
from fqvit.distributed.workers import SINGLE_PROCESS, Workers
from fqvit.errors import FqvitError
from fqvit.evaluate.accuracy import Run, Scores

Vectors = np.ndarray[Any, Any]
Similarity = Callable[[Vectors], Callable[[Vectors], Scores]]  # gallery [G, C] -> (queries [Q, C] -> scores [Q, G])


def class_scores(
    embed: Run, similarity: Similarity, gallery: Iterable[Batch], classes: int, workers: Workers = SINGLE_PROCESS
) -> Run:
    """Return a function from images to scores [N, classes]: the best similarity to a gallery image of each class.

    embed: images -> vectors [N, C]   gallery: labelled images; each worker passes its own batches
    A class without gallery images gets the lowest score.
    """
    found = [(embed(batch.images), batch.labels) for batch in gallery]
    parts = [part for some in workers.gather([(vectors, labels) for vectors, labels in found]) for part in some]
    labels = np.concatenate([np.zeros(0, np.int64), *(_labelled(labels) for _, labels in parts)])
    if not len(labels):
        raise FqvitError("gallery: no images were read. Pass a folder with at least one readable image per class.")
    order = np.argsort(labels, kind="stable")
    vectors = np.concatenate([vectors for vectors, _ in parts])[order]
    present, starts = np.unique(labels[order], return_index=True)
    compare = similarity(vectors)

    def run(images: NDArray[np.uint8]) -> Scores:
        scores = compare(embed(images))
        best = np.maximum.reduceat(scores, starts, axis=1)
        every = np.full((len(best), classes), best.min(initial=0) - 1, best.dtype)
        every[:, present] = best
        return every

    return run


def _labelled(labels: NDArray[np.int64] | None) -> NDArray[np.int64]:
    if labels is None:
        raise FqvitError("gallery: the images are not labelled. Put them into one sub-folder per class.")
    return labels


def float_similarity(gallery: Vectors) -> Callable[[Vectors], Scores]:
    """Return a function that computes the cosine similarity of queries and gallery in float, for the float model."""
    rows = _unit(gallery)

    def compare(queries: Vectors) -> Scores:
        scores: Scores = _unit(queries) @ rows.T
        return scores

    return compare


def _unit(vectors: Vectors) -> NDArray[np.float64]:
    wide = vectors.astype(np.float64)
    unit: NDArray[np.float64] = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-30)
    return unit
