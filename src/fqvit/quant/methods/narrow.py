"""Narrow the weights of some layers for recipe `auto`: 4 or 6 bits where that costs least, without labels.

Weights are rounded once per width for the whole network. The cost of a layer at the narrowest width is the increase in KL
divergence from the float model when only this layer is narrowed; at the other widths it is that cost times the ratio of the
squared rounding errors. Layers are narrowed in steps, in increasing order of cost per saved byte (the lower convex hull of
each layer's widths), until the file has at most recipe.max_size bytes or, without max_size, while the expected top-1 loss is at
most recipe.max_loss.
See also: auto.py (runs first and raises the bits of sites), compensate.py (rounds weights).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.ir.packing import row_bytes
from fqvit.models import layers
from fqvit.models.graph import Node, run_float
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.quant.calibration import Calibration, Measure, Narrowed
from fqvit.quant.methods import auto
from fqvit.quant.methods.compensate import compensate
from fqvit.quant.recipe import Recipe
from fqvit.quant.simulate import Simulation
from fqvit.quant.weights import QuantizedLinear, bits_and_group
from fqvit.system.progress import Progress

RETRIES = 4  # retries with fewer narrowed layers if the loss after the final rounding of weights exceeds the limit
SizeOf = Callable[[Calibration], int]  # the size in bytes of the file that a calibration gives
Weights = Mapping[str, QuantizedLinear]


@dataclass(frozen=True)
class Step:
    """Narrow one layer from `before` to `after` bits. cost: added KL divergence   saved: bytes"""

    layer: str
    before: int
    after: int
    cost: float
    saved: int


def choose(
    model: FloatModel,
    calibration: Calibration,
    search: Recipe,
    images: NDArray[np.uint8],
    size_of: SizeOf | None,
    progress: Progress | None = None,
) -> Calibration:
    """Return the calibration with some layers narrowed; its `choice` records which ones and why.

    calibration: the result of auto.choose   search: recipe with the limits and widths   size_of: required with max_size
    """
    choice, graph, limit, largest = calibration.choice, calibration.graph(model), search.max_loss, search.max_size
    assert choice is not None and limit is not None and (largest is None or size_of is not None)
    candidates = [node for node in graph.nodes if is_candidate(node, calibration.recipe)]
    widths = [calibration.recipe.weight_bits, *sorted({w for w in search.widths if w < calibration.recipe.weight_bits})[::-1]]
    widths = widths if candidates else widths[:1]
    if len(widths) == 1 and largest is None:
        return calibration
    exact = torch.cat([run_float(graph, normalise(batch, model.preprocess)) for batch in auto.batches(images)])
    rounded, dequantized = {}, {}
    for width in widths:
        narrow = with_layers(calibration, candidates, width)
        rounded[width] = _rounded(model, narrow, images, progress)
        shown = Simulation(model, replace(narrow, weights=rounded[width])).weights
        dequantized[width] = {name: weight for name, (weight, _) in shown.items()}

    def mixed(bits: Mapping[str, int]) -> Calibration:
        weights = dict(rounded[widths[0]]) | {name: rounded[width][name] for name, width in bits.items()}
        return replace(calibration, recipe=_with_bits(calibration.recipe, bits), weights=weights)

    def measured(found: Calibration, count: int) -> Measure:
        simulation = Simulation(model, found)
        return auto.measure(exact[:count], torch.cat([simulation.run(batch) for batch in auto.batches(images[:count])]))

    probes = min(auto.PROBE_IMAGES, len(images))
    steps = _steps(
        candidates, calibration.recipe, widths, dequantized, mixed, lambda found: measured(found, probes).kl, progress
    )

    def within(count: int) -> bool:
        found = mixed(bits_after(steps[:count]))
        if largest is not None and size_of is not None:
            return size_of(found) <= largest
        return measured(found, len(images)).loss <= limit

    # The first `low` steps satisfy a loss limit and the first `high` do not; for a size limit it is the other way round.
    low, high = (-1, len(steps)) if largest is not None else (0, len(steps) + 1)
    rounds = range(max(high - low - 1, 1).bit_length())
    for _ in progress(rounds, len(rounds), "searching widths") if progress else rounds:
        middle = (low + high) // 2
        if high - low > 1:
            low, high = (middle, high) if within(middle) != (largest is not None) else (low, middle)
    count = high if largest is not None else low
    for retry in range(RETRIES + 1):
        bits = bits_after(steps[:count])
        found = replace(mixed(bits), weights={})
        found = replace(found, weights=_rounded(model, found, images, progress))
        end = measured(found, len(images))
        if largest is not None or end.loss <= limit or count == 0:
            break
        count = 0 if retry == RETRIES - 1 else count * 9 // 10
    size = None if size_of is None else size_of(found)
    reached = end.loss <= limit if largest is None else size is not None and size <= largest
    narrowed = [Narrowed(step.layer, step.before, step.after, step.cost, step.saved) for step in steps[:count]]
    fields = {"end": end, "reached": reached, "narrowed": narrowed, "layers": len(candidates)}
    return replace(found, choice=msgspec.structs.replace(choice, max_size=largest, bytes=size, **fields))


def is_candidate(node: Node, recipe: Recipe) -> bool:
    """Return whether the search chooses the bits of a layer. It excludes layers in layer_bits and outputs of the model."""
    fixed = any(fnmatchcase(node.name, pattern) for pattern in recipe.layer_bits)
    return isinstance(node.leaf, layers.Linear) and not is_output(node) and not fixed


def is_output(node: Node) -> bool:
    """Return whether a layer computes an output of the model. Such layers keep their bits: they are small and sensitive."""
    return node.leaf.role in ("logits", "deltas", "pooled", "output")


def bits_after(steps: Sequence[Step]) -> dict[str, int]:
    """Return the bits of every narrowed layer."""
    return {step.layer: step.after for step in steps}


def with_layers(calibration: Calibration, nodes: Sequence[Node], width: int) -> Calibration:
    """Return the calibration with `width` bits for the weights of these layers."""
    same = width == calibration.recipe.weight_bits
    return replace(
        calibration, recipe=_with_bits(calibration.recipe, {} if same else dict.fromkeys((n.name for n in nodes), width))
    )


def weight_bytes(recipe: Recipe, node: Node) -> int:
    """Return the bytes of a layer's packed weights and exponents."""
    assert isinstance(node.leaf, layers.Linear)
    (outputs, inputs), (bits, group) = node.leaf.weight.shape, bits_and_group(recipe, node)
    exponents = row_bytes(-(-inputs // group), 4) if group else 0
    return int(outputs) * (row_bytes(int(inputs), 4 if group else bits) + exponents)


def hull(points: Sequence[tuple[int, float]]) -> list[int]:
    """Return the indices of the points (bytes saved, cost) on the lower convex hull, from the first point on."""
    kept = [0]
    while True:
        last = kept[-1]
        later = [i for i in range(len(points)) if points[i][0] > points[last][0]]
        if not later:
            return kept
        kept.append(min(later, key=lambda i: (points[i][1] - points[last][1]) / (points[i][0] - points[last][0])))


def _with_bits(recipe: Recipe, bits: Mapping[str, int]) -> Recipe:
    return msgspec.structs.replace(recipe, layer_bits={**recipe.layer_bits, **bits})


def _rounded(model: FloatModel, calibration: Calibration, images: NDArray[np.uint8], progress: Progress | None) -> Weights:
    """Round the weights of all layers by the recipe's method."""
    if calibration.recipe.rounding in ("compensated", "weighted"):
        return compensate(model, calibration, images, progress).weights
    simulation = Simulation(model, calibration)
    return {node.name: simulation.nearest(node) for node in simulation.graph.nodes if isinstance(node.leaf, layers.Linear)}


def _steps(
    candidates: Sequence[Node],
    recipe: Recipe,
    widths: Sequence[int],
    dequantized: Mapping[int, Mapping[str, Tensor]],
    mixed: Callable[[Mapping[str, int]], Calibration],
    divergence: Callable[[Calibration], float],
    progress: Progress | None,
) -> list[Step]:
    """Return all steps, cheapest per saved byte first. Steps of one layer are in order of decreasing width."""
    base = divergence(mixed({}))
    found: list[Step] = []
    for node in progress(candidates, len(candidates), "probing layers") if progress else candidates:
        name = node.name
        added = max(divergence(mixed({name: widths[-1]})) - base, 0.0)
        errors = [_error(node, dequantized[width][name]) for width in widths]
        costs = [0.0] + [added * min(error / max(errors[-1], 1e-300), 1.0) for error in errors[1:]]
        sizes = [weight_bytes(_with_bits(recipe, {name: width}), node) for width in widths]
        points = [(sizes[0] - size, cost) for size, cost in zip(sizes, costs, strict=True)]
        kept = hull(points)
        for i, j in itertools.pairwise(kept):
            (saved, cost), (more, worse) = points[i], points[j]
            found.append(Step(name, widths[i], widths[j], worse - cost, more - saved))
    return sorted(found, key=lambda step: step.cost / step.saved)


def _error(node: Node, weight: Tensor) -> float:
    """Return the squared rounding error of a layer's weights. weight: dequantized weights, float [O, K]"""
    assert isinstance(node.leaf, layers.Linear)
    return float((node.leaf.weight.detach().cpu().double() - weight.cpu().double()).square().sum())
