"""Level the scores of attention: subtract from the keys the constants that make the maxima of all rows nearly equal.

Scores are rounded before the maximum of their row is known, so one range must hold the largest scores of every row of every
head. A constant c per head, subtracted from its keys, subtracts scale * (q . c) from the row of query q and does not change
attention (centering.py). Here c is chosen by ridge regression, so that scale * (q . c) is nearly the maximum of the row minus
TARGET: the maxima then lie close together, the range is short, and the codes are finely spaced. Runs after the float pass, on
a sample of images.
See also: centering.py (subtracts the constants), observers.py (Attended: the range of scores).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.data.preprocess import Preprocess
from fqvit.models.graph import Graph, Node
from fqvit.models.layers import Scores
from fqvit.models.pixels import normalise
from fqvit.quant.centering import key_layers
from fqvit.quant.channels import ChannelRange
from fqvit.quant.observers import Attended, Observer

TARGET = 8.0  # leveled row maxima are near this value; the range of scores then includes 0, as every range does
RIDGE = 0.1  # ridge penalty as a share of the mean square of Q: keeps constants of little use small
MAX_ELEMENTS = 2**28  # maximum number of values of Q in memory, over all layers and images
BATCH = 16


@dataclass
class ScoreRows:
    """Rows of the scores of one layer, in batches: queries [R, H, D], their factor per head, and the extremes of each row."""

    factors: Tensor  # float64 [H]: scores are factors[h] * (q . k)
    queries: list[Tensor] = field(default_factory=list)
    tops: list[Tensor] = field(default_factory=list)
    lows: list[Tensor] = field(default_factory=list)

    def add(self, queries: Tensor, scores: Tensor) -> None:
        """Add queries [..., H, T, D] and their scores [..., H, T, T]."""
        self.queries.append(queries.transpose(-2, -3).reshape(-1, queries.shape[-3], queries.shape[-1]).cpu())
        for part, values in ((self.tops, scores.amax(-1)), (self.lows, scores.amin(-1))):
            part.append(values.transpose(-1, -2).reshape(-1, values.shape[-2]).cpu())

    def level(self) -> Leveled:
        """Find the constants of all heads. They are 0 if the range of the row maxima does not shrink."""
        queries, tops, lows = (torch.cat(part).double() for part in (self.queries, self.tops, self.lows))
        queries = queries * self.factors[:, None]
        constants = torch.stack([_ridge(queries[:, h], tops[:, h] - TARGET) for h in range(queries.shape[1])])
        shifts = torch.einsum("rhd,hd->rh", queries, constants)
        if float((tops - shifts).max() - (tops - shifts).min()) >= float(tops.max() - tops.min()):
            constants, shifts = torch.zeros_like(constants), torch.zeros_like(shifts)
        tops, lows = tops - shifts, lows - shifts
        return Leveled(constants.flatten().numpy(), float(lows.min()), float(tops.min()), float(tops.max()))


@dataclass(frozen=True)
class Leveled:
    """The constants [C] of one layer, and the minimum, lowest row maximum and maximum of its scores after leveling."""

    constant: NDArray[np.float64]
    low: float
    least_top: float
    high: float


def level_keys(
    graph: Graph,
    preprocess: Preprocess,
    observers: Sequence[Mapping[str, Sequence[Observer]]],
    images: NDArray[np.uint8],
    where: torch.device,
) -> dict[str, NDArray[np.float64]]:
    """Return constants to subtract from keys, float64 [C] per layer, and move the observed ranges of keys and scores.

    observers: one mapping {site: observers} per recipe   images: uint8 [n, H, W, C]
    Layers whose keys have no range per channel, or whose scores are not observed by `Attended`, are left out.
    """
    pairs = {scores: layer for scores, layer in _score_sites(graph).items() if _can_level(observers, scores, layer)}
    leveled = {site: rows.level() for site, rows in _score_rows(graph, preprocess, images, where, set(pairs)).items()}
    for each in observers:
        for site, found in leveled.items():
            (keys,), (scores,) = each[pairs[site]], each[site]
            assert isinstance(keys, ChannelRange) and isinstance(scores, Attended)
            zero = np.zeros_like(found.constant)
            keys.shift(np.concatenate([zero, -found.constant, zero]))
            scores.replace(found.low, found.least_top, found.high)
    return {pairs[site]: found.constant for site, found in leveled.items()}


def _score_sites(graph: Graph) -> dict[str, str]:
    """Return the scores that read the keys of a layer in `key_layers`: {scores: layer}."""
    found = {}
    for layer in key_layers(graph):
        heads = {node.name for node in graph.nodes if layer in node.inputs}
        readers = [node for node in graph.nodes if type(node.leaf) is Scores and set(node.inputs[:2]) <= heads]
        if len(readers) == 1:
            found[readers[0].name] = layer
    return found


def _can_level(observers: Sequence[Mapping[str, Sequence[Observer]]], scores: str, layer: str) -> bool:
    kinds = [(each.get(layer, ()), each.get(scores, ())) for each in observers]
    return all(
        len(a) == len(b) == 1 and isinstance(a[0], ChannelRange) and isinstance(b[0], Attended) and b[0].finite
        for a, b in kinds
    )


@torch.no_grad()
def _score_rows(
    graph: Graph, preprocess: Preprocess, images: NDArray[np.uint8], where: torch.device, sites: set[str]
) -> dict[str, ScoreRows]:
    """Run the float model and collect the rows of these scores. MAX_ELEMENTS limits the number of images."""
    rows: dict[str, ScoreRows] = {}
    queries: dict[str, Tensor] = {}
    readers = {graph.node(site).inputs[0] for site in sites}

    def visit(node: Node, y: Tensor) -> Tensor:
        if node.name in readers:
            queries[node.name] = y
        if node.name in sites:
            if node.name not in rows:
                rows[node.name] = ScoreRows(_factors(node, y.shape[-3]))
            rows[node.name].add(queries.pop(node.inputs[0]), y)
        return y

    first, limit = 0, len(images)
    while sites and first < limit:
        graph.run_all(normalise(images[first : first + BATCH], preprocess).to(where), visit)
        first += BATCH
        held = sum(part.numel() for each in rows.values() for part in each.queries)
        if held + held * BATCH // first > MAX_ELEMENTS:
            break
    return rows


def _factors(node: Node, heads: int) -> Tensor:
    leaf = node.leaf
    assert isinstance(leaf, Scores)
    factors = torch.ones(heads) if leaf.factors is None else leaf.factors
    return leaf.scale * factors.detach().double().cpu()


def _ridge(queries: Tensor, targets: Tensor) -> Tensor:
    """Return the constant [D] that minimizes (targets - queries . constant)^2 over rows [R, D], plus the penalty of RIDGE."""
    square = queries.T @ queries / len(queries)
    mean = float(square.diagonal().mean())
    if mean == 0:
        return torch.zeros(queries.shape[1], dtype=torch.float64)
    damped = square + RIDGE * mean * torch.eye(len(square), dtype=torch.float64)
    constant: Tensor = torch.linalg.solve(damped, queries.T @ targets / len(queries))
    return constant
