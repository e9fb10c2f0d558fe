"""Run the float detector of a program in a worker process, with PyTorch, and time each of its networks.

The networks run as fast as eager PyTorch can (eager.py). The steps between them are those of fqvit.detect.float, in numpy.
See also: detector_runs.py (the quantized detector), detector.py (measures both).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fqvit.bench.detector_runs import NETWORKS
from fqvit.bench.eager import quicken
from fqvit.detect.float.networks import FloatNetworks
from fqvit.detect.float.pipeline import detect
from fqvit.detect.float.roialign import Floats32
from fqvit.detect.images import Input
from fqvit.detect.model.detector import FloatDetector, build_detector
from fqvit.detect.model.rebuild import config_of_program, load_for_program
from fqvit.detect.program import DetectorProgram
from fqvit.models.device import keep_freed_memory


def float_detector(program: DetectorProgram, weights: str | None) -> FloatDetector:
    """Load the float detector of a program with its settings, or build one with random weights of the same shapes."""
    if weights is None:
        module = build_detector(config_of_program(program)).eval()
        return FloatDetector(program.model, module, program.settings, "random weights")
    return load_for_program(program, weights)


def float_run(file: str, pixels: NDArray[Any], threads: int) -> FloatRun:
    """Load what a worker runs.

    file: JSON with the program's path `program`, the checkpoint `weights` or null, and `boxes`, the number of detections of the
    program. With random weights, the mask heads run on as many boxes.
    """
    asked = json.loads(Path(file).read_text(encoding="utf-8"))
    keep_freed_memory()  # as in worker.py
    torch.set_num_threads(threads)
    detector = float_detector(DetectorProgram.load(asked["program"]), asked["weights"])
    if asked["weights"] is not None:
        return FloatRun(detector, pixels)
    settings = msgspec.structs.replace(detector.settings, detections=max(asked["boxes"], 1))
    return FloatRun(replace(detector, settings=settings), pixels, asked["boxes"])


class FloatRun:
    """A float detector and one image. parts: wall seconds of each network in the latest run

    boxes: the mask heads run on at least this many boxes
    """

    def __init__(self, detector: FloatDetector, pixels: NDArray[Any], boxes: int = 0) -> None:
        self.settings, self.boxes = detector.settings, boxes
        self.image = Input(pixels, pixels.shape[0], pixels.shape[1])
        self.parts: dict[str, float] = {}
        self.networks = TimedNetworks(detector, self.image, self._add)

    def __call__(self) -> NDArray[Any]:
        """Return the scores of the detections, [1, n]."""
        self.parts = dict.fromkeys(NETWORKS, 0.0)
        found = detect(self.networks, self.image, self.settings)
        missing = self.boxes - len(found.detections.labels)
        if missing > 0:
            self.networks.run_mask_heads(missing)
        return found.detections.scores[None]

    def _add(self, part: str, seconds: float) -> None:
        self.parts[part] += seconds


class TimedNetworks(FloatNetworks):
    """The float networks. add: called with the name of a network and its wall seconds after each run"""

    def __init__(self, detector: FloatDetector, image: Input, add: Callable[[str, float], None]) -> None:
        super().__init__(detector)
        self.add = add
        self.channels = detector.module.config.channels
        pyramid = quicken(self.pyramid(image.padded))
        for name, part in (("backbone", "backbone"), ("neck", "FPN"), ("rpn_head", "RPN")):
            _time(pyramid.get_submodule(name), part, add)
        for heads, part in ((self.module.box_heads, "box heads"), (self.module.mask_heads, "mask heads")):
            for head in heads:
                _time(head, part, add)

    def run_mask_heads(self, count: int) -> None:
        """Run the mask heads on `count` boxes whose features are zeros."""
        rois: Floats32 = np.zeros((count, self.mask_side, self.mask_side, self.channels), np.float32)
        for stage in range(self.stages):
            self.masks(stage, rois, np.zeros(count, np.int64))


def _time(module: nn.Module, part: str, add: Callable[[str, float], None]) -> None:
    """Call add(part, seconds) after every run of the module."""
    start = 0.0

    def before(*_: object) -> None:
        nonlocal start
        start = time.perf_counter()

    def after(*_: object) -> None:
        add(part, time.perf_counter() - start)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
