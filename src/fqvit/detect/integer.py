"""A detector in integers, from pixels to boxes, scores and masks: integer programs, and fixed_*.py between them. No torch.

The flow is that of pipeline.py, which has it in float. Floats appear where a caller asks for them: `detections` of what was
found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.between import FRACTION, SCORE_FRACTION, Ratio
from fqvit.detect.fixed_exp import Integers
from fqvit.detect.fixed_masks import paste
from fqvit.detect.fixed_proposals import Codes
from fqvit.detect.fixed_roialign import Bytes, Cut
from fqvit.detect.heads import Head
from fqvit.detect.proposals import Detections

KEPT_SIZES = 2  # runners: each has its own packed weights and an arena of some hundred MB at a photograph's size
Backend = Literal["native", "reference"]


class CodeMaps(NamedTuple):
    """Of one image. levels: u8 [h, w, C], P2..P5   objectness: i32 [h, w, A], deltas: i32 [h, w, 4 A], P2..P6"""

    levels: list[Bytes]
    objectness: list[Codes]
    deltas: list[Codes]


@dataclass(frozen=True)
class IntegerFound:
    """What was found in one image, best first, as integers.

    boxes: i64 [n, 4] in 1/256 pixel of the image itself   scores: i64 [n] in 2^-24   labels: i64 [n], class numbers from 0
    probabilities: i32 [n, side, side] in 2^-15, of each box's mask   threshold: of its pixels, in 2^-30
    """

    boxes: Integers
    scores: Integers
    labels: Integers
    probabilities: NDArray[np.int32]
    height: int
    width: int
    threshold: int

    @property
    def detections(self) -> Detections:
        """The same as floats; exactly, since units are powers of two."""
        return Detections(self.boxes / 2**FRACTION, self.scores / 2**SCORE_FRACTION, self.labels)

    def masks(self) -> Iterator[NDArray[np.bool_]]:
        """[height, width] of each detection, one at a time: all of a large image would not fit."""
        for square, box in zip(self.probabilities, self.boxes, strict=True):
            yield paste(square, box, self.height, self.width, self.threshold)


class Runner(Protocol):
    def run_all(self, images: NDArray[np.uint8], /) -> tuple[np.ndarray[Any, Any], ...]: ...


@dataclass(frozen=True)
class _Head:
    """One head: what runs it, and how squares are cut for it from each map."""

    def __init__(self, head: Head, zeros: Sequence[int], strides: Sequence[int], ratios: Sequence[Ratio]) -> None:
        self.side, self.run = head.input.shape[0], head.run
        last = 2**head.input.bits - 1
        self.cuts = [
            Cut(stride, zero, ratio, head.input.zero, last) for stride, zero, ratio in zip(strides, zeros, ratios, strict=False)
        ]
