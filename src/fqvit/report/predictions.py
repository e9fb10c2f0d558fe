"""Compare the predictions of a float model and its integer program: accuracy, agreement, changes per class, disagreements.

Scores arrive in batches and are not kept; memory grows by a few integers per image, plus the disagreements that are shown.
Needs no torch. See also: evaluate/accuracy.py (ranks), gather.py (runs the models), page.py (shows the results).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from fqvit.evaluate.accuracy import rank, top
from fqvit.evaluate.pairs import Pair, pair

SHOWN = 5


@dataclass(frozen=True)
class Guess:
    """One of the best classes and its probability: softmax of the scores. Integer scores are multiplied by their scale."""

    label: int
    share: float


@dataclass(frozen=True)
class Disagreement:
    """An image that the two models classify differently.

    pixels: u8 [H, W, C], as the model sees them; label: None without labels
    """

    path: str
    pixels: NDArray[np.uint8]
    label: int | None
    float_guesses: tuple[Guess, ...]
    integer_guesses: tuple[Guess, ...]


@dataclass(frozen=True)
class ClassChange:
    """One class: its number of images, and how many of them the float model and the integer program classify correctly."""

    label: int
    images: int
    float_correct: int
    integer_correct: int

    @property
    def change(self) -> float:
        """Integer minus float, in percentage points of top-1."""
        return 100 * (self.integer_correct - self.float_correct) / self.images


@dataclass
class Predictions:
    """The predictions of a float model and its integer program, accumulated from batches of scores.

    scale: the scale of integer scores; shown: number of disagreements to keep, those with the highest float confidence
    """

    scale: float
    shown: int = 24
    images: int = 0
    agree: int = 0
    labelled: bool = True
    float_ranks: list[NDArray[np.int64]] = field(default_factory=list)
    integer_ranks: list[NDArray[np.int64]] = field(default_factory=list)
    labels: list[NDArray[np.int64]] = field(default_factory=list)
    kept: list[tuple[float, int, Disagreement]] = field(default_factory=list)

    def add(
        self,
        pixels: NDArray[np.uint8],
        labels: NDArray[np.int64] | None,
        paths: Sequence[str],
        float_scores: NDArray[np.float32],
        integer_scores: NDArray[np.int32],
    ) -> None:
        """Add a batch. pixels: u8 [N, H, W, C]; float_scores: f32 [N, classes]; integer_scores: i32 [N, classes]."""
        if labels is None:
            self.labelled = False
        else:
            self.labels.append(labels)
            self.float_ranks.append(rank(float_scores, labels))
            self.integer_ranks.append(rank(integer_scores, labels))
        same = float_scores.argmax(-1) == integer_scores.argmax(-1)
        self.agree += int(same.sum())
        for i in np.flatnonzero(~same).tolist():
            float_guesses, integer_guesses = guesses(float_scores[i]), guesses(integer_scores[i] * self.scale)
            label = None if labels is None else int(labels[i])
            one = Disagreement(paths[i], pixels[i].copy(), label, float_guesses, integer_guesses)
            # The second entry breaks ties: among equal probabilities, the earlier image is kept.
            heapq.heappush(self.kept, (float_guesses[0].share, -(self.images + i), one))
            if len(self.kept) > self.shown:
                heapq.heappop(self.kept)
        self.images += len(float_scores)

    @property
    def disagreements(self) -> list[Disagreement]:
        """The kept disagreements, highest float confidence first."""
        return [one for _, _, one in sorted(self.kept, key=lambda entry: entry[:2], reverse=True)]

    @property
    def agreement(self) -> float:
        """Percent of images with the same best class."""
        return 100 * self.agree / max(self.images, 1)

    def accuracy(self) -> Accuracies | None:
        """Return top-1 and top-5 of both models; None without labels."""
        if not self.labelled or not self.labels:
            return None
        float_ranks, integer_ranks = np.concatenate(self.float_ranks), np.concatenate(self.integer_ranks)
        float_correct, integer_correct = float_ranks == 0, integer_ranks == 0
        return Accuracies(
            float_top1=100 * float(float_correct.mean()),
            float_top5=100 * float((float_ranks < SHOWN).mean()),
            integer_top1=100 * float(integer_correct.mean()),
            integer_top5=100 * float((integer_ranks < SHOWN).mean()),
            pair=pair(float_correct, integer_correct),
        )

    def by_class(self) -> list[ClassChange]:
        """Return every class that has images, in order of its index; empty without labels."""
        if self.accuracy() is None:
            return []
        labels, *ranks = (np.concatenate(part) for part in (self.labels, self.float_ranks, self.integer_ranks))
        classes = int(labels.max()) + 1
        images = np.bincount(labels, minlength=classes)
        float_correct, integer_correct = (np.bincount(labels[own == 0], minlength=classes) for own in ranks)
        return [
            ClassChange(int(c), int(images[c]), int(float_correct[c]), int(integer_correct[c])) for c in np.flatnonzero(images)
        ]


class Accuracies(msgspec.Struct, frozen=True, rename={"float_top1": "exact_top1", "float_top5": "exact_top5"}):
    """Accuracies in percent. pair: integer against float, paired by image

    `fqvit report --json` writes the accuracies of the float model under the names of version 0.1.0, exact_top1 and exact_top5.
    """

    float_top1: float
    float_top5: float
    integer_top1: float
    integer_top5: float
    pair: Pair


def guesses(scores: NDArray[np.float32] | NDArray[np.float64]) -> tuple[Guess, ...]:
    """Return the five best classes of scores [classes] with their softmax."""
    wide = scores.astype(np.float64)
    shares = np.exp(wide - wide.max())
    shares /= shares.sum()
    return tuple(Guess(label, float(shares[label])) for label in top(scores, SHOWN))
