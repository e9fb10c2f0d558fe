"""Learn weights, biases and scales segment by segment, so that each segment reproduces its output in the float model.

A segment is the part of the network between two residual sums: attention, or an MLP. In network order, for each segment:
  1. start: scales by least error (ranges.py), weights by compensated rounding (compensate.py);
  2. learn: Adam minimizes the squared error of the segment's output on calibration images. The inputs are those of the
     quantized network, the targets those of the float model (BRECQ, Li 2021). Weights are learned through their rounding,
     together with the scales of weights and activations (LSQ) and the biases.
The errors of tokens and channels are weighted by their importance for the result (segments.py).
MLPs treat every token alike: they are learned on random tokens, which is much cheaper than whole images.
A detector's feature pyramid and heads have no residual sums: their weights are compensated, not learned.
See also: trainable.py (the parameters), lockstep.py (runs both networks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.models.graph import Node
from fqvit.models.load import FloatModel
from fqvit.quant.calibration import Calibration
from fqvit.quant.methods.compensate import Compensation
from fqvit.quant.methods.lockstep import InputBatches
from fqvit.quant.methods.segments import Segment, importance, segments
from fqvit.quant.methods.trainable import Rates, Trainable
from fqvit.system.progress import Progress

STEPS = 300  # steps of Adam per segment
WEIGHT_STEPS = 120  # if no scales of sites are learned, because only the weights cause errors
TOKENS = 512  # tokens per step, for segments that treat tokens alike
IMAGES_PER_STEP = 4  # for other segments
IMPORTANCE_IMAGES = 48
RATES = Rates(scale=0.01, zero=0.02, code=0.015, bias=0.002)


@dataclass(frozen=True)
class Examples:
    """Inputs and targets of a segment: tokens [R, C] that are treated alike, or images [N, T, C]. weight: [T, C] or [1, 1]"""

    x: Tensor
    target: Tensor
    weight: Tensor
    alike: bool

    def draw(self, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return random inputs, targets and weights of their errors. Important tokens are drawn more often."""
        if not self.alike or self.x.ndim != 3 or self.weight.shape[:-1] != self.x.shape[1:2]:
            chosen = torch.randint(len(self.x), (IMAGES_PER_STEP,), generator=random)
            return self.x[chosen], self.target[chosen], self.weight
        tokens = self.weight.mean(-1)
        token = torch.multinomial(tokens, TOKENS, replacement=True, generator=random)
        image = torch.randint(len(self.x), (TOKENS,), generator=random)
        return self.x[image, token], self.target[image, token], self.weight[token] / tokens[token, None]


class Reconstruction(Compensation):
    """Compensated rounding, followed by learning at the end of every segment."""

    def __init__(self, model: FloatModel, calibration: Calibration, weights: dict[str, Tensor]) -> None:
        """weights: the importance of the outputs of segments"""
        super().__init__(model, calibration)
        self.weights = weights
        self.random = torch.Generator().manual_seed(0)
        self.ends = {each.end.name: each for each in segments(self.graph)[:-1]}
        self.start: tuple[str, Sequence[Tensor]] = ("", ())  # the input of the current segment in the quantized network
        self.errors: dict[str, tuple[float, float]] = {}  # of every segment, before and after learning, relative to the output

    def quantize_node(self, node: Node, exact: InputBatches, simulated: InputBatches) -> list[Tensor]:
        """Quantize the node; if it ends a segment, learn the segment and return the new outputs."""
        for name, batches in zip(node.inputs, simulated, strict=True):
            if name in self.ends:
                self.start = (name, batches)
        outputs = super().quantize_node(node, exact, simulated)
        segment = self.ends.get(node.name)
        if segment is None or segment.start != self.start[0] or not any(each.name in self.chosen for each in segment.nodes):
            return outputs
        target = torch.cat([node.leaf(*xs, *node.params) for xs in zip(*exact, strict=True)])
        weight = self.weights.get(node.name, torch.ones(target.shape[1:]))
        self._learn(segment, Examples(torch.cat(list(self.start[1])), target, weight, segment.alike))
        return [segment.run(x, self.simulation.call, self.simulation.visit) for x in self.start[1]]

    def _learn(self, segment: Segment, examples: Examples) -> None:
        sites = [node.name for node in segment.nodes if node.name in self.searched]
        learned = Trainable(self.simulation, segment.nodes, sites, self.chosen, self.spread)
        steps = STEPS if sites else WEIGHT_STEPS
        schedule = learned.schedule(RATES, steps)
        losses = []
        for _ in range(steps):
            x, target, weight = examples.draw(self.random)
            with torch.enable_grad():
                # Residual sums, scores and attention have far less error than other sites: they stay exact.
                loss = ((segment.run(x, learned.call, learned.visit) - target).square() * weight).mean()
            schedule.step(loss)
            losses.append(loss.item())
        few = max(1, steps // 10)
        self.errors[segment.end.name] = (float(np.mean(losses[:few])), float(np.mean(losses[-few:])))
        self.chosen.update(learned.keep())


@torch.no_grad()
def reconstruct(
    model: FloatModel, calibration: Calibration, images: NDArray[Any], progress: Progress | None = None
) -> Calibration:
    """Return `calibration` with learned scales, weights and biases; images: as in compensate.

    A detector's head has no residual sums and so no segments: its weights are compensated, not learned.
    """
    weights: dict[str, Tensor] = {}
    if model.square is None:
        weights = importance(calibration.graph(model), model.preprocess, images[:IMPORTANCE_IMAGES])
    run = Reconstruction(model, calibration, weights)
    run.over(images, progress, "learning weights")
    return run.result()
