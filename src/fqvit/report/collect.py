"""Collect channel ranges before norms, counts of attention values and attention maps of a float model.

Each collector is called for every node while the graph runs (the `visit` argument of Graph.run) and keeps sums, not
activations. Needs torch. See also: data.py (the results), gather.py (runs the graph), models/graph.py.
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

WIDTHS = (8, 6, 4)  # bit widths of the quantized maps


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


@torch.no_grad()
def attention_maps(model: FloatModel, graph: Graph, pixels: NDArray[np.uint8]) -> AttentionMaps | None:
    """Return the maps of the last attention for one image u8 [H, W, C]; None if the model has no attention.

    Formats of p: uniform, code = round((2^b - 1) p); log2, value 2^-code with 0 for the last code; relative with 4 bits, as
    in the default recipe. Masked positions are 0 in all of them.
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
    formats: list[tuple[str, QParams]] = []
    formats += [("uniform", affine(0, 1, bits)) for bits in WIDTHS]
    formats += [("log2", log2(bits, zero_code=True)) for bits in WIDTHS]
    formats.append(("relative", relative(4, p.shape[-1])))
    stored = []
    for method, q in formats:
        found = q.decode(q.encode(p))
        noise = float((found - p).double().square().sum())
        decibels = 10 * math.log10(float(p.double().square().sum()) / noise) if noise else math.inf
        stored.append(QuantizedMap(method, q.bits, as_map(model, last.name, found), decibels))
    kind = "class token" if prefix(model) else "received"
    return AttentionMaps(last.name, kind, pixels, as_map(model, last.name, p), stored)


def prefix(model: FloatModel) -> int:
    """Return the number of prefix tokens (class and distillation token); 0 for Swin."""
    config = model.module.config
    return config.prefix if isinstance(config, ViTConfig) else 0


def as_map(model: FloatModel, site: str, p: Tensor) -> NDArray[np.float32]:
    """Turn the attention of one image, [1, H, T, T] or [1, W, H, T, T] for W windows, into a map of patches [rows, columns].

    If there is a class token: its attention, averaged over heads. Otherwise: the attention that each patch receives, averaged
    over heads and queries, times T, so that 1 is the average.
    """
    config, first = model.module.config, prefix(model)
    if isinstance(config, SwinConfig):
        received = p[0].mean((1, 2)) * p.shape[-1]  # [W, T]: one value per position of each window
        to_tokens = model.module.get_submodule(site.rpartition(".")[0]).tokens
        assert isinstance(to_tokens, layers.Take)
        grid, values = config.grid(int(site.split(".")[1])), received.flatten()[to_tokens.index]
    else:
        assert isinstance(config, ViTConfig)
        grid = (config.image[0] // config.patch, config.image[1] // config.patch)
        values = p[0].mean(0)[0, first:] if first else p[0].mean((0, 1)) * p.shape[-1]
    patches: NDArray[np.float32] = values.reshape(grid).float().numpy()
    return patches
