"""The detections of one image, from the float pipeline or from the integer one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.boxes import Floats


@dataclass(frozen=True)
class Detections:
    """boxes: [n, 4], best first   scores: [n], 0..1   labels: [n], class numbers from 0"""

    boxes: Floats
    scores: Floats
    labels: NDArray[np.int64]


class ImageDetections(Protocol):
    """What was found in one image, by floats or by integers.

    detections: boxes in pixels of the image itself, best first   height, width: of the image
    """

    @property
    def detections(self) -> Detections: ...
    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...

    def masks(self) -> Iterator[NDArray[np.bool_]]:
        """[height, width] of each detection, one at a time: all of a large image would not fit."""
