"""Top-1 and top-5 accuracy: ranks, ties, batches, and inputs for which accuracy is not defined."""

from __future__ import annotations

import numpy as np
import pytest

from fqvit.data.images import Batch
from fqvit.errors import FqvitError
from fqvit.evaluate.accuracy import arrays, measure, rank, top


def test_the_rank_is_the_number_of_better_classes() -> None:
    scores = np.array([[3, 9, 1, 9], [3, 9, 1, 9], [3, 9, 1, 9]])
    assert rank(scores, np.array([1, 3, 2])).tolist() == [0, 1, 3]


def test_equal_scores_are_ranked_by_class_index_as_in_argmax_and_top() -> None:
    scores = np.array([[5, 5, 5, 5, 5, 5]], np.int32)
    assert [int(rank(scores, np.array([label]))[0]) for label in range(6)] == list(range(6))
    assert top(scores[0], 5) == [0, 1, 2, 3, 4]
    assert int(scores.argmax(-1)[0]) == 0


def test_scores_with_nan_are_rejected() -> None:
    """No score compares greater than NaN, so the accuracy would be 100 %."""
    images, labels = np.zeros((2, 2, 2, 1), np.uint8), np.array([0, 3])
    with pytest.raises(FqvitError, match="the scores of the model contain NaN"):
        measure(lambda x: np.full((len(x), 4), np.nan, np.float32), arrays(images, labels, 2))
    assert rank(np.array([[-np.inf, 1.0, np.inf]]), np.array([1])).tolist() == [1]


def test_top_accepts_the_extremes_of_int32() -> None:
    assert top(np.array([-(2**31), 2**31 - 1, 0], np.int32), 3) == [1, 2, 0]


def test_accuracy_does_not_depend_on_the_batch_size() -> None:
    rng = np.random.default_rng(1)
    images, labels = rng.integers(0, 256, (50, 2, 2, 1), np.uint8), rng.integers(0, 8, 50)

    def run(batch: np.ndarray) -> np.ndarray:
        return (batch.reshape(len(batch), 4).astype(np.int64) * 7919) @ np.arange(1, 33).reshape(4, 8) % 101

    by_7, by_50 = (measure(run, arrays(images, labels, size)) for size in (7, 50))
    assert (by_7.top1, by_7.top5, by_7.images) == (by_50.top1, by_50.top5, 50)
    assert (by_7.predictions == by_50.predictions).all()
    assert by_7.top1 == 100 * float((run(images).argmax(-1) == labels).mean())
    assert by_7.top1 <= by_7.top5 <= 100


def test_accuracy_without_labels_or_images_is_rejected() -> None:
    with pytest.raises(FqvitError, match="labelled"):
        measure(lambda x: x, [Batch(np.zeros((1, 2, 2, 1), np.uint8), None, ["a"])])
    with pytest.raises(FqvitError, match="no images"):
        measure(lambda x: x, [])
