"""Measure top-1 and top-5 accuracy of any function from images to scores. Needs no torch.

See also: data/images.py (labelled folders), compare.py (where accuracy is lost), runtime/ (integer scores).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fqvit.data.images import Batch
from fqvit.distributed.workers import SINGLE_PROCESS, Workers
from fqvit.errors import FqvitError

Scores = np.ndarray[Any, Any]
Run = Callable[[NDArray[np.uint8]], Scores]


@dataclass(frozen=True)
class Accuracy:
    """top1, top5: percent of `images`. seconds: spent in the model only, summed over workers.

    predictions, ranks: i64 [images], the best class, and the rank of the label (0: best).
    """

    images: int
    top1: float
    top5: float
    seconds: float
    predictions: NDArray[np.int64]
    ranks: NDArray[np.int64]


def measure(run: Run, batches: Iterable[Batch], workers: Workers = SINGLE_PROCESS) -> Accuracy:
    """Run every batch and rank its labels. Raises FqvitError if there are no labels or no images.

    workers: each worker passes its own batches; all workers get the accuracy over all batches, with predictions and ranks in
    worker order.
    """
    ranks: list[NDArray[np.int64]] = []
    predictions: list[NDArray[np.int64]] = []
    seconds = 0.0
    for batch in batches:
        if batch.labels is None:
            raise FqvitError("accuracy: the images are not labelled. Put them into one sub-folder per class.")
        start = time.perf_counter()
        scores = run(batch.images)
        seconds += time.perf_counter() - start
        ranks.append(rank(scores, batch.labels))
        predictions.append(scores.argmax(-1))
    nothing = np.zeros(0, np.int64)
    parts = workers.gather([np.concatenate([nothing, *ranks]), np.concatenate([nothing, *predictions]), seconds])
    all_ranks, all_predictions = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    if not len(all_ranks):
        raise FqvitError("accuracy: no images were read. Pass a folder with at least one readable image.")
    spent = sum(part[2] for part in parts)
    top1, top5 = (100 * float((all_ranks < count).mean()) for count in (1, 5))
    return Accuracy(len(all_ranks), top1, top5, spent, all_predictions, all_ranks)


def rank(scores: Scores, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rank of each label: i64 [N], 0 for the best class. Among equal scores, the lower class index comes first.

    scores: [N, classes]   labels: i64 [N]
    """
    if np.isnan(scores).any():  # no score compares greater than NaN, so every label would rank first
        raise FqvitError("accuracy: the scores of the model contain NaN. Check the weights and the images.")
    own = np.take_along_axis(scores, labels[:, None], -1)
    before = np.arange(scores.shape[-1])[None, :] < labels[:, None]
    ranks: NDArray[np.int64] = ((scores > own) | ((scores == own) & before)).sum(-1)
    return ranks


def arrays(images: NDArray[np.uint8], labels: NDArray[np.int64] | None, size: int) -> list[Batch]:
    """Split images in memory into batches of `size`. images: u8 [N, H, W, C]; labels: i64 [N] or None."""
    names = [f"image {i}" for i in range(len(images))]
    return [
        Batch(images[at : at + size], None if labels is None else labels[at : at + size], names[at : at + size])
        for at in range(0, len(images), size)
    ]


def top(scores: Scores, count: int) -> list[int]:
    """Return the `count` classes with the highest scores [classes], best first; among equal scores, the lower index first."""
    order = np.argsort(-scores.astype(np.float64), kind="stable")
    return [int(index) for index in order[:count]]
