"""Narrow the weights of some layers for recipe `auto`: 4 or 6 bits where that costs least, without labels.

Weights are rounded once per width for the whole network. The cost of a layer at the narrowest width is the increase in KL
divergence from the float model when only this layer is narrowed; at the other widths it is that cost times the ratio of the
squared rounding errors. Layers are narrowed in steps, in increasing order of cost per saved byte (the lower convex hull of
each layer's widths), until the file has at most recipe.max_size bytes or, without max_size, while the expected top-1 loss is at
most recipe.max_loss.
See also: auto.py (runs first and raises the bits of sites), compensate.py (rounds weights).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.ir.packing import GROUP_BITS, row_bytes
from fqvit.models import layers
from fqvit.models.graph import Node
from fqvit.models.load import FloatModel
from fqvit.quant.calibration import Calibration, Choice, Narrowed
from fqvit.quant.codebooks import number_of_codebooks
from fqvit.quant.methods import auto
from fqvit.quant.methods.compensate import compensate
from fqvit.quant.recipe import Recipe
from fqvit.quant.simulate import Simulation
from fqvit.quant.weights import LinearLeaf, QuantizedLinear, bits_and_group, weight_rows
from fqvit.system.progress import Progress

RETRIES = 4  # retries with fewer narrowed layers if the loss after the final rounding of weights exceeds the limit
SizeOf = Callable[[Calibration], int]  # the size in bytes of the file that a calibration gives
Weights = Mapping[str, QuantizedLinear]


@dataclass(frozen=True)
class Step:
    """Narrow one layer from `before` to `after` bits. cost: added KL divergence   saved: bytes   part: its network"""

    layer: str
    before: int
    after: int
    cost: float
    saved: int
    part: str = ""


@dataclass(frozen=True)
class Layer:
    """A layer whose bits are chosen. nodes: its calls, which share their weights   part: its network"""

    part: str
    nodes: tuple[Node, ...]

    @property
    def name(self) -> str:
        return self.nodes[0].name

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes)


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
    assert calibration.choice is not None
    measure_size = None if size_of is None else lambda found: size_of(found[""])
    subject = auto.Classifier(model, images)
    found, choice = choose_parts(subject, {"": calibration}, calibration.choice, search, measure_size, progress)
    return replace(found[""], choice=choice)


def choose_parts(
    subject: auto.Subject,
    calibrations: auto.Parts,
    choice: Choice,
    search: Recipe,
    size_of: Callable[[auto.Parts], int] | None,
    progress: Progress | None = None,
) -> tuple[dict[str, Calibration], Choice]:
    """Narrow some layers of the networks. calibrations, choice: the result of auto.choose_parts"""
    limit, largest = search.max_loss, search.max_size
    assert limit is not None and (largest is None or size_of is not None)
    candidates = [layer for part in calibrations for layer in _layers(part, subject.models[part], calibrations[part])]
    widest = search.weight_bits
    widths = [widest, *sorted({w for w in search.widths if w < widest})[::-1]] if candidates else [widest]
    if len(widths) == 1 and largest is None:
        return dict(calibrations), choice
    rounded: dict[int, dict[str, Weights]] = {}
    dequantized: dict[int, dict[str, dict[str, Tensor]]] = {}
    for width in widths:
        narrow = {part: with_layers(each, _names(candidates, part), width) for part, each in calibrations.items()}
        rounded[width] = _rounded(subject, narrow, progress)
        dequantized[width] = {}
        for part, each in narrow.items():
            shown = Simulation(subject.models[part], replace(each, weights=rounded[width][part])).weights
            dequantized[width][part] = {name: weight for name, (weight, _) in shown.items()}

    @functools.cache
    def mixed_part(part: str, bits: tuple[tuple[str, int], ...]) -> Calibration:
        weights = dict(rounded[widest][part]) | {name: rounded[width][part][name] for name, width in bits}
        calibration = calibrations[part]
        return replace(calibration, recipe=_with_bits(calibration.recipe, dict(bits)), weights=weights)

    def mixed(steps: Sequence[Step]) -> dict[str, Calibration]:
        bits = bits_of_parts(steps, candidates)
        return {part: mixed_part(part, tuple(bits.get(part, {}).items())) for part in calibrations}

    probes = min(auto.PROBE_IMAGES, subject.images)

    def divergence(steps: Sequence[Step]) -> float:
        return subject.measure(mixed(steps), probes).kl

    recipes = {part: each.recipe for part, each in calibrations.items()}
    steps = _steps(candidates, recipes, widths, dequantized, divergence, progress)

    def within(count: int) -> bool:
        found = mixed(steps[:count])
        if largest is not None and size_of is not None:
            return size_of(found) <= largest
        return subject.measure(found, subject.images).loss <= limit

    # The first `low` steps satisfy a loss limit and the first `high` do not; for a size limit it is the other way round.
    low, high = (-1, len(steps)) if largest is not None else (0, len(steps) + 1)
    rounds = range(max(high - low - 1, 1).bit_length())
    for _ in progress(rounds, len(rounds), "searching widths") if progress else rounds:
        middle = (low + high) // 2
        if high - low > 1:
            low, high = (middle, high) if within(middle) != (largest is not None) else (low, middle)
    count = high if largest is not None else low
    for retry in range(RETRIES + 1):
        found = {part: replace(each, weights={}) for part, each in mixed(steps[:count]).items()}
        weights = _rounded(subject, found, progress)
        found = {part: replace(each, weights=weights[part]) for part, each in found.items()}
        end = subject.measure(found, subject.images)
        if largest is not None or end.loss <= limit or count == 0:
            break
        count = 0 if retry == RETRIES - 1 else count * 9 // 10
    size = None if size_of is None else size_of(found)
    reached = end.loss <= limit if largest is None else size is not None and size <= largest
    narrowed = [
        Narrowed(auto.label_of(step.part, step.layer), step.before, step.after, step.cost, step.saved) for step in steps[:count]
    ]
    fields = {"end": end, "reached": reached, "narrowed": narrowed, "layers": len(candidates)}
    return found, msgspec.structs.replace(choice, max_size=largest, bytes=size, **fields)


def _layers(part: str, model: FloatModel, calibration: Calibration) -> list[Layer]:
    """Return the layers of a network whose bits are chosen. Several calls of one layer are one choice."""
    found: dict[layers.Leaf, list[Node]] = {}
    for node in calibration.graph(model).nodes:
        if is_candidate(node, calibration.recipe):
            found.setdefault(node.leaf, []).append(node)
    return [Layer(part, tuple(nodes)) for nodes in found.values()]


def _names(candidates: Sequence[Layer], part: str) -> list[str]:
    return [name for layer in candidates if layer.part == part for name in layer.names]


def is_candidate(node: Node, recipe: Recipe) -> bool:
    """Return whether the search chooses the bits of a layer. It excludes layers in layer_bits and outputs of the model."""
    fixed = any(fnmatchcase(node.name, pattern) for pattern in recipe.layer_bits)
    return isinstance(node.leaf, LinearLeaf) and not is_output(node) and not fixed


def is_output(node: Node) -> bool:
    """Return whether a layer computes an output of the model. Such layers keep their bits: they are small and sensitive."""
    return node.leaf.role in ("logits", "deltas", "pooled", "output")


def bits_after(steps: Sequence[Step]) -> dict[str, int]:
    """Return the bits of every narrowed layer."""
    return {step.layer: step.after for step in steps}


def bits_of_parts(steps: Sequence[Step], candidates: Sequence[Layer]) -> dict[str, dict[str, int]]:
    """Return the bits of all calls of narrowed layers: {network: {node: bits}}"""
    names = {(layer.part, layer.name): layer.names for layer in candidates}
    found: dict[str, dict[str, int]] = {}
    for step in steps:
        found.setdefault(step.part, {}).update(dict.fromkeys(names[step.part, step.layer], step.after))
    return found


def with_layers(calibration: Calibration, names: Sequence[str], width: int) -> Calibration:
    """Return the calibration with `width` bits for the weights of these layers."""
    same = width == calibration.recipe.weight_bits
    return replace(calibration, recipe=_with_bits(calibration.recipe, {} if same else dict.fromkeys(names, width)))


def weight_bytes(recipe: Recipe, node: Node) -> int:
    """Return the bytes of a layer's packed weights and codebooks."""
    assert isinstance(node.leaf, LinearLeaf)
    (outputs, inputs), (bits, group) = weight_rows(node.leaf)[0].shape, bits_and_group(recipe, node)
    if group == 0:
        return int(outputs * row_bytes(inputs, bits))
    groups = -(-inputs // group)
    codebooks = number_of_codebooks(outputs * groups) * 2**bits
    return int(outputs * (row_bytes(inputs, bits) + row_bytes(groups, GROUP_BITS)) + codebooks)


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


def _rounded(subject: auto.Subject, calibrations: auto.Parts, progress: Progress | None) -> dict[str, Weights]:
    """Round the weights of all layers by the recipe's method."""
    return {part: _rounded_part(subject, part, each, progress) for part, each in calibrations.items()}


def _rounded_part(subject: auto.Subject, part: str, calibration: Calibration, progress: Progress | None) -> Weights:
    model = subject.models[part]
    if calibration.recipe.rounding in ("compensated", "weighted"):
        return compensate(model, calibration, subject.inputs(part), progress).weights
    simulation = Simulation(model, calibration)
    return {node.name: simulation.nearest(node) for node in simulation.graph.nodes if isinstance(node.leaf, LinearLeaf)}


def _steps(
    candidates: Sequence[Layer],
    recipes: Mapping[str, Recipe],
    widths: Sequence[int],
    dequantized: Mapping[int, Mapping[str, Mapping[str, Tensor]]],
    divergence: Callable[[Sequence[Step]], float],
    progress: Progress | None,
) -> list[Step]:
    """Return all steps, cheapest per saved byte first. Steps of one layer are in order of decreasing width."""
    base = divergence([])
    found: list[Step] = []
    for layer in progress(candidates, len(candidates), "probing layers") if progress else candidates:
        node, name, part = layer.nodes[0], layer.name, layer.part
        added = max(divergence([Step(name, widths[0], widths[-1], 0.0, 0, part)]) - base, 0.0)
        errors = [_error(node, dequantized[width][part][name]) for width in widths]
        costs = [0.0] + [added * min(error / max(errors[-1], 1e-300), 1.0) for error in errors[1:]]
        sizes = [weight_bytes(_with_bits(recipes[part], {name: width}), node) for width in widths]
        points = [(sizes[0] - size, cost) for size, cost in zip(sizes, costs, strict=True)]
        kept = hull(points)
        for i, j in itertools.pairwise(kept):
            (saved, cost), (more, worse) = points[i], points[j]
            found.append(Step(name, widths[i], widths[j], worse - cost, more - saved, part))
    return sorted(found, key=lambda step: step.cost / step.saved)


def _error(node: Node, weight: Tensor) -> float:
    """Return the squared rounding error of a layer's weights. weight: dequantized weights, float [O, K]"""
    assert isinstance(node.leaf, LinearLeaf)
    return float((torch.from_numpy(weight_rows(node.leaf)[0]) - weight.cpu().double()).square().sum())
