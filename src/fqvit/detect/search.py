"""Compare the quantized networks of a detector with the float ones, without labels, for recipe auto.

The float detector finds boxes in crops of images; both detectors then compute their outputs for these boxes. The outputs are
treated as probability distributions: classes of boxes, objectness of anchors and pixels of masks as probabilities, box
regressions as means of normal distributions with variance 1. `kl` is the sum of their mean Kullback-Leibler divergences.
`agreement` and `loss` are those of the classes of candidate boxes: boxes with a class whose score is above the setting `score`.
See also: quant/methods/auto.py (the search), sample.py (crops).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fqvit.detect.boxes import Floats
from fqvit.detect.float.proposals import propose, refine, select_detections, softmax
from fqvit.detect.float.roialign import multiscale_roi_align
from fqvit.detect.model.detector import FloatDetector
from fqvit.detect.model.pyramid import split_outputs
from fqvit.models.graph import trace
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.quant.calibration import Calibration, Measure
from fqvit.quant.methods import auto
from fqvit.quant.simulate import Simulation
from fqvit.system.progress import Progress

BATCH = 8  # crops per run of the pyramid
BOXES = 16  # proposals per crop
MASKS = 4  # detections per crop whose masks are compared
ANCHORS = 64  # anchors per crop whose objectness is compared: those with the highest objectness

Run = Callable[[Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Target:
    """What is compared in one crop. anchors: indices over all levels   boxes: one array [n, 4] per stage

    masks: boxes [m, 4] whose masks are compared   labels: classes of these masks
    """

    anchors: NDArray[np.int64]
    boxes: list[Floats]
    masks: Floats
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class PyramidValues:
    """Outputs of the pyramid for all crops, where they are compared: objectness [A], deltas [A, 4], RoI features per head."""

    objectness: Tensor
    deltas: Tensor
    features: Mapping[str, Tensor]


@dataclass(frozen=True)
class Outputs:
    """The compared outputs of a detector. classes: logits, mean over stages   deltas: of boxes, all stages   masks: logits"""

    pyramid: PyramidValues
    classes: Tensor
    deltas: Tensor
    masks: Tensor


class DetectorSubject:
    """The networks of a detector, for auto.choose_parts. inputs: of every network, as in sample.py"""

    @torch.no_grad()
    def __init__(
        self,
        detector: FloatDetector,
        models: Mapping[str, FloatModel],
        inputs: Mapping[str, NDArray[Any]],
        progress: Progress | None = None,
    ) -> None:
        self.detector, self.models, self._inputs = detector, models, inputs
        self.crops = inputs["pyramid"]
        self.images = len(self.crops)
        self.stages = detector.module.config.stages
        self._simulations: dict[str, tuple[Calibration, Simulation]] = {}
        self._values: tuple[Calibration, int, PyramidValues] | None = None  # the latest result of _simulated_values
        graph = trace(models["pyramid"].module)
        starts = range(0, self.images, BATCH)
        self.targets: list[Target] = []
        for start in progress(starts, len(starts), "finding boxes") if progress else starts:
            outputs = split_outputs(graph.run_all(self._pixels(start, self.images)))
            self.targets += [self._target(*_crop(outputs, i)) for i in range(len(outputs.levels[0]))]
        heads: dict[str, Run] = {part: trace(model.module).run_all for part, model in models.items() if part != "pyramid"}
        self.exact = self._outputs(self._pyramid_values(graph.run_all, self.images), heads, self.images)

    def inputs(self, part: str) -> NDArray[Any]:
        return self._inputs[part]

    @torch.no_grad()
    def measure(self, found: auto.Parts, count: int) -> Measure:
        heads: dict[str, Run] = {part: self._simulation(part, each).run_features for part, each in found.items()}
        values = self._simulated_values(found["pyramid"], count)
        return self._compare(self._outputs(values, heads, count), count)

    def _compare(self, other: Outputs, count: int) -> Measure:
        boxes = sum(len(target.boxes[0]) for target in self.targets[:count])
        anchors = sum(len(target.anchors) for target in self.targets[:count])
        masks = sum(len(target.labels) for target in self.targets[:count])
        exact, pyramid = self.exact, self.exact.pyramid
        logits = exact.classes[:boxes]
        scores = logits.double().softmax(-1)[:, :-1].amax(-1)
        candidates = scores > self.detector.settings.score
        if not bool(candidates.any()):
            candidates = torch.ones_like(candidates)
        classes = auto.measure(logits[candidates], other.classes[candidates])
        kl = classes.kl + _normal(_first(exact.deltas, boxes, self.stages), other.deltas)
        kl += _binary(pyramid.objectness[:anchors], other.pyramid.objectness)
        kl += _normal(pyramid.deltas[:anchors], other.pyramid.deltas) + _binary(exact.masks[:masks], other.masks)
        return msgspec.structs.replace(classes, kl=kl)

    def _pixels(self, start: int, count: int) -> Tensor:
        return normalise(self.crops[start : min(start + BATCH, count)], self.models["pyramid"].preprocess)

    def _target(self, levels: Sequence[Tensor], objectness: Sequence[Tensor], deltas: Sequence[Tensor]) -> Target:
        """Find boxes in one crop with the float detector."""
        s, size = self.detector.settings, (self.crops.shape[1], self.crops.shape[2])
        every = torch.cat([x.flatten() for x in objectness])
        anchors = every.argsort(descending=True, stable=True)[:ANCHORS].numpy()
        maps = [x.contiguous().numpy() for x in levels]
        proposals = propose([x.numpy() for x in objectness], [x.numpy() for x in deltas], size, s)[:BOXES]
        boxes, total = [proposals], np.zeros((1, 1))
        for stage in range(self.stages):
            head = self.detector.module.box_heads[stage]
            features = multiscale_roi_align(maps, boxes[-1], self._side("boxes"), s.finest, s.strides)
            logits, moves = (x.double().numpy() for x in head(torch.from_numpy(features)))
            total = total + logits / self.stages
            if stage < self.stages - 1:
                boxes.append(refine(boxes[-1], logits, moves, s.stds[stage], size))
        found = select_detections(boxes[-1], total, moves, s.stds[self.stages - 1], size, s)
        if len(found.boxes):
            return Target(anchors, boxes, found.boxes[:MASKS], found.labels[:MASKS])
        # If nothing is detected, masks are compared in proposals, for their most probable class.
        labels = softmax(total)[:MASKS, :-1].argmax(1)
        return Target(anchors, boxes, proposals[:MASKS], labels)

    def _side(self, kind: str) -> int:
        square = self.models[f"{kind}.0"].square
        assert square is not None
        return square[0]

    def _pyramid_values(self, run: Run, count: int) -> PyramidValues:
        s = self.detector.settings
        objectness, deltas = [], []
        features: dict[str, list[NDArray[np.float32]]] = {part: [] for part in self.models if part != "pyramid"}
        for start in range(0, count, BATCH):
            outputs = split_outputs(run(self._pixels(start, count)))
            for i, target in enumerate(self.targets[start : min(start + BATCH, count)]):
                levels, logits, moves = _crop(outputs, i)
                objectness.append(torch.cat([x.flatten() for x in logits])[target.anchors])
                deltas.append(torch.cat([x.reshape(-1, 4) for x in moves])[target.anchors])
                maps = [x.contiguous().numpy() for x in levels]
                for part in features:
                    kind, _, stage = part.partition(".")
                    boxes = target.boxes[int(stage)] if kind == "boxes" else target.masks
                    features[part].append(multiscale_roi_align(maps, boxes, self._side(kind), s.finest, s.strides))
        joined = {part: torch.from_numpy(np.concatenate(arrays)) for part, arrays in features.items()}
        return PyramidValues(torch.cat(objectness), torch.cat(deltas), joined)

    def _outputs(self, values: PyramidValues, heads: Mapping[str, Run], count: int) -> Outputs:
        labels = torch.from_numpy(np.concatenate([target.labels for target in self.targets[:count]]))
        classes: list[Tensor] = []
        deltas: list[Tensor] = []
        masks: list[Tensor] = []
        for stage in range(self.stages):
            logits, moves = heads[f"boxes.{stage}"](values.features[f"boxes.{stage}"])
            classes.append(logits / self.stages)
            deltas.append(moves.reshape(len(logits), -1))
            (pixels,) = heads[f"masks.{stage}"](values.features[f"masks.{stage}"])
            masks.append(pixels[torch.arange(len(labels)), :, :, labels] / self.stages)
        return Outputs(values, torch.stack(classes).sum(0), torch.cat(deltas), torch.stack(masks).sum(0))

    def _simulation(self, part: str, calibration: Calibration) -> Simulation:
        """Return the simulation of a network. The latest one is kept: most measurements change only one network."""
        kept = self._simulations.get(part)
        if kept is None or kept[0] is not calibration:
            kept = self._simulations[part] = calibration, Simulation(self.models[part], calibration)
        return kept[1]

    def _simulated_values(self, calibration: Calibration, count: int) -> PyramidValues:
        if self._values is None or self._values[0] is not calibration or self._values[1] != count:
            run = self._simulation("pyramid", calibration).run_features
            self._values = calibration, count, self._pyramid_values(run, count)
        return self._values[2]


def _crop(outputs: Sequence[Sequence[Tensor]], i: int) -> list[list[Tensor]]:
    """Return levels, objectness and deltas of crop i."""
    return [[x[i] for x in part] for part in outputs]


def _first(deltas: Tensor, boxes: int, stages: int) -> Tensor:
    """Return the deltas of the first boxes of every stage."""
    return torch.cat([part[:boxes] for part in deltas.chunk(stages)])


def _normal(exact: Tensor, other: Tensor) -> float:
    """Return the mean divergence of normal distributions of variance 1 with these means: half the squared distance."""
    per_box = max(exact.shape[-1] // 4, 1)  # if every class has its own regression: their mean
    return float((exact.double() - other.double()).square().sum(-1).mean()) / 2 / per_box if len(exact) else 0.0


def _binary(exact: Tensor, other: Tensor) -> float:
    """Return the mean divergence of probabilities, given as logits."""
    p, a, b = exact.double().sigmoid(), exact.double(), other.double()
    kl = p * (F.logsigmoid(a) - F.logsigmoid(b)) + (1 - p) * (F.logsigmoid(-a) - F.logsigmoid(-b))
    return float(kl.mean()) if len(exact) else 0.0
