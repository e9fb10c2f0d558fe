"""From a float model and images to the values of data.py: ranges of LayerNorm inputs, counts and maps of attention.

Each collector watches the one walk over the graph (Graph.run's `visit`) and keeps sums, not activations. Needs torch.
Neighbours: data.py (what is found), gather.py (the walk), models/graph.py.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.models import layers
from fqvit.models.config import SwinConfig, ViTConfig
from fqvit.models.graph import Graph, Node
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.quant.qparams import QParams, affine, log2, log2_encode, relative
from fqvit.report.data import BINS, AttentionCounts, AttentionMaps, ChannelRanges, QuantizedMap, fine_bins, uniform_bins

WIDTHS = (8, 6, 4)  # bits of the maps


class NormRanges:
    """Least and greatest value of every channel that a LayerNorm reads, over all batches seen."""

    def __init__(self, graph: Graph) -> None:
        self.norms = {node.name: node.inputs[0] for node in graph.nodes if isinstance(node.leaf, layers.LayerNorm)}
        self.sources = set(self.norms.values())
        self.lo: dict[str, Tensor] = {}
        self.hi: dict[str, Tensor] = {}

    def see(self, node: Node, y: Tensor) -> None:
        if node.name not in self.sources:
            return
        lo, hi = torch.aminmax(y.flatten(0, -2), dim=0)
        self.lo[node.name] = torch.minimum(self.lo.get(node.name, lo), lo)
        self.hi[node.name] = torch.maximum(self.hi.get(node.name, hi), hi)

    def result(self) -> list[ChannelRanges]:
        """In the order of the graph."""
        return [
            ChannelRanges(norm, self.lo[source].double().numpy(), self.hi[source].double().numpy())
            for norm, source in self.norms.items()
        ]


class AttentionHistogram:
    """Counts of every softmax output, masked places left out: they take no part in the softmax and need no code."""

    def __init__(self) -> None:
        self.counts: AttentionCounts | None = None

    def see(self, node: Node, y: Tensor) -> None:
        if not isinstance(node.leaf, layers.Softmax):
            return
        mask = node.leaf.mask
        values = y.flatten() if mask is None else y[mask[:, None].expand_as(y)]
        found = count(values)
        self.counts = found if self.counts is None else self.counts + found

    def result(self, images: int) -> AttentionCounts | None:
        """images: how many were seen. None where the model has no attention."""
        found = self.counts
        return None if found is None else AttentionCounts(found.fine, found.uniform, found.log2, found.below, images)


def count(p: Tensor) -> AttentionCounts:
    """p: float32, any number of attention values in 0..1"""
    values = p.numpy()
    codes = log2_encode(p, BINS - 1).numpy().astype(np.int64)
    below = np.bincount(codes[values < 1 / BINS], minlength=BINS)
    return AttentionCounts(fine_bins(values), uniform_bins(values), np.bincount(codes, minlength=BINS), below, 0)


@torch.no_grad()
def attention_maps(model: FloatModel, graph: Graph, pixels: NDArray[np.uint8]) -> AttentionMaps | None:
    """Of the last attention in the graph and one image u8 [H, W, C]; None where there is no attention.

    Ways to store p: uniform, code = round((2^b - 1) p); log2, 2^-code with the last code 0; relative with 4 bits, as the
    default recipe has it. Masked places are 0 in all of them.
    """
    nodes = [node for node in graph.nodes if isinstance(node.leaf, layers.Softmax)]
    if not nodes:
        return None
    last, kept = nodes[-1], dict[str, Tensor]()

    def keep(node: Node, y: Tensor) -> Tensor:
        if node.name == last.name:
            kept[node.name] = y
        return y

    graph.ending_at(last.name).run(normalise(pixels[None], model.preprocess), keep)
    p = kept[last.name]
    ways: list[tuple[str, QParams]] = []
    ways += [("uniform", affine(0, 1, bits)) for bits in WIDTHS]
    ways += [("log2", log2(bits, zero_code=True)) for bits in WIDTHS]
    ways.append(("relative", relative(4, p.shape[-1])))
    stored = []
    for method, q in ways:
        found = q.decode(q.encode(p))
        noise = float((found - p).double().square().sum())
        decibels = 10 * math.log10(float(p.double().square().sum()) / noise) if noise else math.inf
        stored.append(QuantizedMap(method, q.bits, as_map(model, last.name, found), decibels))
    kind = "class token" if prefix(model) else "received"
    return AttentionMaps(last.name, kind, pixels, as_map(model, last.name, p), stored)


def prefix(model: FloatModel) -> int:
    config = model.module.config
    return config.prefix if isinstance(config, ViTConfig) else 0


def as_map(model: FloatModel, site: str, p: Tensor) -> NDArray[np.float32]:
    """Attention of one image, [1, H, T, T] or [1, W, H, T, T] in windows, as a picture of patches [rows, columns].

    With a class token: what it looks at, mean over heads. Else: how much each patch is looked at, mean over heads and queries,
    times T, so that 1 means its even share.
    """
    config, first = model.module.config, prefix(model)
    if isinstance(config, SwinConfig):
        seen = p[0].mean((1, 2)) * p.shape[-1]  # [W, T]: a number for each place of each window
        home = model.module.get_submodule(site.rpartition(".")[0]).tokens
        assert isinstance(home, layers.Take)
        grid, values = config.grid(int(site.split(".")[1])), seen.flatten()[home.index]
    else:
        assert isinstance(config, ViTConfig)
        grid = (config.image[0] // config.patch, config.image[1] // config.patch)
        values = p[0].mean(0)[0, first:] if first else p[0].mean((0, 1)) * p.shape[-1]
    picture: NDArray[np.float32] = values.reshape(grid).float().numpy()
    return picture
