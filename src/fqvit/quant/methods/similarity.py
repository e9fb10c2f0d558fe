"""Steps chosen so that what matrix products give stays alike (PTQ for ViT, Liu 2021): one step a layer's weights, one a site.

At each product, in the order of the network, with the float model's results beside those of the quantized one:
  linear maps      the steps of weights and inputs of the greatest mean Pearson correlation, an image each;
  Q K^T            those of Q and K: correlation of the attention maps - GAMMA * ranking loss;
  attention x V    those of attention and V: correlation.
Two steps take turns on a grid of factors of where they start (the greatest absolute value is the last code) until neither
changes. Then a linear map's bias takes up the mean of its error, over all images of the walk. Steps are judged on IMAGES of
them and TOKENS tokens of each, always the same ones.
Neighbours: walk.py, simulate.py (what comes out is run there).
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
from fqvit.models.graph import Graph, Node, trace
from fqvit.models.load import FloatModel
from fqvit.quant.calibration import Calibration
from fqvit.quant.methods.walk import Columns, LinearMap, side_by_side
from fqvit.quant.plan import plan
from fqvit.quant.weights import QuantizedLinear
from fqvit.system.progress import Progress

FACTORS = np.linspace(0.5, 1.2, 100)
ROUNDS = 20
GAMMA = 0.1
THETA = 0.2
IMAGES = 32  # that steps are judged on
TOKENS = 32  # of each image (and window) among them
WINDOWS = 4
CHUNK = 2**18  # elements of an operand with several steps at a time


@dataclass(frozen=True)
class Operand:
    """One side of a product and its codes: step * clip(round(x / step), low, high)."""

    values: Tensor
    step: float
    low: int
    high: int

    def at(self, factor: float) -> Tensor:
        """With the step times a factor: [...]"""
        return self.stack(np.array([factor]))[0]

    def stack(self, factors: NDArray[np.float64]) -> Tensor:
        """With the step times each of the factors: [c, ...]"""
        steps = torch.from_numpy(self.step * factors).to(self.values.dtype).view(-1, *[1] * self.values.ndim)
        return (self.values / steps + 0.5).floor_().clamp_(self.low, self.high).mul_(steps)


# Operands [c, ...] or [1, ...] -> how good the result of each is: float64 [c].
Score = Callable[[Tensor, Tensor], Tensor]


class Likeness:
    """Mean Pearson correlation with `target` [n, ...], an image each: [c, n, ...] -> float64 [c]"""

    def __init__(self, target: Tensor) -> None:
        self.target = _unit(target.flatten(1))

    def __call__(self, others: Tensor) -> Tensor:
        # 1 - r = |u - v|^2 / 2 of unit vectors: r itself is too near to 1 for float32.
        return 1 - _unit(others.flatten(2)).sub_(self.target).square_().sum(2, dtype=torch.float64).mean(1) / 2


class Ranking:
    """The mean over all rows of `exact` and their pairs i < j of max(0, THETA - (a'_i - a'_j) sign(a_i - a_j)).

    exact: a, attention maps [..., T]. Rows of a' are not negative and sum to 1 at most, so that all pairs are counted without
    looking at each: max(0, t - d) = t - d + max(0, d - t); the sum of t - d needs no more than the ranks of a, and d > t only
    where a'_i > t, which at most 1 / t of a row are.
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
        top, place = some.topk(self.most, -1)
        beyond = (top[..., None] - some[:, None] - THETA).clamp_(min=0)
        beyond *= exact.gather(1, place)[..., None] > exact[:, None]
        total.index_add_(0, candidate, beyond.sum((1, 2), dtype=torch.float64))
        return total / max(self.pairs, 1)


def search(score: Score, first: Operand, second: Operand, free: tuple[bool, bool] = (True, True)) -> tuple[float, float]:
    """The factors of both steps with which score is greatest, by turns; a side that is not free stays as it is."""
    operands, factors = (first, second), [1.0, 1.0]
    sides = [side for side in (0, 1) if free[side]]
    turns = [side for _ in range(ROUNDS) for side in sides] if len(sides) > 1 else sides
    chunk = max(1, CHUNK // max(operand.values.numel() for operand in operands))
    for turn, side in enumerate(turns):
        other = operands[1 - side].stack(np.array([factors[1 - side]]))
        scores = []
        for start in range(0, len(FACTORS), chunk):
            trials = operands[side].stack(FACTORS[start : start + chunk])
            scores.append(score(trials, other) if side == 0 else score(other, trials))
        before, factors[side] = factors[side], float(FACTORS[int(torch.cat(scores).argmax())])
        if turn >= 2 and factors[side] == before:  # the other side's turn was beside this one already
            break
    return factors[0], factors[1]


class Searcher:
    """The walk's quantized side. Sites stay as they are computed until a product reads them: that is where their codes are
    chosen, unless an earlier product or a rule of the recipe has."""

    def __init__(self, model: FloatModel, calibration: Calibration) -> None:
        self.model, self.recipe = model, calibration.recipe
        self.graph: Graph = trace(model.module, calibration.features)
        self.sites = dict(calibration.sites)
        self.weights: dict[str, QuantizedLinear] = {}
        fixed = {name for name, site in plan(self.graph, self.recipe).items() if site.fixed is not None}
        self.settled = {(name, group) for name in fixed for group in range(3)}

    def step(self, node: Node, exact: Columns, raw: Columns) -> list[Tensor]:
        leaf = node.leaf
        if isinstance(leaf, layers.Linear | layers.Patches):
            return self._linear(node, exact, raw)
        if isinstance(leaf, layers.Scores | layers.BiasedScores):
            self._scores(node, exact, raw)
        elif isinstance(leaf, layers.Context):
            self._context(node, exact, raw)
        else:
            return [leaf(*xs, *node.params) for xs in zip(*raw, strict=True)]
        operands = [[self._operand(name, x).at(1.0) for x in xs] for name, xs in zip(node.inputs, raw, strict=True)]
        return [leaf(*xs, *node.params) for xs in zip(*operands, strict=True)]

    def _linear(self, node: Node, exact: Columns, raw: Columns) -> list[Tensor]:
        found = LinearMap.of(node, self.model.preprocess)
        weight, bias = torch.from_numpy(found.weight).float(), torch.from_numpy(found.bias).float()
        last = 2 ** (self.recipe.weight_bits - 1) - 1
        weights = Operand(weight, float(weight.abs().max()) / last or 1.0, -last, last)
        rows = [[found.rows(x) for x in batches] for batches in (exact[0], raw[0])]
        picked = [_images(batches)[:, _choice(rows[0][0].shape[1], TOKENS)] for batches in rows]
        likeness = Likeness(F.linear(picked[0], weight, bias))
        pixels = isinstance(node.leaf, layers.Patches)
        inputs = Operand(picked[1], 1 / 255, -255, 255) if pixels else self._operand(node.inputs[0], picked[1])
        place = None if pixels else self._place(node.inputs[0])
        free = place is not None and place not in self.settled

        def score(w: Tensor, x: Tensor) -> Tensor:
            y = x.flatten(1, 2) @ w.transpose(-2, -1) + bias
            return likeness(y.view(len(y), *x.shape[1:3], -1))

        factors = search(score, weights, inputs, (True, free))
        if place is not None:
            self._settle(place, factors[1])
            inputs = self._operand(node.inputs[0], picked[1])
        codes, step = weights.at(factors[0]), weights.step * factors[0]
        outputs = [F.linear(dataclasses.replace(inputs, values=x).at(1.0), codes) for x in rows[1]]
        error = _mean([F.linear(x, weight) for x in rows[0]]) - _mean(outputs)
        scale = step * inputs.step
        whole = np.clip(np.floor((found.bias + error) / scale + 0.5), -(2**30), 2**30).astype(np.int64)
        w = (codes / step).round().to(torch.int8).numpy()
        self.weights[node.name] = QuantizedLinear(w, np.full(len(w), scale), whole)
        corrected = torch.from_numpy(whole * scale).float()
        shapes = [x.shape[:-1] for x in (rows[1] if pixels else raw[0])]
        return [(y + corrected).reshape(*shape, -1) for y, shape in zip(outputs, shapes, strict=True)]

    def _scores(self, node: Node, exact: Columns, raw: Columns) -> None:
        leaf = node.leaf
        assert isinstance(leaf, layers.Scores | layers.BiasedScores)
        readers = [other for other in self.graph.nodes if node.name in other.inputs]
        mask = next((other.leaf.mask for other in readers if isinstance(other.leaf, layers.Softmax)), None)
        (q, k), (q_raw, k_raw) = ([_windows(x) for x in side] for side in (exact, raw))
        windows, tokens = _choice(q.shape[1], WINDOWS), _choice(q.shape[3], TOKENS)
        bias = node.params[0][leaf.index].permute(2, 0, 1)[:, tokens] if isinstance(leaf, layers.BiasedScores) else None
        hidden = None if mask is None else ~mask[windows][:, None][:, :, tokens]

        def attention(q: Tensor, k: Tensor) -> Tensor:
            scores = (q * leaf.scale) @ k.transpose(-2, -1)
            scores = scores if bias is None else scores + bias
            return (scores if hidden is None else scores.masked_fill(hidden, float("-inf"))).softmax(-1)

        target = attention(q[:, windows][..., tokens, :], k[:, windows])
        likeness, ranking = Likeness(target), Ranking(target)

        def score(q: Tensor, k: Tensor) -> Tensor:
            found = attention(q, k)
            return likeness(found) - GAMMA * ranking(found)

        self._pair(node, score, q_raw[:, windows][..., tokens, :], k_raw[:, windows])

    def _context(self, node: Node, exact: Columns, raw: Columns) -> None:
        (a, v), (a_raw, v_raw) = ([_windows(x) for x in side] for side in (exact, raw))
        windows, tokens = _choice(a.shape[1], WINDOWS), _choice(a.shape[3], TOKENS)
        likeness = Likeness(a[:, windows][..., tokens, :] @ v[:, windows])
        self._pair(node, lambda a, v: likeness(a @ v), a_raw[:, windows][..., tokens, :], v_raw[:, windows])

    def _pair(self, node: Node, score: Score, first: Tensor, second: Tensor) -> None:
        """Both operands of a product of sites."""
        places = [self._place(name) for name in node.inputs]
        operands = [self._operand(name, x) for name, x in zip(node.inputs, (first, second), strict=True)]
        free = (places[0] not in self.settled, places[1] not in self.settled)
        for place, factor in zip(places, search(score, operands[0], operands[1], free), strict=True):
            self._settle(place, factor)

    def _place(self, name: str) -> tuple[str, int]:
        """The site that a product's input comes from, through moves of rows, and which group of its channels (Q, K or V)."""
        group = 0
        while name not in self.sites:
            node = self.graph.node(name)
            assert node.leaf.role == "route"
            group = node.leaf.part if isinstance(node.leaf, layers.Heads) else group
            name = node.inputs[0]
        return name, group if len(self.sites[name].scale) > 1 else 0

    def _operand(self, name: str, x: Tensor) -> Operand:
        site, group = self._place(name)
        q = self.sites[site]
        zero = int(q.zero[group])
        return Operand(x, float(q.scale[group]), -zero, q.last - zero)

    def _settle(self, place: tuple[str, int], factor: float) -> None:
        """factor: 1 where the place was settled before."""
        site, group = place
        scale = self.sites[site].scale.copy()
        scale[group] *= factor
        self.sites[site] = dataclasses.replace(self.sites[site], scale=scale)
        self.settled.add(place)


@torch.no_grad()
def search_intervals(
    model: FloatModel, calibration: Calibration, images: NDArray[np.uint8], progress: Progress | None = None
) -> Calibration:
    """`calibration` with other steps of its sites, and the weights of every linear map, from uint8 images [n, H, W, C]."""
    searcher = Searcher(model, calibration)
    side_by_side(searcher.graph, model.preprocess, images, searcher.step, progress, "searching intervals")
    return dataclasses.replace(calibration, sites=searcher.sites, weights=searcher.weights)


def _choice(size: int, count: int) -> Tensor:
    """At most `count` of 0 .. size-1, in order; always the same. 0 is among them: a class token is unlike the others, and what
    is clipped there is lost to the answer."""
    others = 1 + torch.randperm(size - 1, generator=torch.Generator().manual_seed(0))[: count - 1]
    return torch.cat([torch.zeros(1, dtype=torch.long), others]).sort().values


def _images(batches: Sequence[Tensor]) -> Tensor:
    """The first IMAGES of batches [N, ...]."""
    return torch.cat([batch[:IMAGES] for batch in batches[:IMAGES]])[:IMAGES]


def _windows(batches: Sequence[Tensor]) -> Tensor:
    """[N, H, T, D] or [N, W, H, T, D] -> [at most IMAGES, W, H, T, D]"""
    x = _images(batches)
    return x[:, None] if x.ndim == 4 else x


def _unit(x: Tensor) -> Tensor:
    """[..., n], the mean of each taken away, length 1 (0 if it is constant)."""
    x = x - x.mean(-1, keepdim=True)
    return x.div_(torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny))


def _mean(batches: Sequence[Tensor]) -> NDArray[np.float64]:
    """Of all rows of batches [N, T, O]: float64 [O]"""
    rows = sum(batch.shape[0] * batch.shape[1] for batch in batches)
    return np.sum([batch.sum((0, 1), dtype=torch.float64).numpy() for batch in batches], axis=0) / rows  # type: ignore[no-any-return]
