"""Run a quantized detector in a worker process, with the time of each part: networks and the integer steps between them.

Imports no torch. See also: detector_floats.py (the float detector), detector.py (measures both), worker.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from fqvit.detect.fixed.detector import IntegerDetector
from fqvit.detect.images import Input
from fqvit.runtime.native import OpTime

if TYPE_CHECKING:
    from fqvit.detect.program import DetectorProgram

NETWORKS = ("backbone", "FPN", "RPN", "box heads", "mask heads")
BETWEEN = ("input", "proposals", "RoIAlign", "detections")
MODULES = {"backbone": "backbone", "neck": "FPN", "rpn_head": "RPN"}  # first word of a buffer of the pyramid -> part
STEPS = {"resize": "input", "proposals": "proposals", "roi_align": "RoIAlign", "detections": "detections"}  # tag -> part


class IntegerRun:
    """A detector and one image. parts: wall seconds of each part in the latest run"""

    def __init__(self, program: DetectorProgram | str, pixels: np.ndarray[Any, Any], threads: int) -> None:
        """program: a program in memory, or its path"""
        self.detector = IntegerDetector(program, threads)
        self.image = Input(pixels, pixels.shape[0], pixels.shape[1])
        self.steps: list[OpTime] = []

    @property
    def parts(self) -> dict[str, float]:
        return by_part(self.steps)

    def __call__(self) -> np.ndarray[Any, Any]:
        """Return the scores of the detections, [1, n]."""
        found, self.steps = self.detector.profile(self.image)
        return found.detections.scores[None]


def by_part(steps: Iterable[OpTime]) -> dict[str, float]:
    """Sum the seconds of the steps by part. All parts are present, even those that did not run."""
    sums = dict.fromkeys((*NETWORKS, *BETWEEN), 0.0)
    for step in steps:
        sums[part_of(step)] += step.seconds
    return sums


def part_of(step: OpTime) -> str:
    """Return the part of a step of IntegerDetector.profile."""
    if step.op == "head":
        return "box heads" if step.buffer.startswith("boxes") else "mask heads"
    return STEPS.get(step.op) or MODULES.get(step.buffer.partition(".")[0], "backbone")
