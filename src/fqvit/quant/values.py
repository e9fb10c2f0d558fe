"""Widen the ranges of V so that attention times V gets finer codes.

The scales of attention times V are those of V times one factor f, the smallest for which no channel saturates (channels.py).
Attention averages V over tokens, so most channels of the product span a fraction of V's range, and the rounding errors of V
average out: for a row with attention weights a, their variance is multiplied by sum(a^2). One channel that is not
averaged, however, makes f nearly 1, and all other channels of the product are rounded coarsely. A wider range for
the V of such channels allows a smaller f:

    range of V in channel c = max(r[c], p[c] / f), where r are the ranges of V and p those of the product
    cost(f) = sum_c n[c] * range[c]^2 * (a2[c] + f^2), with n the squared norm of c's weights in the next layer and a2 the
    mean of sum(a^2) in its head

The f with the least cost is chosen. Runs after the float pass, on a few images.
See also: channels.py (computes the scales from these ranges), calibrate.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.data.preprocess import Preprocess
from fqvit.models.graph import Graph, Node
from fqvit.models.layers import Context, Heads, Linear
from fqvit.models.pixels import normalise
from fqvit.quant.channels import ChannelRange
from fqvit.quant.observers import Observer

Floats = NDArray[np.float64]
VALUE = 2  # Q, K and V are the parts 0, 1 and 2 of a joint layer
IMAGES = 16  # observe attention on at most this many images, evenly spaced,
SHARE = 3  # and on every SHARE-th image if there are few
FACTORS = np.geomspace(1.0, 0.1, 47)


@dataclass(frozen=True)
class ValuePath:
    """The sites between V and the next linear layer: {V's joint layer} -> heads -> product with attention -> {reader}."""

    layer: str
    attention: str
    context: str
    reader: str


def widen_values(
    graph: Graph,
    preprocess: Preprocess,
    observers: Sequence[Mapping[str, Sequence[Observer]]],
    images: NDArray[np.uint8],
    where: torch.device,
) -> None:
    """Widen the observed ranges of V. images: uint8 [n, H, W, C]; observers: {site: observers} per recipe.

    Layers in which V or its product with attention has no range per channel are left out.
    """
    paths = [path for path in value_paths(graph) if all(_has_channels(each, path) for each in observers)]
    squares = _attention_squares(graph, preprocess, images, where, {path.attention for path in paths})
    for path in paths:
        leaf = graph.node(path.reader).leaf
        assert isinstance(leaf, Linear)
        norms = leaf.weight.detach().cpu().double().square().sum(0).numpy()
        for each in observers:
            (joint,), (product,) = each[path.layer], each[path.context]
            assert isinstance(joint, ChannelRange) and isinstance(product, ChannelRange)
            low, high = joint.ranges()
            reach, wanted = (np.maximum(-a, b) for a, b in ((low, high), product.ranges()))
            size = len(wanted)
            kept = np.repeat(squares[path.attention], size // len(squares[path.attention]))
            wide = np.concatenate([np.zeros(2 * size), widened(reach[2 * size :], wanted, kept, norms)])
            joint.cover(-wide, wide)


def widened(reach: Floats, wanted: Floats, kept: Floats, norms: Floats) -> Floats:
    """Return the ranges of V with the least cost; all arguments are [C].

    reach: range of V   wanted: range of its product with attention   kept: mean of sum(a^2)   norms: squared norms of weights
    """
    candidates: list[Floats] = [np.maximum(reach, wanted / factor) for factor in FACTORS]
    costs = [float((norms * each**2 * (kept + factor**2)).sum()) for each, factor in zip(candidates, FACTORS, strict=True)]
    return candidates[int(np.argmin(costs))]


def value_paths(graph: Graph) -> list[ValuePath]:
    """Return the paths of all V that are part 2 of a joint layer, if one linear layer reads V's product with attention."""
    found = []
    for node in graph.nodes:
        if isinstance(node.leaf, Context):
            heads = next((each for each in graph.nodes if each.name == node.inputs[1]), None)
            readers = [each for each in graph.nodes if node.name in each.inputs]
            if heads is None or not isinstance(heads.leaf, Heads) or heads.leaf.part != VALUE:
                continue
            if len(readers) == 1 and isinstance(readers[0].leaf, Linear) and node.name not in graph.outputs:
                found.append(ValuePath(heads.inputs[0], node.inputs[0], node.name, readers[0].name))
    return found


def _has_channels(observers: Mapping[str, Sequence[Observer]], path: ValuePath) -> bool:
    parts = [observers.get(site, ()) for site in (path.layer, path.context)]
    return all(len(part) == 1 and isinstance(part[0], ChannelRange) for part in parts)


@torch.no_grad()
def _attention_squares(
    graph: Graph, preprocess: Preprocess, images: NDArray[np.uint8], where: torch.device, sites: set[str]
) -> dict[str, Floats]:
    """Return the mean over rows of the sum of squared attention, float64 [H] per site."""
    count = min(IMAGES, -(-len(images) // SHARE))
    sums: dict[str, list[Tensor]] = {site: [] for site in sites}

    def visit(node: Node, y: Tensor) -> Tensor:
        if node.name in sites:
            rows = y.cpu().double().square().sum(-1).mean(-1)  # [N, ..., H]
            sums[node.name].append(rows.reshape(-1, rows.shape[-1]).mean(0))
        return y

    for i in np.arange(count) * len(images) // count if sites else ():
        graph.run_all(normalise(images[i : i + 1], preprocess).to(where), visit)
    return {site: torch.stack(parts).mean(0).numpy() for site, parts in sums.items()}
