"""Scales of RepQ-ViT (Li 2023): norm outputs with one scale per channel, attention with codes of base sqrt 2.

The quantized network is computed node by node; each site is quantized before the next node reads it:
  norm outputs     one scale s_c and zero point z_c per channel c. Dividing channel c of the norm by s_c / mean(s), moving it by
                   z_c - mean(z) codes and folding the inverse into the next weights gives the same codes with one scale per
                   layer, so the reparameterization only changes which weights are rounded: W_oc * s_c;
  attention        code i means s * 2^(-i/2); the last code means 0;
  other operands   one scale and zero point (Q, K and V: one each);
  weights          one scale and zero point per output.
Every range covers one of the central shares PERCENTILES of the values: the one with the least squared error.
See also: lockstep.py (runs both networks), simulate.py (runs the result).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.models import layers
from fqvit.models.graph import Graph, Node
from fqvit.models.load import FloatModel
from fqvit.quant.calibration import Calibration
from fqvit.quant.methods.lockstep import InputBatches, LinearLayer, run_in_lockstep
from fqvit.quant.plan import plan, read_by_linear
from fqvit.quant.points import observation_points
from fqvit.quant.qparams import QParams, log_sqrt2
from fqvit.quant.simulate import Simulation
from fqvit.quant.weights import QuantizedLinear, bits_and_group
from fqvit.system.progress import Progress

IMAGES = 32  # as published
PERCENTILES = (0.999, 0.9999, 0.99999)
ELEMENTS = 2**22  # at most this many values decide one scale, evenly spaced


def quantiles(x: Tensor, shares: Sequence[float]) -> Tensor:
    """Return the quantiles of every row of x [R, n], interpolated between neighbours: [len(shares), R]"""
    rising = x.sort(1).values
    position = torch.tensor(shares, dtype=torch.float64) * (x.shape[1] - 1)
    below = position.floor().long()
    above = (below + 1).clamp(max=x.shape[1] - 1)
    return torch.lerp(rising[:, below], rising[:, above], (position - below).to(x.dtype)).T


def affine_rows(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the scale and zero point of every row of x [R, n] that have the least squared error: float64 [R], [R]"""
    last = 2**bits - 1
    lows, highs = (quantiles(x, shares).double() for shares in ([1 - p for p in PERCENTILES], PERCENTILES))
    best = torch.full((len(x),), torch.inf, dtype=torch.float64)
    scale, zero = torch.ones(len(x), dtype=torch.float64), torch.zeros(len(x), dtype=torch.float64)
    for low, high in zip(lows.clamp(max=0), highs.clamp(min=0), strict=True):
        tried = (high - low) / last
        tried[tried == 0] = 1.0  # for a row of zeros any scale is exact
        middle = (0.5 - low / tried).floor().clamp(0, last)
        s, z = tried.to(x.dtype)[:, None], middle.to(x.dtype)[:, None]
        codes = ((x / s + 0.5).floor_() + z).clamp_(0, last)
        error = ((codes - z) * s - x).square_().sum(1, dtype=torch.float64)
        better = error < best
        best, scale, zero = (torch.where(better, *pair) for pair in ((error, best), (tried, scale), (middle, zero)))
    return scale, zero


def round_rows(weight: NDArray[np.float64], bias: NDArray[np.float64], bits: int) -> QuantizedLinear:
    """Round weight [O, K], already multiplied by the scales of its inputs, with one scale and zero point per output.

    Codes minus their zero point must fit int8, so the zero point of 8-bit codes is 128.
    """
    last = 2**bits - 1
    scale, zero = (found.numpy() for found in affine_rows(torch.from_numpy(weight), bits))
    if bits == 8:
        scale, zero = np.maximum(zero * scale / 128, (last - zero) * scale / 127), np.full_like(zero, 128)
    scale = np.maximum(scale, np.abs(bias) / 2**30)
    w = np.clip(np.floor(weight / scale[:, None] + 0.5), -zero[:, None], last - zero[:, None])
    return QuantizedLinear(w.astype(np.int8), scale, np.floor(bias / scale + 0.5).astype(np.int64))


def attention_codes(values: Tensor, bits: int) -> QParams:
    """Return codes of base sqrt 2 for attention [1, n] whose scale has the least squared error."""
    tried = [log_sqrt2(bits, float(scale)) for scale in quantiles(values, PERCENTILES)[:, 0]]
    return min(tried, key=lambda q: float((q.decode(q.encode(values)) - values).square_().sum(dtype=torch.float64)))


class Reparameterization:
    """Compute the quantized network node by node and choose the parameters of sites and weights."""

    def __init__(self, model: FloatModel, calibration: Calibration) -> None:
        self.model, self.recipe = model, calibration.recipe
        self.simulation = Simulation(model, calibration)
        self.graph = self.simulation.graph
        self.plans = plan(self.graph, self.recipe)
        self.points = observation_points(self.graph)
        self.weights: dict[str, QuantizedLinear] = {}

    def quantize_node(self, node: Node, _: InputBatches, simulated: InputBatches) -> list[Tensor]:
        """Choose the parameters of a node and return its outputs in the quantized network, one tensor per batch."""
        simulation = self.simulation
        scales = simulation.input_scales(node) if isinstance(node.leaf, layers.Linear | layers.Patches) else None
        if scales is not None:
            layer = LinearLayer.of(node, self.model.preprocess)
            bits = bits_and_group(self.recipe, node)[0]
            self.weights[node.name] = round_rows(layer.weight * scales, layer.bias, bits)
            simulation.use(node, self.weights[node.name])
        outputs = [simulation.call(node, list(xs)) for xs in zip(*simulated, strict=True)]
        site = self.points.get(node.name)
        if site is None or site not in self.plans:
            return outputs
        if self.plans[site].fixed is None:
            simulation.sites[site] = self._parameters(site, outputs)
        q = simulation.sites[site]
        return [q.decode(q.encode(y)) for y in outputs]

    def _parameters(self, site: str, outputs: Sequence[Tensor]) -> QParams:
        planned = self.plans[site]
        values = torch.cat(list(outputs))
        if planned.role == "attention":
            return attention_codes(_sampled(values.reshape(1, -1)), planned.bits)
        per_channel = planned.role == "norm" and self._reparameterized(site)
        parts = values.shape[-1] if per_channel else planned.groups
        rows = values.reshape(-1, parts, values.shape[-1] // parts).transpose(0, 1).reshape(parts, -1)
        scale, zero = affine_rows(_sampled(rows), planned.bits)
        return QParams(planned.bits, scale.numpy(), zero.long().numpy())

    def _reparameterized(self, site: str) -> bool:
        """Return whether the scales of a norm's channels can be folded: only linear layers that compute no output read it."""
        return read_by_linear(self.graph, site) and all(
            reader.leaf.role != "logits" for reader in final_readers(self.graph, site)
        )


def final_readers(graph: Graph, name: str) -> Iterator[Node]:
    """Return the nodes that read a site, directly or through data movement."""
    for node in graph.nodes:
        if name in node.inputs:
            yield from final_readers(graph, node.name) if node.leaf.role == "route" else [node]


def _sampled(rows: Tensor) -> Tensor:
    """Return at most ELEMENTS values of every row [R, n], evenly spaced."""
    return rows[:, :: max(1, -(-rows.shape[1] // ELEMENTS))].contiguous()


@torch.no_grad()
def reparameterize(
    model: FloatModel, calibration: Calibration, images: NDArray[np.uint8], progress: Progress | None = None
) -> Calibration:
    """Return `calibration` with new parameters of sites and weights; images: uint8 [n, H, W, C], the first IMAGES are used."""
    run = Reparameterization(model, calibration)
    run_in_lockstep(run.graph, model.preprocess, images[:IMAGES], run.quantize_node, progress, "choosing scales")
    sites = {name: run.simulation.sites[name] for name in calibration.sites}
    return replace(calibration, sites=sites, weights=run.weights)
