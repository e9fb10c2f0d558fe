"""Collect channel ranges before norms and counts of attention values of a float model.

Each collector is called for every node while the graph runs (the `visit` argument of Graph.run) and keeps ranges or counts, not
activations. Needs torch. See also: attention.py (maps), data.py (the results), gather.py (runs the graph), models/graph.py.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fqvit.models import layers
from fqvit.models.graph import Graph, Node
from fqvit.quant.qparams import log2_encode
from fqvit.report.data import BINS, AttentionCounts, ChannelRanges, fine_bins, uniform_bins


class NormRanges:
    """Minimum and maximum of every channel at the input of every LayerNorm, over all batches seen."""

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
        """Return one entry per LayerNorm, in the order of the graph."""
        return [
            ChannelRanges(norm, self.lo[source].double().numpy(), self.hi[source].double().numpy())
            for norm, source in self.norms.items()
        ]


class AttentionHistogram:
    """Counts of all softmax outputs except masked positions, which take no part in the softmax and need no code."""

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
        """Return the counts over `images` images; None if the model has no attention."""
        found = self.counts
        return None if found is None else AttentionCounts(found.fine, found.uniform, found.log2, found.below, images)


def count(p: Tensor) -> AttentionCounts:
    """Count attention values p: float32 in 0..1, any shape."""
    values = p.numpy()
    codes = log2_encode(p, BINS - 1).numpy().astype(np.int64)
    below = np.bincount(codes[values < 1 / BINS], minlength=BINS)
    return AttentionCounts(fine_bins(values), uniform_bins(values), np.bincount(codes, minlength=BINS), below, 0)
