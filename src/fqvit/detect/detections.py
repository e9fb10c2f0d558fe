"""The detections of one image: the result types that float and integer detectors share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.boxes import Floats


@dataclass(frozen=True)
class Detections:
    """Detected boxes, best first. boxes: [n, 4]   scores: [n], 0..1   labels: [n], class indices from 0"""

    boxes: Floats
    scores: Floats
    labels: NDArray[np.int64]


class ImageDetections(Protocol):
    """The detections and masks of one image.

    detections: boxes in pixels of the original image, best first   height, width: size of that image
    """

    @property
    def detections(self) -> Detections: ...
    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...

    def masks(self) -> Iterator[NDArray[np.bool_]]:
        """Yield the mask [height, width] of each detection; the masks of a large image may not fit into memory together."""
