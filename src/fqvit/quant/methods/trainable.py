"""The learned parameters of a part of a quantized network, or of all of it, and their conversion to integers.

See also: learned.py (the parameters of one site and of one layer), reconstruct.py (learns them).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fqvit.models import layers
from fqvit.models.graph import Node
from fqvit.quant.methods.learned import LayerParameters, SiteParameters
from fqvit.quant.qparams import QParams
from fqvit.quant.simulate import Simulation
from fqvit.quant.weights import QuantizedLinear, bits_and_group


@dataclass(frozen=True)
class Rates:
    """Learning rates: of the logarithms of scales, of zero points and weights in codes, of biases in standard deviations.

    The rates rise for `warmup` steps and then follow a cosine to 0.
    """

    scale: float
    zero: float
    code: float
    bias: float
    warmup: int = 10


class Trainable:
    """The learned parameters of some nodes of a simulation: scales and zero points of sites, weights and biases of layers."""

    def __init__(
        self,
        simulation: Simulation,
        nodes: Iterable[Node],
        sites: Iterable[str],
        chosen: Mapping[str, QuantizedLinear],
        spread: Mapping[str, float],
    ) -> None:
        """sites: names of the sites that are learned   chosen: the weights of the layers that are learned
        spread: the standard deviations of the outputs of layers, the units of bias changes
        """
        self.simulation, self.nodes = simulation, tuple(nodes)
        self.sites: dict[str, SiteParameters] = {}
        self.linears: dict[str, LayerParameters] = {}
        wanted = frozenset(sites)
        for node in self.nodes:
            if node.name in wanted:
                value = self.sites.get(simulation.value_site(node) or "")
                self.sites[node.name] = SiteParameters(node.leaf.role, simulation.sites[node.name], value)
        for node in self.nodes:
            if node.name in chosen:
                assert isinstance(node.leaf, layers.Linear)
                bits, _ = bits_and_group(simulation.calibration.recipe, node)
                scales = self._known_scales(node)
                self.linears[node.name] = LayerParameters(node.leaf, chosen[node.name], bits, scales, spread[node.name])

    def call(self, node: Node, inputs: list[Tensor]) -> Tensor:
        """Compute a learned layer with its weights as they are now, or another node in float; see Graph.run."""
        if node.name in self.linears:
            return F.linear(inputs[0], *self.linears[node.name].decoded(self._input_scales(node)))
        found: Tensor = node.leaf(*inputs, *node.params)
        return found

    def visit(self, node: Node, y: Tensor) -> Tensor:
        """Quantize a learned site. Other sites stay exact."""
        return self.sites[node.name].apply(y) if node.name in self.sites else y

    def _known_scales(self, node: Node) -> Tensor:
        """Return the scales [K] of the codes that a linear layer reads, without gradients."""
        assert isinstance(node.leaf, layers.Linear)
        scales = self.simulation.input_scales(node)
        assert scales is not None
        return torch.from_numpy(scales).float().expand(node.leaf.weight.shape[1])

    def _input_scales(self, node: Node) -> Tensor:
        """Return the scales [K] of the codes that a linear layer reads, with gradients if they are learned."""
        assert isinstance(node.leaf, layers.Linear)
        if node.inputs[0] not in self.sites:
            return self._known_scales(node)
        scale = self.sites[node.inputs[0]].scale()
        return scale.repeat(node.leaf.weight.shape[1] // len(scale))

    def schedule(self, rates: Rates, steps: int) -> Schedule:
        """Return an optimizer of all parameters for this number of steps."""
        groups = [
            ([each.logs for each in self.sites.values()] + [each.logs for each in self.linears.values()], rates.scale),
            ([site.zero for site in self.sites.values() if site.learns_zeros], rates.zero),
            ([each.move for each in self.linears.values()], rates.code),
            ([each.shift for each in self.linears.values()], rates.bias),
        ]
        used = [{"params": params, "lr": rate} for params, rate in groups if params]
        return Schedule(torch.optim.Adam(used, betas=(0.9, 0.95)), steps, rates.warmup)

    def keep(self) -> dict[str, QuantizedLinear]:
        """Convert the learned parameters to integers: update the simulation, and return the weights of the learned layers."""
        found: dict[str, QParams] = {}
        for name, site in self.sites.items():
            source = self.simulation.value_site(self.simulation.graph.node(name)) or ""
            found[name] = site.result(found.get(source, self.simulation.sites.get(source)))
        self.simulation.sites.update(found)
        chosen: dict[str, QuantizedLinear] = {}
        for node in self.nodes:
            if node.name in self.linears:
                output = self.simulation.short_output_scales(node)
                chosen[node.name] = self.linears[node.name].result(self._known_scales(node), output)
                self.simulation.use(node, chosen[node.name])
        return chosen


class Schedule:
    """Adam with rates that rise during a warm-up and then follow a cosine to 0."""

    def __init__(self, adam: torch.optim.Adam, steps: int, warmup: int) -> None:
        self.adam, self.steps, self.warmup, self.done = adam, steps, warmup, 0
        self.rates = [float(group["lr"]) for group in adam.param_groups]

    def step(self, loss: Tensor) -> None:
        """Change the parameters by the gradient of the loss."""
        self.adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        factor = 0.5 * (1 + math.cos(math.pi * self.done / self.steps)) * min(1.0, (self.done + 1) / self.warmup)
        for group, rate in zip(self.adam.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.adam.step()
        self.done += 1
