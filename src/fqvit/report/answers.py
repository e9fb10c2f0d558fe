"""Compare a float model with its integer program: accuracy, agreement, changes per class, disagreements.

Scores arrive in batches and are not kept; memory grows by a few integers per image, plus the disagreements that are shown.
Needs no torch. See also: evaluate/accuracy.py (ranks), gather.py (runs the models), page.py (shows the results).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fqvit.evaluate.accuracy import rank, top
from fqvit.evaluate.pairs import Pair, pair

SHOWN = 5


@dataclass(frozen=True)
class Guess:
    """One of the best classes and its probability: softmax of the scores (of integer scores times their scale)."""

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
    exact: tuple[Guess, ...]
    integer: tuple[Guess, ...]


@dataclass(frozen=True)
class ClassChange:
    """One class: its number of images, and how many of them float and the integer program classify correctly."""

    label: int
    images: int
    exact: int
    integer: int

    @property
    def change(self) -> float:
        """Integer minus float, in percentage points of top-1."""
        return 100 * (self.integer - self.exact) / self.images


@dataclass
class Answers:
    """Accumulates batches of scores.

    scale: the scale of integer scores; shown: number of disagreements to keep, those with the highest float confidence
    """

    scale: float
    shown: int = 24
    images: int = 0
    agree: int = 0
    labelled: bool = True
    exact_ranks: list[NDArray[np.int64]] = field(default_factory=list)
    integer_ranks: list[NDArray[np.int64]] = field(default_factory=list)
    labels: list[NDArray[np.int64]] = field(default_factory=list)
    kept: list[tuple[float, int, Disagreement]] = field(default_factory=list)

    def add(
        self,
        pixels: NDArray[np.uint8],
        labels: NDArray[np.int64] | None,
        paths: Sequence[str],
        exact: NDArray[np.float32],
        integer: NDArray[np.int32],
    ) -> None:
        """Add a batch. pixels: u8 [N, H, W, C]; exact: float scores [N, classes]; integer: i32 scores [N, classes]."""
        if labels is None:
            self.labelled = False
        else:
            self.labels.append(labels)
            self.exact_ranks.append(rank(exact, labels))
            self.integer_ranks.append(rank(integer, labels))
        same = exact.argmax(-1) == integer.argmax(-1)
        self.agree += int(same.sum())
        for i in np.flatnonzero(~same).tolist():
            sure, found = guesses(exact[i]), guesses(integer[i] * self.scale)
            label = None if labels is None else int(labels[i])
            one = Disagreement(paths[i], pixels[i].copy(), label, sure, found)
            # The second entry breaks ties: of equal shares the earlier image is preferred.
            heapq.heappush(self.kept, (sure[0].share, -(self.images + i), one))
            if len(self.kept) > self.shown:
                heapq.heappop(self.kept)
        self.images += len(exact)

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
        exact, integer = np.concatenate(self.exact_ranks), np.concatenate(self.integer_ranks)
        right, kept = exact == 0, integer == 0
        return Accuracies(
            exact_top1=100 * float(right.mean()),
            exact_top5=100 * float((exact < SHOWN).mean()),
            integer_top1=100 * float(kept.mean()),
            integer_top5=100 * float((integer < SHOWN).mean()),
            pair=pair(right, kept),
        )

    def by_class(self) -> list[ClassChange]:
        """Return every class that has images, in order of its index; empty without labels."""
        if self.accuracy() is None:
            return []
        labels, exact, integer = (np.concatenate(part) for part in (self.labels, self.exact_ranks, self.integer_ranks))
        count = int(labels.max()) + 1
        every, right, kept = (np.bincount(part, minlength=count) for part in (labels, labels[exact == 0], labels[integer == 0]))
        return [ClassChange(int(c), int(every[c]), int(right[c]), int(kept[c])) for c in np.flatnonzero(every)]


@dataclass(frozen=True)
class Accuracies:
    """Accuracies in percent. exact: the float model; pair: integer against float, paired by image."""

    exact_top1: float
    exact_top5: float
    integer_top1: float
    integer_top5: float
    pair: Pair


def guesses(scores: NDArray[np.float32] | NDArray[np.float64]) -> tuple[Guess, ...]:
    """Return the five best classes of scores [classes] with their softmax."""
    wide = scores.astype(np.float64)
    shares = np.exp(wide - wide.max())
    shares /= shares.sum()
    return tuple(Guess(label, float(shares[label])) for label in top(scores, SHOWN))
