"""The detections of one image as integers: the result of the compiled and of the reference detector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.detections import Detections
from fqvit.detect.fixed.constants import BOX_FRACTION, SCORE_FRACTION
from fqvit.detect.fixed.exp import Integers
from fqvit.detect.fixed.masks import paste
from fqvit.system.text import table

Paste = Callable[[NDArray[np.int32], Integers, int, int, int], NDArray[np.bool_]]


ROWS = 20  # maximum number of rows in a printed table of detections


@dataclass(frozen=True, repr=False)
class IntegerFound:
    """The detections of one image as integers, best first.

    boxes: i64 [n, 4] in 1/256 pixel of the original image   scores: i64 [n] in 2^-24   labels: i64 [n], class indices from 0
    probabilities: i32 [n, side, side] in 2^-15, one mask per box   threshold: smallest probability of a mask pixel, in 2^-30
    paste: the reference or the compiled function; both give the same masks   classes: class names, None if unknown
    """

    boxes: Integers
    scores: Integers
    labels: Integers
    probabilities: NDArray[np.int32]
    height: int
    width: int
    threshold: int
    paste: Paste = field(default=paste, repr=False)
    classes: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        """Return a table of the detections, with at most ROWS rows."""
        found = self.detections
        rows = [
            (self._name(int(label)), f"{score:.3f}", *(f"{side:.1f}" for side in box))
            for box, score, label in zip(found.boxes[:ROWS], found.scores[:ROWS], found.labels[:ROWS], strict=True)
        ]
        total = f"{len(self.labels)} objects in {self.width} x {self.height} pixels"
        if not rows:
            return total
        more = f"\n... and {len(self.labels) - ROWS} more" if len(self.labels) > ROWS else ""
        return f"{total}\n{table(('object', 'score', 'left', 'top', 'right', 'bottom'), rows)}{more}"

    def _name(self, label: int) -> str:
        return self.classes[label] if self.classes else f"class {label}"

    @property
    def detections(self) -> Detections:
        """The same values as floats; exact, because the units are powers of two."""
        return Detections(self.boxes / 2**BOX_FRACTION, self.scores / 2**SCORE_FRACTION, self.labels)

    def masks(self) -> Iterator[NDArray[np.bool_]]:
        """Yield the mask [height, width] of each detection; all masks of a large image at once may not fit into memory."""
        for one, box in zip(self.probabilities, self.boxes, strict=True):
            yield self.paste(one, box, self.height, self.width, self.threshold)
