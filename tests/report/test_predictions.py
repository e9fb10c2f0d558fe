"""Accuracy, agreement and changes by class equal those counted directly from the scores."""

from __future__ import annotations

import numpy as np
import pytest

from fqvit.report.predictions import Predictions, guesses

CLASSES = 7


def random_predictions(
    labelled: bool, shown: int = 24, images: int = 90
) -> tuple[Predictions, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    floats = rng.normal(size=(images, CLASSES)).astype(np.float32)
    integer = np.round((floats + rng.normal(0, 0.5, floats.shape)) * 100).astype(np.int32)
    labels = rng.integers(0, CLASSES - 1, images)  # the last class has no images
    predictions = Predictions(0.01, shown=shown)
    for at in range(0, images, 8):
        part = slice(at, at + 8)
        pixels = np.full((len(floats[part]), 2, 2, 1), at % 256, np.uint8)
        paths = [f"{i}.png" for i in range(at, at + len(pixels))]
        predictions.add(pixels, labels[part] if labelled else None, paths, floats[part], integer[part])
    return predictions, floats, integer, labels


def test_accuracy_and_agreement_equal_direct_counts() -> None:
    predictions, floats, integer, labels = random_predictions(labelled=True)
    found = predictions.accuracy()
    assert found is not None
    right, kept = floats.argmax(1) == labels, integer.argmax(1) == labels
    assert found.float_top1 == pytest.approx(100 * right.mean())
    assert found.integer_top1 == pytest.approx(100 * kept.mean())
    top5 = [label in np.argsort(-row)[:5] for row, label in zip(floats, labels)]
    assert found.float_top5 == pytest.approx(100 * np.mean(top5))
    assert (found.pair.gained, found.pair.lost) == ((kept & ~right).sum(), (right & ~kept).sum())
    assert predictions.agreement == pytest.approx(100 * (floats.argmax(1) == integer.argmax(1)).mean())


def test_changes_by_class_add_up_to_the_total_change() -> None:
    predictions, floats, integer, labels = random_predictions(labelled=True)
    rows = predictions.by_class()
    assert [row.label for row in rows] == sorted(set(labels.tolist()))
    for row in rows:
        own = labels == row.label
        assert (row.images, row.float_correct) == (own.sum(), (floats[own].argmax(1) == row.label).sum())
        assert row.change == pytest.approx(100 * (row.integer_correct - row.float_correct) / own.sum())
    assert sum(row.integer_correct for row in rows) == (integer.argmax(1) == labels).sum()


def test_without_labels_there_is_only_agreement() -> None:
    predictions, floats, integer, _ = random_predictions(labelled=False)
    assert predictions.accuracy() is None and predictions.by_class() == []
    assert predictions.agree == (floats.argmax(1) == integer.argmax(1)).sum()
    assert all(one.label is None for one in predictions.disagreements)


def test_the_disagreements_with_the_highest_float_confidence_are_kept() -> None:
    predictions, floats, integer, _ = random_predictions(labelled=True, shown=5)
    shares = np.exp(floats) / np.exp(floats).sum(1, keepdims=True)
    apart = np.flatnonzero(floats.argmax(1) != integer.argmax(1))
    surest = sorted(apart, key=lambda i: -shares[i].max())[:5]
    assert [one.path for one in predictions.disagreements] == [f"{i}.png" for i in surest]


def test_guesses_are_softmax_probabilities_best_first() -> None:
    found = guesses(np.log(np.array([0.1, 0.4, 0.2, 0.3])))
    assert [guess.label for guess in found] == [1, 3, 2, 0]
    assert [guess.share for guess in found] == pytest.approx([0.4, 0.3, 0.2, 0.1])
