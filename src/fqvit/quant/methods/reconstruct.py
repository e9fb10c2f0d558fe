"""Learn weights, biases and scales segment by segment, so that each segment reproduces its output in the float model.

A segment is the part of the network between two residual sums: attention, or an MLP. In network order, for each segment:
  1. start: scales by least error (ranges.py), weights by compensated rounding (compensate.py);
  2. learn: Adam minimizes the squared error of the segment's output on calibration images. The inputs are those of the
     quantized network, the targets those of the float model (BRECQ, Li 2021). Weights are learned through their rounding,
     together with the scales of weights and activations (LSQ) and the biases.
The errors of tokens and channels are weighted by their importance for the result (segments.py).
MLPs treat every token alike: they are learned on random tokens, which is much cheaper than whole images.
A detector's feature pyramid and heads have no residual sums: their weights are compensated, not learned.
See also: learned.py (the parameters), lockstep.py (runs both networks).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fqvit.models import layers
from fqvit.models.graph import Node
from fqvit.models.load import FloatModel
from fqvit.quant.calibration import Calibration
from fqvit.quant.methods.compensate import Compensation
from fqvit.quant.methods.learned import LayerParameters, SiteParameters
from fqvit.quant.methods.lockstep import InputBatches
from fqvit.quant.methods.segments import Segment, importance, segments
from fqvit.quant.qparams import QParams
from fqvit.quant.weights import bits_and_group, short_output_scales
from fqvit.system.progress import Progress

STEPS = 60  # steps of Adam per segment
WEIGHT_STEPS = 120  # if no scales of sites are learned; steps are then cheaper, and only the weights cause errors
TOKENS = 512  # tokens per step, for segments that treat tokens alike
IMAGES_PER_STEP = 4  # for other segments
IMPORTANCE_IMAGES = 48
# Learning rates; they rise for WARMUP steps and then follow a cosine to 0.
CODE_RATE = 0.015  # of weights, in codes
SCALE_RATE = 0.01  # of the logarithms of scales
ZERO_RATE = 0.02  # of zero points, in codes
BIAS_RATE = 0.002  # of biases, in standard deviations of the output
WARMUP = 10


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
        sites, linears = self._parameters(segment)
        optimizer = _optimizer(sites, linears)
        rates = [float(group["lr"]) for group in optimizer.param_groups]

        def call(node: Node, inputs: list[Tensor]) -> Tensor:
            if node.name in linears:
                return F.linear(inputs[0], *linears[node.name].decoded(self._input_scales(node, sites)))
            found: Tensor = node.leaf(*inputs, *node.params)
            return found

        def visit(node: Node, y: Tensor) -> Tensor:
            # Residual sums, scores and attention have far less error than other sites: they stay exact.
            return sites[node.name].apply(y) if node.name in sites else y

        losses = []
        steps = STEPS if sites else WEIGHT_STEPS
        for step in range(steps):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / steps)) * min(1.0, (step + 1) / WARMUP)
            x, target, weight = examples.draw(self.random)
            with torch.enable_grad():
                loss = ((segment.run(x, call, visit) - target).square() * weight).mean()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        few = max(1, steps // 10)
        self.errors[segment.end.name] = (float(np.mean(losses[:few])), float(np.mean(losses[-few:])))
        self._keep(segment, sites, linears)

    def _input_scales(self, node: Node, sites: dict[str, SiteParameters]) -> Tensor:
        """Return the scales [K] of the codes that a linear layer reads, with gradients if they are learned."""
        assert isinstance(node.leaf, layers.Linear)
        name, inputs = node.inputs[0], node.leaf.weight.shape[1]
        if name in sites:
            scale = sites[name].scale()
            return scale.repeat(inputs // len(scale))
        scales = self.simulation.input_scales(node)
        assert scales is not None
        return torch.from_numpy(scales).float().expand(inputs)

    def _parameters(self, segment: Segment) -> tuple[dict[str, SiteParameters], dict[str, LayerParameters]]:
        sites: dict[str, SiteParameters] = {}
        linears: dict[str, LayerParameters] = {}
        for node in segment.nodes:
            if node.name in self.searched:
                value = sites.get(self.value_site(node) or "")
                sites[node.name] = SiteParameters(node.leaf.role, self.simulation.sites[node.name], value)
        for node in segment.nodes:
            if node.name in self.chosen:
                assert isinstance(node.leaf, layers.Linear)
                bits, group = bits_and_group(self.recipe, node)
                scales = self._input_scales(node, {})
                linears[node.name] = LayerParameters(
                    node.leaf, self.chosen[node.name], bits, group, scales, self.spread[node.name]
                )
        return sites, linears

    def _keep(self, segment: Segment, sites: dict[str, SiteParameters], linears: dict[str, LayerParameters]) -> None:
        """Convert the learned parameters to integers."""
        found: dict[str, QParams] = {}
        for name, site in sites.items():
            source = self.value_site(self.graph.node(name)) or ""
            found[name] = site.result(found.get(source, self.simulation.sites.get(source)))
        self.simulation.sites.update(found)
        for node in segment.nodes:
            if node.name in linears:
                leaf = node.leaf
                assert isinstance(leaf, layers.Linear)
                output = short_output_scales(self.recipe, leaf, self.simulation.sites.get(node.name), len(leaf.weight))
                self.chosen[node.name] = linears[node.name].result(self._input_scales(node, {}), output)
                self.simulation.use(node, self.chosen[node.name])


def _optimizer(sites: dict[str, SiteParameters], linears: dict[str, LayerParameters]) -> torch.optim.Adam:
    groups = [
        ([each.logs for each in sites.values()] + [each.logs for each in linears.values()], SCALE_RATE),
        ([site.zero for site in sites.values() if site.learns_zeros], ZERO_RATE),
        ([each.move for each in linears.values()], CODE_RATE),
        ([each.shift for each in linears.values()], BIAS_RATE),
    ]
    return torch.optim.Adam([{"params": params, "lr": rate} for params, rate in groups if params], betas=(0.9, 0.95))


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
