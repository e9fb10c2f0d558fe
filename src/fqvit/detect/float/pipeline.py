"""Detect objects in one image, in float, with any implementation of the networks.

One stage is Mask R-CNN; several stages are Cascade Mask R-CNN: boxes are refined from stage to stage, class logits and mask
probabilities are averaged. `Networks` is the interface of the networks, which networks.py implements with torch.
See also: fixed/reference.py, the same flow in integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.boxes import Floats
from fqvit.detect.detections import Detections
from fqvit.detect.float.masks import paste
from fqvit.detect.float.proposals import propose, refine, select_detections, sigmoid
from fqvit.detect.float.roialign import Floats32, multiscale_roi_align
from fqvit.detect.images import Input, Pixels
from fqvit.detect.results import coco_results as coco_results  # re-exported for fqvit.detect.pipeline of version 0.1
from fqvit.detect.settings import DetectSettings


class Maps(NamedTuple):
    """The pyramid's outputs for one image.

    levels: [h, w, C] for P2..P5   objectness: [h, w, A], deltas: [h, w, 4 * A], both for P2..P6
    """

    levels: list[Floats32]
    objectness: list[Floats32]
    deltas: list[Floats32]


class Networks(Protocol):
    """The networks of a detector. box_side, mask_side: cells per side of the heads' RoI features"""

    stages: int
    box_side: int
    mask_side: int

    def maps(self, pixels: Pixels) -> Maps:
        """Run the pyramid on pixels u8 [h, w, 3], resized but not padded."""

    def boxes(self, stage: int, rois: Floats32) -> tuple[Floats32, Floats32]:
        """RoI features [n, side, side, C] -> class logits [n, classes + 1], deltas [n, 4] or [n, 4 * classes]."""

    def masks(self, stage: int, rois: Floats32, labels: NDArray[np.int64]) -> Floats32:
        """RoI features [n, side, side, C] -> mask logits [n, 2 * side, 2 * side] of class labels[i] for RoI i."""


@dataclass(frozen=True)
class FloatFound:
    """The float detections of one image.

    probabilities: [n, side, side], one mask per box   threshold: smallest probability of a mask pixel
    """

    detections: Detections
    probabilities: Floats
    height: int
    width: int
    threshold: float

    def masks(self) -> Iterator[NDArray[np.bool_]]:
        for one, box in zip(self.probabilities, self.detections.boxes, strict=True):
            yield paste(one, box, self.height, self.width, self.threshold)


def detect(networks: Networks, image: Input, s: DetectSettings) -> FloatFound:
    """Return all detections of one image, best first."""
    maps = networks.maps(image.pixels)
    proposals = propose(
        [x.astype(np.float64) for x in maps.objectness], [x.astype(np.float64) for x in maps.deltas], image.size, s
    )
    found = classify(networks, maps.levels, proposals, image.size, s)
    rois = multiscale_roi_align(maps.levels, found.boxes, networks.mask_side, s.finest, s.strides)
    side = 2 * networks.mask_side
    probabilities = np.zeros((len(found.boxes), side, side))
    if len(rois):
        for stage in range(networks.stages):
            probabilities += sigmoid(networks.masks(stage, rois, found.labels).astype(np.float64)) / networks.stages
    original = Detections(image.to_original(found.boxes), found.scores, found.labels)
    return FloatFound(original, probabilities, image.height, image.width, s.mask)


def classify(
    networks: Networks, levels: Sequence[Floats32], boxes: Floats, size: tuple[int, int], s: DetectSettings
) -> Detections:
    """Run the box heads on proposals [n, 4]; returns detections in pixels of the network's input."""
    if len(boxes) == 0:
        return Detections(np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64))
    total: Floats | float = 0.0
    for stage in range(networks.stages):
        rois = multiscale_roi_align(levels, boxes, networks.box_side, s.finest, s.strides)
        logits, deltas = (x.astype(np.float64) for x in networks.boxes(stage, rois))
        total = total + logits
        if stage < networks.stages - 1:
            boxes = refine(boxes, logits, deltas, s.stds[stage], size)
    return select_detections(boxes, np.asarray(total) / networks.stages, deltas, s.stds[networks.stages - 1], size, s)
