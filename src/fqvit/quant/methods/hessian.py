"""Search for scales by their effect on the loss (PTQ4ViT, Yuan 2022), with twin codes of attention and GELU outputs.

Codes are symmetric. There is one scale per weight matrix (patch embedding: one per output; Q, K and V: one each), one per site,
and one per head for Q, K and V. For each matrix product with output O, the scales of both operands are searched alternately to
minimize the sum over all elements of
  (O' - O)^2 * g^2,
where O' is the product of the quantized operands, inputs and O are those of the float model, and g is the gradient at O of the
negative log-probability of a class drawn from the model's prediction: g^2 estimates the diagonal of the Hessian.
Scales are scored on IMAGES images and TOKENS tokens per image, always the same ones.
See also: twin.py (twin codes), similarity.py (another search), simulate.py (runs the result).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fqvit.data.preprocess import Preprocess
from fqvit.models import layers
from fqvit.models.graph import Graph, Node
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.quant.calibration import Calibration
from fqvit.quant.methods.lockstep import InputBatches, LinearLayer, fitting_images, run_in_lockstep
from fqvit.quant.methods.similarity import sample_indices
from fqvit.quant.methods.twin import exponents, twin_attention, twin_gelu
from fqvit.quant.plan import SitePlan, plan
from fqvit.quant.qparams import QParams
from fqvit.quant.weights import QuantizedLinear, bits_and_group
from fqvit.system.progress import Progress

IMAGES = 32  # as published
TOKENS = 12  # tokens per image (and per window)
WINDOWS = 4  # windows per image
FACTORS = np.linspace(0.012, 1.2, 100)  # that are tried; 1 gives the scale that maps the largest absolute value to 2^(bits-1)
START = int(np.abs(FACTORS - 1).argmin())
ROUNDS = 3  # at most this many searches per scale
BATCH = 4  # images per run with gradients
Products = layers.Linear | layers.Patches | layers.Scores | layers.Context


@dataclass(frozen=True)
class Operand:
    """One operand of a product with its candidates.

    count: number of candidates   start: index of the initial candidate
    groups: number of groups of values, each with its own candidate; if there are several, errors are computed per group
    quantized(i): the operand with candidate i[g] for group g
    """

    count: int
    groups: int
    start: int
    quantized: Callable[[Tensor], Tensor]


def uniform(values: Tensor, units: Tensor, bits: int, lowest: int | None = None) -> Operand:
    """Return symmetric codes: scale * clip(round(x / scale), lowest, 2^(bits-1) - 1), scale = unit * factor.

    units: broadcast against values, one per group   lowest: -2^(bits-1) by default
    """
    half = 2 ** (bits - 1)
    factors = torch.from_numpy(FACTORS).to(values.dtype)

    def quantized(index: Tensor) -> Tensor:
        scale = units * factors[index].view(units.shape)
        return (values / scale + 0.5).floor_().clamp_(-half if lowest is None else lowest, half - 1).mul_(scale)

    return Operand(len(FACTORS), units.numel(), START, quantized)


def coded(values: Tensor, candidates: Sequence[QParams], start: int = 0) -> Operand:
    """Return an operand whose candidates are quantization parameters, each for all of its values."""

    def quantized(index: Tensor) -> Tensor:
        q = candidates[int(index)]
        return q.decode(q.encode(values))

    return Operand(len(candidates), 1, start, quantized)


def search(first: Operand, second: Operand, errors: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Minimize errors(first, second) [G] over the candidates of both operands, alternating between them.

    Returns the index of the best candidate of each group, for both operands. If an operand has one group, its
    best candidate is the one that minimizes the sum of the errors.
    """
    operands = (first, second)
    chosen = [torch.full((each.groups,), each.start) for each in operands]
    for round_ in range(ROUNDS):
        before = [index.clone() for index in chosen]
        for side, operand in enumerate(operands):
            if operand.count == 1:
                continue
            other = operands[1 - side].quantized(chosen[1 - side])
            found = []
            for i in range(operand.count):
                tried = operand.quantized(torch.full((operand.groups,), i))
                error = errors(tried, other) if side == 0 else errors(other, tried)
                found.append(error if operand.groups > 1 else error.sum(0, keepdim=True))
            chosen[side] = torch.stack(found).argmin(0)
        if round_ and all(torch.equal(*pair) for pair in zip(before, chosen, strict=True)):
            break
    return chosen[0], chosen[1]


class Searcher:
    """Choose the scales of every product from its inputs in the float model.

    The first product that reads a site chooses its codes, unless a rule of the recipe fixes the range.
    """

    def __init__(self, model: FloatModel, calibration: Calibration, squares: Mapping[str, Tensor]) -> None:
        self.model, self.recipe, self.squares = model, calibration.recipe, squares
        self.graph = calibration.graph(model)
        self.plans = plan(self.graph, self.recipe)
        self.sites = dict(calibration.sites)
        self.weights: dict[str, QuantizedLinear] = {}
        self.chosen = {(name, part) for name, site in self.plans.items() if site.fixed is not None for part in range(3)}

    def quantize_node(self, node: Node, exact: InputBatches, _: InputBatches) -> list[Tensor]:
        """Choose the scales of a product; return the outputs of the float model."""
        if isinstance(node.leaf, layers.Linear | layers.Patches):
            self._linear(node, exact)
        elif isinstance(node.leaf, layers.Scores | layers.Context):
            self._attention(node, exact)
        return [node.leaf(*xs, *node.params) for xs in zip(*exact, strict=True)]

    def _linear(self, node: Node, exact: InputBatches) -> None:
        layer, bits = LinearLayer.of(node, self.model.preprocess), bits_and_group(self.recipe, node)[0]
        rows = torch.cat([layer.rows(x) for x in exact[0]])
        picked = rows[:, sample_indices(rows.shape[1], TOKENS)].flatten(0, 1)
        weight = torch.from_numpy(layer.weight).float()
        pixels = isinstance(node.leaf, layers.Patches)
        # One group of outputs per scale: a group is one output (patch embedding), one of Q, K and V, or all outputs.
        groups = len(weight) if pixels else 3 if node.leaf.role == "qkv" else 1
        parts = weight.view(groups, -1, weight.shape[1])
        units = parts.abs().amax((1, 2), keepdim=True).clamp_(min=1e-12) / 2 ** (bits - 1)
        weights = uniform(parts, units, bits, 1 - 2 ** (bits - 1))
        site = None if pixels else self._source(node.inputs[0])
        inputs = Operand(1, 1, 0, lambda _: picked) if site is None else self._operand(*site, picked, rows)
        target, square = F.linear(picked, weight), self.squares[node.name].flatten(0, 1)

        def errors(w: Tensor, x: Tensor) -> Tensor:
            error = (F.linear(x, w.flatten(0, 1)) - target).square_().mul_(square)
            return error.sum(0).view(groups, -1).sum(1)

        index, chosen = search(weights, inputs, errors)
        if site is not None:
            self._choose(*site, chosen, rows)
        scale_x = 1 / 255 if site is None else float(self.sites[site[0]].scale[0])
        scale_w = (units.flatten().double().numpy() * FACTORS[index.numpy()]).repeat(len(weight) // groups)
        half = 2 ** (bits - 1) - 1
        w = np.clip(np.floor(layer.weight / scale_w[:, None] + 0.5), -half, half).astype(np.int8)
        scale = np.maximum(scale_w * scale_x, np.abs(layer.bias) / 2**30)
        self.weights[node.name] = QuantizedLinear(w, scale, np.floor(layer.bias / scale + 0.5).astype(np.int64))

    def _attention(self, node: Node, exact: InputBatches) -> None:
        """Choose the scales of Q and K, or of attention and V. Operands and gradients: [n, W, H, T, ...]"""
        a, b = (_windows(torch.cat(list(x))) for x in exact)
        windows, tokens = sample_indices(a.shape[1], WINDOWS), sample_indices(a.shape[3], TOKENS)
        a, b = a[:, windows][..., tokens, :], b[:, windows]
        scores = isinstance(node.leaf, layers.Scores)
        sites = [self._source(name) for name in node.inputs]
        operands = [self._operand(*site, x, x) for site, x in zip(sites, (a, b), strict=True)]

        factors = torch.ones(1)
        if isinstance(node.leaf, layers.Scores):
            factors = node.leaf.scale * (factors if node.leaf.factors is None else node.leaf.factors[:, None, None])

        def product(a: Tensor, b: Tensor) -> Tensor:
            return (a @ (b.transpose(-2, -1) if scores else b)) * factors

        target, square = product(a, b), self.squares[node.name]

        def errors(a: Tensor, b: Tensor) -> Tensor:
            return (product(a, b) - target).square_().mul_(square).sum((0, 1, 3, 4))

        for site, x, index in zip(sites, (a, b), search(operands[0], operands[1], errors), strict=True):
            self._choose(*site, index, x)

    def _source(self, name: str) -> tuple[str, int]:
        """Return the site that an operand is read from, through data movement, and its part (Q, K, V: 0, 1, 2; others: 0)."""
        part = 0
        while name not in self.sites:
            node = self.graph.node(name)
            assert node.leaf.role == "route"
            part = node.leaf.part if isinstance(node.leaf, layers.Heads) else part
            name = node.inputs[0]
        return name, part

    def _operand(self, site: str, part: int, picked: Tensor, values: Tensor) -> Operand:
        """Return the candidates of an operand. picked: values that are scored   values: values that determine the range"""
        planned = self.plans[site]
        if (site, part) in self.chosen:
            q = self.sites[site]
            heads = picked.shape[-3] if planned.role == "qkv" else 1
            each = q.group(part) if planned.role == "qkv" else q
            if len(each.scale) == 1:
                return coded(picked, [each])
            scale = torch.from_numpy(each.scale).to(picked.dtype).view(heads, 1, 1)
            half = 2 ** (planned.bits - 1)
            fixed = (picked / scale + 0.5).floor_().clamp_(-half, half - 1).mul_(scale)
            return Operand(1, 1, 0, lambda _: fixed)
        candidates = self._candidates(planned, values)
        if candidates:
            return coded(picked, candidates, START if planned.role == "gelu" else 0)
        return uniform(picked, self._units(planned, values), planned.bits)

    def _candidates(self, planned: SitePlan, values: Tensor) -> list[QParams]:
        """Return the twin codes of attention and GELU outputs; none for other sites."""
        if planned.role == "attention":
            return [twin_attention(planned.bits, m) for m in exponents(planned.bits)]
        if planned.role == "gelu":
            unit = max(float(values.max()), 1e-6) / 2 ** (planned.bits - 1)
            return [twin_gelu(planned.bits, unit * float(factor)) for factor in FACTORS]
        return []

    def _units(self, planned: SitePlan, values: Tensor) -> Tensor:
        """Return the largest absolute value / 2^(bits-1): of each head [H, 1, 1] for Q, K and V, else of all values [1]."""
        largest = values.abs().amax((0, 1, 3, 4)).view(-1, 1, 1) if planned.role == "qkv" else values.abs().max().view(1)
        units: Tensor = largest.clamp(min=1e-12) / 2 ** (planned.bits - 1)
        return units

    def _choose(self, site: str, part: int, index: Tensor, values: Tensor) -> None:
        """Set the codes of a site, or of its part Q, K or V, to the candidates with these indices."""
        if (site, part) in self.chosen:
            return
        self.chosen.add((site, part))
        planned = self.plans[site]
        candidates = self._candidates(planned, values)
        if candidates:
            self.sites[site] = candidates[int(index)]
            return
        scale = self._units(planned, values).flatten().double().numpy() * FACTORS[index.numpy()]
        if planned.role == "qkv":
            # Parts that are not chosen yet keep their scale until they are.
            before = self.sites[site]
            parts = [before.group(i).channel_scales(len(scale)) for i in range(3)]
            parts[part] = scale
            scale = np.concatenate(parts)
        zero = np.full(len(scale), 2 ** (planned.bits - 1), np.int64)
        self.sites[site] = QParams(planned.bits, scale, zero)


def squared_gradients(graph: Graph, preprocess: Preprocess, images: NDArray[np.uint8]) -> dict[str, Tensor]:
    """Return the squared gradients of the loss at the outputs of all products, at the positions that scales are scored on.

    Shapes: linear layers [N, t, O], scores [N, w, H, t, T], attention times V [N, w, H, t, D], where t
    and w are the numbers of scored tokens and windows. The loss is the negative log-probability of a class drawn from the
    prediction. If the output is not logits, the loss is a random projection of the normalized output. For products that the
    loss does not depend on, all values are 1.
    """
    random = torch.Generator().manual_seed(0)
    logits = graph.node(graph.output).leaf.role == "logits"
    found: dict[str, list[Tensor]] = {}
    for first in range(0, len(images), BATCH):
        kept: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {}

        def call(node: Node, inputs: list[Tensor], kept: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = kept) -> Tensor:
            y: Tensor = node.leaf(*inputs, *node.params)
            if isinstance(node.leaf, Products):
                y = y if y.requires_grad else y.detach().requires_grad_()
                kept[node.name] = (y, _positions(node, inputs))
            return y

        with torch.enable_grad():
            y = graph.run(normalise(images[first : first + BATCH], preprocess), None, call).flatten(1)
            if logits:
                drawn = torch.multinomial(y.detach().softmax(-1), 1, generator=random)[:, 0]
                loss = F.cross_entropy(y, drawn, reduction="sum")
            else:
                loss = (F.normalize(y, dim=-1) * torch.randn(y.shape, generator=random)).sum()
            wanted = [each for each, _ in kept.values()]
            gradients = torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad else [None] * len(wanted)
        for (name, (value, positions)), gradient in zip(kept.items(), gradients, strict=True):
            square = torch.ones_like(value) if gradient is None else gradient.square()
            found.setdefault(name, []).append(positions(square.detach()))
    return {name: torch.cat(parts) for name, parts in found.items()}


def _positions(node: Node, inputs: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that selects the scored positions of a product's output."""
    leaf = node.leaf
    if isinstance(leaf, layers.Linear | layers.Patches):

        def rows(y: Tensor) -> Tensor:
            y = y.reshape(len(y), -1, y.shape[-1])
            return y[:, sample_indices(y.shape[1], TOKENS)].clone()

        return rows
    heads = inputs[0].shape[-3]

    def maps(y: Tensor) -> Tensor:
        if isinstance(leaf, layers.Context):
            y = y.reshape(*y.shape[:-1], heads, -1).transpose(-2, -3)
        y = _windows(y)
        return y[:, sample_indices(y.shape[1], WINDOWS)][..., sample_indices(y.shape[3], TOKENS), :].clone()

    return maps


def _windows(x: Tensor) -> Tensor:
    """[N, H, T, D] or [N, W, H, T, D] -> [N, W, H, T, D]"""
    return x[:, None] if x.ndim == 4 else x


@torch.no_grad()
def search_by_hessian(
    model: FloatModel, calibration: Calibration, images: NDArray[np.uint8], progress: Progress | None = None
) -> Calibration:
    """Return `calibration` with searched codes and weights; images: uint8 [n, H, W, C], the first IMAGES are used."""
    images = fitting_images(calibration.graph(model), model.preprocess, images[:IMAGES])
    searcher = Searcher(model, calibration, squared_gradients(calibration.graph(model), model.preprocess, images))
    run_in_lockstep(searcher.graph, model.preprocess, images, searcher.quantize_node, progress, "searching scales")
    return replace(calibration, sites=searcher.sites, weights=searcher.weights)
