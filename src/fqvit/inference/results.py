"""The classes of classified images, as lists that print as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fqvit.errors import FqvitError
from fqvit.system.text import table


@dataclass(frozen=True)
class Score:
    """A class of a classified image. index: class index   name: None if the file has no class names   logit: code * scale

    probability: softmax of all logits, in float; the order of the classes comes from the integer codes alone
    """

    index: int
    name: str | None
    logit: float
    code: int
    probability: float


class Classification(list[Score]):
    """The best classes of one image, best first. Prints as a table. image: its name"""

    def __init__(self, scores: Iterable[Score], image: str = "image") -> None:
        super().__init__(scores)
        self.image = image

    def __repr__(self) -> str:
        return f"{self.image}\n{table(HEAD, rows_of(self))}" if self else f"{self.image}: no classes"


class Classifications(list[Classification]):
    """The classifications of several images, in their order. Prints as a table with the best class of each image."""

    def __repr__(self) -> str:
        best = [(each.image, *rows_of(each[:1])[0]) for each in self if each]
        return table(("image", *HEAD), best, left=2) if best else "no images"


HEAD = ("name", "class", "probability", "logit")


def rows_of(scores: Sequence[Score]) -> list[tuple[str, ...]]:
    """Return one row of text per class, for a table with the columns HEAD."""
    return [
        (score.name or f"class {score.index}", str(score.index), f"{score.probability:.2%}", f"{score.logit:.2f}")
        for score in scores
    ]


def best_scores(codes: NDArray[np.int32], scale: float, names: Sequence[str] | None, top: int) -> list[Score]:
    """Return the `top` classes of one image, best first; ties: the first class. codes: logits i32 [classes]"""
    if top < 1:
        raise FqvitError(f"top: {top}, expected at least 1.")
    wide = codes.astype(np.int64)
    best = np.argsort(-wide, kind="stable")[:top].tolist()
    shares = np.exp((wide - wide.max()) * scale)
    shares /= shares.sum()
    return [Score(i, None if names is None else names[i], int(codes[i]) * scale, int(codes[i]), float(shares[i])) for i in best]
