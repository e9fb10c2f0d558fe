"""Accuracy, agreement and changes by class equal direct counts."""

from __future__ import annotations

import numpy as np
import pytest

from fqvit.report.answers import Answers, guesses

CLASSES = 7


def random_answers(labelled: bool, shown: int = 24, images: int = 90) -> tuple[Answers, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    floats = rng.normal(size=(images, CLASSES)).astype(np.float32)
    integer = np.round((floats + rng.normal(0, 0.5, floats.shape)) * 100).astype(np.int32)
    labels = rng.integers(0, CLASSES - 1, images)  # the last class has no images
    answers = Answers(0.01, shown=shown)
    for at in range(0, images, 8):
        part = slice(at, at + 8)
        pixels = np.full((len(floats[part]), 2, 2, 1), at % 256, np.uint8)
        paths = [f"{i}.png" for i in range(at, at + len(pixels))]
        answers.add(pixels, labels[part] if labelled else None, paths, floats[part], integer[part])
    return answers, floats, integer, labels


def test_accuracy_and_agreement_equal_direct_counts() -> None:
    answers, floats, integer, labels = random_answers(labelled=True)
    found = answers.accuracy()
    assert found is not None
    right, kept = floats.argmax(1) == labels, integer.argmax(1) == labels
    assert found.float_top1 == pytest.approx(100 * right.mean())
    assert found.integer_top1 == pytest.approx(100 * kept.mean())
    top5 = [label in np.argsort(-row)[:5] for row, label in zip(floats, labels)]
    assert found.float_top5 == pytest.approx(100 * np.mean(top5))
    assert (found.pair.gained, found.pair.lost) == ((kept & ~right).sum(), (right & ~kept).sum())
    assert answers.agreement == pytest.approx(100 * (floats.argmax(1) == integer.argmax(1)).mean())


def test_changes_by_class_add_up_to_the_total_change() -> None:
    answers, floats, integer, labels = random_answers(labelled=True)
    rows = answers.by_class()
    assert [row.label for row in rows] == sorted(set(labels.tolist()))
    for row in rows:
        own = labels == row.label
        assert (row.images, row.float_correct) == (own.sum(), (floats[own].argmax(1) == row.label).sum())
        assert row.change == pytest.approx(100 * (row.integer_correct - row.float_correct) / own.sum())
    assert sum(row.integer_correct for row in rows) == (integer.argmax(1) == labels).sum()


def test_without_labels_there_is_only_agreement() -> None:
    answers, floats, integer, _ = random_answers(labelled=False)
    assert answers.accuracy() is None and answers.by_class() == []
    assert answers.agree == (floats.argmax(1) == integer.argmax(1)).sum()
    assert all(one.label is None for one in answers.disagreements)


def test_the_disagreements_with_the_highest_float_confidence_are_kept() -> None:
    answers, floats, integer, _ = random_answers(labelled=True, shown=5)
    shares = np.exp(floats) / np.exp(floats).sum(1, keepdims=True)
    apart = np.flatnonzero(floats.argmax(1) != integer.argmax(1))
    surest = sorted(apart, key=lambda i: -shares[i].max())[:5]
    assert [one.path for one in answers.disagreements] == [f"{i}.png" for i in surest]


def test_guesses_are_softmax_probabilities_best_first() -> None:
    found = guesses(np.log(np.array([0.1, 0.4, 0.2, 0.3])))
    assert [guess.label for guess in found] == [1, 3, 2, 0]
    assert [guess.share for guess in found] == pytest.approx([0.4, 0.3, 0.2, 0.1])
