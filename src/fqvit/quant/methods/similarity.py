"""Search for scales that keep matrix products close to those of the float model (PTQ for ViT, Liu 2021).

There is one scale per weight matrix and one per site. The matrix products are visited in network order. For each, the search
compares the output of the float model with the quantized output:
  linear layer     weight and input scales that maximize the mean Pearson correlation per image;
  Q K^T            scales of Q and K that maximize (correlation of the attention maps) - GAMMA * (ranking loss);
  attention x V    scales of attention and V that maximize the correlation.
The two scales of a product are searched alternately on a grid of factors until neither changes; factor 1 maps the largest
absolute value to the last code. Then the bias of a linear layer is corrected by its mean output error over all images.
Scales are scored on IMAGES images and TOKENS tokens per image, always the same ones.
See also: lockstep.py (runs both networks), simulate.py (runs the result).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fqvit.models import layers
from fqvit.models.graph import Graph, Node
from fqvit.models.load import FloatModel
from fqvit.quant.calibration import Calibration
from fqvit.quant.methods.lockstep import InputBatches, LinearLayer, run_in_lockstep
from fqvit.quant.plan import plan
from fqvit.quant.weights import QuantizedLinear
from fqvit.system.progress import Progress

FACTORS = np.linspace(0.5, 1.2, 100)
ROUNDS = 20  # at most this many searches per scale
GAMMA = 0.1  # weight of the ranking loss
THETA = 0.2  # margin of the ranking loss
IMAGES = 32  # images that scales are scored on
TOKENS = 32  # tokens per image (and per window)
WINDOWS = 4  # windows per image
CHUNK = 2**18  # at most this many elements when one operand is quantized with several scales at once


@dataclass(frozen=True)
class Operand:
    """One operand of a matrix product, quantized as scale * clip(round(x / scale), low, high)."""

    values: Tensor
    scale: float
    low: int
    high: int

    def quantized(self, factor: float) -> Tensor:
        """Quantize with scale * factor: [...]"""
        return self.quantized_all(np.array([factor]))[0]

    def quantized_all(self, factors: NDArray[np.float64]) -> Tensor:
        """Quantize with scale * factor for each of c factors: [c, ...]"""
        scales = torch.from_numpy(self.scale * factors).to(self.values.dtype).view(-1, *[1] * self.values.ndim)
        return (self.values / scales + 0.5).floor_().clamp_(self.low, self.high).mul_(scales)


# Two operands, each [c, ...] or [1, ...] -> one score per candidate, higher is better: float64 [c].
Score = Callable[[Tensor, Tensor], Tensor]


class Correlation:
    """Mean over images of the Pearson correlation with `target` [n, ...]: [c, n, ...] -> float64 [c]"""

    def __init__(self, target: Tensor) -> None:
        self.target = _normalized(target.flatten(1))

    def __call__(self, others: Tensor) -> Tensor:
        # For unit vectors u and v with correlation r, 1 - r = |u - v|^2 / 2. r itself is too close to 1 for float32.
        return 1 - _normalized(others.flatten(2)).sub_(self.target).square_().sum(2, dtype=torch.float64).mean(1) / 2


class RankingLoss:
    """Mean of max(0, THETA - (a'_i - a'_j) * sign(a_i - a_j)) over all rows and all pairs i < j of a row.

    a: attention maps of the float model (`exact`)   a': quantized attention maps, both [..., T]
    No loop over pairs is needed. With t = THETA and d = (a'_i - a'_j) * sign(a_i - a_j), max(0, t - d) = t - d + max(0, d - t).
    The sum of t - d needs only a' and the ranks of a. Rows of a' are non-negative and sum to at most 1, so d > t is possible
    only if a'_i > t or a'_j > t, which holds for at most 1 / t elements of a row.
    """

    def __init__(self, exact: Tensor) -> None:
        tokens = exact.shape[-1]
        self.exact = exact.reshape(-1, tokens)
        rising = self.exact.sort(-1).values
        less = torch.searchsorted(rising, self.exact)
        more = tokens - torch.searchsorted(rising, self.exact, right=True)
        self.balance = (less - more).to(exact.dtype)
        self.pairs = len(self.exact) * tokens * (tokens - 1) / 2
        self.most = min(int(1 / THETA), tokens)

    def __call__(self, others: Tensor) -> Tensor:
        """a': [c, ..., T] -> float64 [c]"""
        a = others.reshape(-1, *self.exact.shape)
        total = THETA * self.pairs - (a * self.balance).sum((1, 2), dtype=torch.float64)
        candidate, row = torch.nonzero(a.amax(-1) > THETA, as_tuple=True)
        some, exact = a[candidate, row], self.exact[row]
        top, position = some.topk(self.most, -1)
        beyond = (top[..., None] - some[:, None] - THETA).clamp_(min=0)
        beyond *= exact.gather(1, position)[..., None] > exact[:, None]
        total.index_add_(0, candidate, beyond.sum((1, 2), dtype=torch.float64))
        return total / max(self.pairs, 1)


def search(score: Score, first: Operand, second: Operand, free: tuple[bool, bool] = (True, True)) -> tuple[float, float]:
    """Maximize score over the factors of both scales, alternating between them; an operand that is not free keeps factor 1."""
    operands, factors = (first, second), [1.0, 1.0]
    sides = [side for side in (0, 1) if free[side]]
    turns = [side for _ in range(ROUNDS) for side in sides] if len(sides) > 1 else sides
    chunk = max(1, CHUNK // max(operand.values.numel() for operand in operands))
    for turn, side in enumerate(turns):
        other = operands[1 - side].quantized_all(np.array([factors[1 - side]]))
        scores = []
        for start in range(0, len(FACTORS), chunk):
            trials = operands[side].quantized_all(FACTORS[start : start + chunk])
            scores.append(score(trials, other) if side == 0 else score(other, trials))
        before, factors[side] = factors[side], float(FACTORS[int(torch.cat(scores).argmax())])
        if turn >= 2 and factors[side] == before:  # converged: the other factor was already searched for this value
            break
    return factors[0], factors[1]


class Searcher:
    """Compute the quantized network node by node and choose the scales.

    Sites keep their real values until a matrix product reads them. The first product that reads a site chooses its scale,
    unless a rule of the recipe fixes the range.
    """

    def __init__(self, model: FloatModel, calibration: Calibration) -> None:
        self.model, self.recipe = model, calibration.recipe
        self.graph: Graph = calibration.graph(model)
        self.sites = dict(calibration.sites)
        self.weights: dict[str, QuantizedLinear] = {}
        fixed = {name for name, site in plan(self.graph, self.recipe).items() if site.fixed is not None}
        self.chosen = {(name, group) for name in fixed for group in range(3)}

    def quantize_node(self, node: Node, exact: InputBatches, raw: InputBatches) -> list[Tensor]:
        """Return the node's outputs in the quantized network, one tensor per batch.

        exact: inputs in the float model   raw: inputs in the quantized network, not encoded yet
        """
        leaf = node.leaf
        if isinstance(leaf, layers.Linear | layers.Patches):
            return self._linear(node, exact, raw)
        if isinstance(leaf, layers.Scores | layers.BiasedScores):
            self._scores(node, exact, raw)
        elif isinstance(leaf, layers.Context):
            self._context(node, exact, raw)
        else:
            return [leaf(*xs, *node.params) for xs in zip(*raw, strict=True)]
        operands = [[self._operand(name, x).quantized(1.0) for x in xs] for name, xs in zip(node.inputs, raw, strict=True)]
        return [leaf(*xs, *node.params) for xs in zip(*operands, strict=True)]

    def _linear(self, node: Node, exact: InputBatches, raw: InputBatches) -> list[Tensor]:
        found = LinearLayer.of(node, self.model.preprocess)
        weight, bias = torch.from_numpy(found.weight).float(), torch.from_numpy(found.bias).float()
        last = 2 ** (self.recipe.weight_bits - 1) - 1
        weights = Operand(weight, float(weight.abs().max()) / last or 1.0, -last, last)
        rows = [[found.rows(x) for x in batches] for batches in (exact[0], raw[0])]
        picked = [_first_images(batches)[:, sample_indices(rows[0][0].shape[1], TOKENS)] for batches in rows]
        correlation = Correlation(F.linear(picked[0], weight, bias))
        pixels = isinstance(node.leaf, layers.Patches)
        inputs = Operand(picked[1], 1 / 255, -255, 255) if pixels else self._operand(node.inputs[0], picked[1])
        source = None if pixels else self._source(node.inputs[0])
        free = source is not None and source not in self.chosen

        def score(w: Tensor, x: Tensor) -> Tensor:
            y = x.flatten(1, 2) @ w.transpose(-2, -1) + bias
            return correlation(y.view(len(y), *x.shape[1:3], -1))

        factors = search(score, weights, inputs, (True, free))
        if source is not None:
            self._set_scale(source, factors[1])
            inputs = self._operand(node.inputs[0], picked[1])
        rounded, weight_scale = weights.quantized(factors[0]), weights.scale * factors[0]
        outputs = [F.linear(dataclasses.replace(inputs, values=x).quantized(1.0), rounded) for x in rows[1]]
        error = _mean([F.linear(x, weight) for x in rows[0]]) - _mean(outputs)
        scale = weight_scale * inputs.scale
        integer_bias = np.clip(np.floor((found.bias + error) / scale + 0.5), -(2**30), 2**30).astype(np.int64)
        w = (rounded / weight_scale).round().to(torch.int8).numpy()
        self.weights[node.name] = QuantizedLinear(w, np.full(len(w), scale), integer_bias)
        corrected = torch.from_numpy(integer_bias * scale).float()
        shapes = [x.shape[:-1] for x in (rows[1] if pixels else raw[0])]
        return [(y + corrected).reshape(*shape, -1) for y, shape in zip(outputs, shapes, strict=True)]

    def _scores(self, node: Node, exact: InputBatches, raw: InputBatches) -> None:
        leaf = node.leaf
        assert isinstance(leaf, layers.Scores | layers.BiasedScores)
        readers = [other for other in self.graph.nodes if node.name in other.inputs]
        mask = next((other.leaf.mask for other in readers if isinstance(other.leaf, layers.Softmax)), None)
        (q, k), (q_raw, k_raw) = ([_split_windows(x) for x in side] for side in (exact, raw))
        windows, tokens = sample_indices(q.shape[1], WINDOWS), sample_indices(q.shape[3], TOKENS)
        bias = node.params[0][leaf.index].permute(2, 0, 1)[:, tokens] if isinstance(leaf, layers.BiasedScores) else None
        hidden = None if mask is None else ~mask[windows][:, None][:, :, tokens]

        def attention(q: Tensor, k: Tensor) -> Tensor:
            scores = (q * leaf.scale) @ k.transpose(-2, -1)
            scores = scores if bias is None else scores + bias
            return (scores if hidden is None else scores.masked_fill(hidden, float("-inf"))).softmax(-1)

        target = attention(q[:, windows][..., tokens, :], k[:, windows])
        correlation, ranking = Correlation(target), RankingLoss(target)

        def score(q: Tensor, k: Tensor) -> Tensor:
            found = attention(q, k)
            return correlation(found) - GAMMA * ranking(found)

        self._pair(node, score, q_raw[:, windows][..., tokens, :], k_raw[:, windows])

    def _context(self, node: Node, exact: InputBatches, raw: InputBatches) -> None:
        (a, v), (a_raw, v_raw) = ([_split_windows(x) for x in side] for side in (exact, raw))
        windows, tokens = sample_indices(a.shape[1], WINDOWS), sample_indices(a.shape[3], TOKENS)
        correlation = Correlation(a[:, windows][..., tokens, :] @ v[:, windows])
        self._pair(node, lambda a, v: correlation(a @ v), a_raw[:, windows][..., tokens, :], v_raw[:, windows])

    def _pair(self, node: Node, score: Score, first: Tensor, second: Tensor) -> None:
        """Choose the scales of both operands of a product of two sites."""
        sources = [self._source(name) for name in node.inputs]
        operands = [self._operand(name, x) for name, x in zip(node.inputs, (first, second), strict=True)]
        free = (sources[0] not in self.chosen, sources[1] not in self.chosen)
        for source, factor in zip(sources, search(score, operands[0], operands[1], free), strict=True):
            self._set_scale(source, factor)

    def _source(self, name: str) -> tuple[str, int]:
        """Return the site that an operand is read from, through data movement, and its group (Q, K, V: 0, 1, 2; others: 0)."""
        group = 0
        while name not in self.sites:
            node = self.graph.node(name)
            assert node.leaf.role == "route"
            group = node.leaf.part if isinstance(node.leaf, layers.Heads) else group
            name = node.inputs[0]
        return name, group if len(self.sites[name].scale) > 1 else 0

    def _operand(self, name: str, x: Tensor) -> Operand:
        site, group = self._source(name)
        q = self.sites[site]
        zero = int(q.zero[group])
        return Operand(x, float(q.scale[group]), -zero, q.last - zero)

    def _set_scale(self, source: tuple[str, int], factor: float) -> None:
        """Multiply a scale by factor, which is 1 if the scale was chosen before, and mark it as chosen."""
        site, group = source
        scale = self.sites[site].scale.copy()
        scale[group] *= factor
        self.sites[site] = dataclasses.replace(self.sites[site], scale=scale)
        self.chosen.add(source)


@torch.no_grad()
def search_intervals(
    model: FloatModel, calibration: Calibration, images: NDArray[np.uint8], progress: Progress | None = None
) -> Calibration:
    """Return `calibration` with searched site scales and the weights of every linear layer; images: uint8 [n, H, W, C]."""
    searcher = Searcher(model, calibration)
    run_in_lockstep(searcher.graph, model.preprocess, images, searcher.quantize_node, progress, "searching intervals")
    return dataclasses.replace(calibration, sites=searcher.sites, weights=searcher.weights)


def sample_indices(size: int, count: int) -> Tensor:
    """Return at most `count` of 0 .. size-1, sorted, always the same ones.

    0 is included: the class token differs from the others, and clipping it would affect the logits directly.
    """
    others = 1 + torch.randperm(size - 1, generator=torch.Generator().manual_seed(0))[: count - 1]
    return torch.cat([torch.zeros(1, dtype=torch.long), others]).sort().values


def _first_images(batches: Sequence[Tensor]) -> Tensor:
    """Join batches [N, ...] and keep the first IMAGES images."""
    return torch.cat([batch[:IMAGES] for batch in batches[:IMAGES]])[:IMAGES]


def _split_windows(batches: Sequence[Tensor]) -> Tensor:
    """[N, H, T, D] or [N, W, H, T, D] -> [at most IMAGES, W, H, T, D]"""
    x = _first_images(batches)
    return x[:, None] if x.ndim == 4 else x


def _normalized(x: Tensor) -> Tensor:
    """Subtract the mean over the last axis and scale to length 1 (0 for constant vectors): [..., n]"""
    x = x - x.mean(-1, keepdim=True)
    return x.div_(torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny))


def _mean(batches: Sequence[Tensor]) -> NDArray[np.float64]:
    """Return the mean over all rows of batches [N, T, O]: float64 [O]"""
    rows = sum(batch.shape[0] * batch.shape[1] for batch in batches)
    return np.sum([batch.sum((0, 1), dtype=torch.float64).numpy() for batch in batches], axis=0) / rows  # type: ignore[no-any-return]
