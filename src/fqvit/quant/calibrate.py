"""Calibrate a model: one float pass over unlabelled images, with one observer per site.

The result has one QParams per site, the named output of a leaf module (see models/graph.py). Batches have recipe.batch
images, in the given order or shuffled with the seed recipe.shuffle. The result depends neither on how the images are cut into
arrays nor on the number of workers. Memory holds the observers and one batch, or all uint8 images if an iterable is shuffled.
See also: observers.py (statistics), plan.py (which sites to observe, and how), distribute.py (several workers).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from fqvit.data.collect import holds_arrays, open_any
from fqvit.data.images import Source
from fqvit.data.places import open_unlabelled
from fqvit.distributed.workers import SINGLE_PROCESS, Workers
from fqvit.errors import FqvitError
from fqvit.models.device import device_of
from fqvit.models.graph import Features, Graph, Node
from fqvit.models.layers import Context, Gelu, Heads, Softmax, Take, gelu
from fqvit.models.load import FloatModel
from fqvit.models.outputs import output_graph, resolve_outputs
from fqvit.models.pixels import normalise
from fqvit.quant import channels, distribute
from fqvit.quant.adjust import Centers, adjust_ranges
from fqvit.quant.batches import ImageSample, mark_last, rebatch, sample_size, shuffle_batches
from fqvit.quant.calibration import Calibration, double_neurons
from fqvit.quant.centering import center, key_centers
from fqvit.quant.channels import ChannelRange
from fqvit.quant.methods import auto, narrow
from fqvit.quant.methods.bitsplit import bit_split
from fqvit.quant.methods.compensate import compensate
from fqvit.quant.methods.hessian import search_by_hessian
from fqvit.quant.methods.reconstruct import reconstruct
from fqvit.quant.methods.reparameterize import reparameterize
from fqvit.quant.methods.similarity import search_intervals
from fqvit.quant.observers import Attended, Ema, MinMax, Observer, Omse, Percentile, Ptf, RangeObserver
from fqvit.quant.plan import SitePlan, plan
from fqvit.quant.points import observation_points
from fqvit.quant.qparams import QParams, affine, concatenate, log2, relative, symmetric
from fqvit.quant.recipe import DEFAULT_RECIPE, DOUBLING, Recipe, load_recipe
from fqvit.quant.rotating import rotate
from fqvit.quant.simulate import table_softmax
from fqvit.quant.splitting import choose_outliers, split, split_parts
from fqvit.quant.weights import check_layers
from fqvit.system.progress import Progress, track

Call = Callable[[Node, list[Tensor]], Tensor]


class SiteObserver:
    """The observers of one site, one per group of channels.

    parts: empty if the parameters do not depend on the data   tokens: row length of attention, for relative codes
    """

    def __init__(self, site: SitePlan, recipe: Recipe) -> None:
        self.site, self.recipe = site, recipe
        self.parts: list[Observer] = []
        self.tokens = 1
        if site.kind == "channels":
            self.parts = [ChannelRange(site.site)]
        elif site.kind == "ptf":
            self.parts = [Ptf(site.site, site.bits, site.k, recipe.last_batch, site.symmetric)]
        elif site.kind == "range" and site.fixed is None:
            self.parts = [_range_observer(site, recipe) for _ in range(site.groups)]

    def observe(self, x: Tensor) -> None:
        """Observe one batch, float [..., C]."""
        self.tokens = x.shape[-1] if self.site.kind == "relative" else 1
        for part, slice_ in zip(self.parts, x.chunk(len(self.parts), -1), strict=True) if self.parts else ():
            part.observe(slice_)

    def state(self) -> dict[str, Any]:
        """Return the state as plain values, for `merge` in another process."""
        return {"tokens": self.tokens, "parts": [part.state() for part in self.parts]}

    def merge(self, later: Mapping[str, Any]) -> None:
        """Merge the state of another observer of the same site, which has seen later batches."""
        self.tokens = max(self.tokens, later["tokens"])
        for mine, theirs in zip(self.parts, later["parts"], strict=True):
            mine.merge(Observer.from_state(theirs))

    def qparams(self, value: QParams | None = None) -> QParams:
        """Compute the quantization parameters from the statistics. value: the parameters of V, for attention times V."""
        site = self.site
        codes = symmetric if site.symmetric else affine
        if site.kind == "log2":
            return log2(site.bits, self.recipe.zero_code)
        if site.kind == "relative":
            return relative(site.bits, self.tokens, self.recipe.levels)
        if site.fixed is not None:
            return codes(*site.fixed, site.bits)
        first = self.parts[0]
        if isinstance(first, ChannelRange):
            low, high = channels.adjusted_range(site.role, first, self.recipe.extremes == "balanced")
            return channels.qparams(site, low, high, value, self.recipe.gelu_floor)
        if isinstance(first, Ptf):
            found = first.result()
            return QParams(site.bits, np.array([found.scale]), np.array([found.zero], np.int64), found.alpha.astype(np.uint8))
        return concatenate([codes(*part.range(), site.bits) for part in self.parts if isinstance(part, RangeObserver)])


def _range_observer(site: SitePlan, recipe: Recipe) -> RangeObserver:
    if site.observer == "minmax":
        return MinMax(site.site)
    if site.observer == "ema":
        return Ema(site.site, recipe.momentum)
    if site.observer == "attended":
        return Attended(site.site)
    if site.observer == "percentile":
        return Percentile(site.site, recipe.quantile, recipe.momentum)
    return Omse(site.site, site.bits, recipe.last_batch)


class FloatPass:
    """The observers of one or two recipes during a float pass, and the number of images seen. Mergeable between workers."""

    def __init__(self, model: FloatModel, graph: Graph, recipes: Sequence[Recipe], where: torch.device) -> None:
        self.model, self.graph, self.recipes, self.where = model, graph, recipes, where
        self.observers = [{name: SiteObserver(site, each) for name, site in plan(graph, each).items()} for each in recipes]
        self.seen = 0
        self.centers: Centers = {}

    def observe(self, batch: NDArray[np.uint8], last: bool) -> None:
        """Run one batch, uint8 [n, H, W, C], and observe its sites. last: whether this is the last batch"""
        recipe = self.recipes[0]
        call = coded_attention(recipe, self.observers[0]) if last and recipe.last_batch else None
        observe_batch(self.graph, normalise(batch, self.model.preprocess).to(self.where), *self.observers, call=call)
        self.seen += len(batch)

    def split_mlps(self) -> None:
        """Give neurons with outlying ranges MLPs of their own; see splitting.py."""
        parts = [{name: site.parts for name, site in observed.items()} for observed in self.observers]
        outliers = self.recipes[0].outliers or choose_outliers(self.graph, parts[0])
        if not outliers:
            return
        graph, self.recipes = split(self.graph, outliers), [structs.replace(each, outliers=outliers) for each in self.recipes]
        for i, recipe in enumerate(self.recipes):
            changed, before = split_parts(self.graph, outliers, parts[i]), self.observers[i]
            self.observers[i] = {name: SiteObserver(site, recipe) for name, site in plan(graph, recipe).items()}
            for name, site in self.observers[i].items():
                site.parts = list(changed.get(name) or before[name].parts)
                site.tokens = before[name].tokens if name in before else 1
        self.graph = graph

    def state(self) -> dict[str, Any]:
        sites = [{name: site.state() for name, site in observed.items()} for observed in self.observers]
        return {"seen": self.seen, "sites": sites}

    def merge(self, later: Mapping[str, Any]) -> None:
        self.seen += later["seen"]
        for observed, states in zip(self.observers, later["sites"], strict=True):
            for name, state in states.items():
                observed[name].merge(state)


@torch.no_grad()
def calibrate(
    model: FloatModel,
    images: Iterable[NDArray[np.uint8]] | Source | str | Path,
    recipe: Recipe | str | Path = DEFAULT_RECIPE,
    *,
    device: str = "cpu",
    outputs: str | Sequence[str] = (),
    features: Features | None = None,
    progress: Progress | None = track,
    workers: Workers = SINGLE_PROCESS,
    size_of: narrow.SizeOf | None = None,
) -> Calibration:
    """Observe every site of `model` on `images` and return its quantization parameters.

    images: uint8 arrays [H, W, C] or [n, H, W, C], as made by model.preprocess; the first recipe.images images are used. Or a
    Source, a folder or anything else that `quantize` accepts; then recipe.images evenly spaced images are used.
    recipe: a recipe, its name, or a TOML file.
    outputs: names of outputs, as a list or as one comma-separated string, such as "embedding:l2,tokens@9"; by default those of
    the model itself. features: deprecated, use outputs.
    progress(items, count, label): wraps long loops. By default they show a bar in a terminal and in a notebook; None: nothing.
    workers: the processes that share a Source. Each of them must call this function, and each gets the same result.
    size_of(calibration): returns the size of the program's file in bytes, file_size(lower(model, calibration)); needed only for
    recipes with max_size.
    """
    if not isinstance(model, FloatModel):
        raise FqvitError(f"model: {type(model).__name__}, expected the result of load_model. Or call fqvit.quantize.")
    recipe = load_recipe(recipe)
    if isinstance(images, str | Path):
        images = open_unlabelled(Path(images), model.preprocess, workers)
    elif not isinstance(images, Source) and not holds_arrays(images):
        images = open_any(images, model.preprocess, recipe.images)
    # Tracing captures parameters, so the model must be on its device first.
    where = device_of(device)
    module = model.module if device == "cpu" else copy.deepcopy(model.module).to(where)
    p = model.preprocess
    size = (p.channels, p.height, p.width)
    if features is not None:
        if outputs:
            raise FqvitError("features: deprecated, and outputs are given already. Leave out features.")
        warnings.warn("calibrate(features=...) is deprecated, use outputs=...", DeprecationWarning, stacklevel=2)
    names = resolve_outputs(module, size, outputs) if outputs else ()
    kind = features or "logits"
    graph = rotate(output_graph(module, size, kind, names), recipe)
    if recipe.max_loss is not None:
        auto.check(kind, names)
    if recipe.max_size is not None and size_of is None:
        raise FqvitError(f"recipe {recipe.name}: max_size needs the argument size_of, which measures the file.")
    check_layers([graph], recipe)
    workers.agree("weights", f"{model.name} {model.source}", "Every machine needs the same checkpoint.")
    recipes = [recipe] if recipe.max_loss is None else [recipe, auto.wide(recipe)]
    centers = key_centers(graph, model.preprocess, where) if recipe.keys != "plain" else {}
    observed = FloatPass(model, center(graph, centers), recipes, where)
    observed.centers = centers
    if isinstance(images, Source):
        sample = distribute.observe(observed, images, recipe, workers, progress)
    else:
        sample = _observe_arrays(observed, images, recipe, progress)
    result = None
    if workers.first:
        result = _finish(observed, recipe, (kind, names), sample, progress, size_of)
    return distribute.broadcast(result, workers)


def _observe_arrays(
    observed: FloatPass, images: Iterable[NDArray[np.uint8]], recipe: Recipe, progress: Progress | None
) -> Callable[[], NDArray[np.uint8]]:
    """Observe images given as arrays. Return a function that returns the sample for methods that refine a calibration."""
    p = observed.model.preprocess
    sample = ImageSample(sample_size(recipe))
    batches = rebatch(images, (p.height, p.width, p.channels), recipe.batch, recipe.images)
    if recipe.shuffle is not None:
        batches = shuffle_batches(batches, recipe.batch, recipe.shuffle)
    total = None
    if isinstance(images, Sequence | np.ndarray):
        count = sum(len(item) if item.ndim == 4 else 1 for item in images if isinstance(item, np.ndarray))
        total = -(-min(count, recipe.images) // recipe.batch)
    marked = mark_last(batches)
    for batch, last in marked if progress is None else progress(marked, total, "calibrating"):
        observed.observe(batch, last)
        sample.add(batch)
    return sample.images


def _finish(
    observed: FloatPass,
    recipe: Recipe,
    wanted: tuple[Features, tuple[str, ...]],
    sample: Callable[[], NDArray[np.uint8]],
    progress: Progress | None,
    size_of: narrow.SizeOf | None,
) -> Calibration:
    """Compute the parameters of all sites, then run the methods that the recipe enables on the sample.

    wanted: Calibration.features and Calibration.outputs
    """
    model = observed.model
    if observed.seen == 0:
        raise FqvitError(f"{model.name}: no calibration images. Pass at least one.")
    if recipe.mlps == "split":
        observed.split_mlps()
    images = sample() if sample_size(recipe) else None
    centers = observed.centers
    if images is not None:
        preprocess, where = model.preprocess, observed.where
        centers = adjust_ranges(observed.graph, preprocess, recipe, observed.observers, centers, images, where)
    calibrations = [
        Calibration(
            each,
            wanted[0],
            observed.seen,
            site_parameters(observed.graph, each, sites),
            outputs=wanted[1],
            centers=centers,
        )
        for each, sites in zip(observed.recipes, observed.observers, strict=True)
    ]
    calibration = calibrations[0]
    if images is None:
        return calibration
    if recipe.max_loss is not None:
        calibration = auto.choose(model, calibrations[0], calibrations[1], images, progress)
        calibration = narrow.choose(model, calibration, recipe, images, size_of, progress)
    if recipe.mlps == "doubled" and recipe.rounding in DOUBLING and not calibration.weights:
        calibration = double_neurons(calibration, observed.graph)
    if recipe.rounding in ("compensated", "weighted") and not calibration.weights:
        calibration = compensate(model, calibration, images, progress)
    if recipe.rounding == "reconstructed":
        calibration = reconstruct(model, calibration, images, progress)
    if recipe.rounding == "bit-split":
        calibration = bit_split(model, calibration, images, progress)
    if recipe.intervals == "similarity":
        calibration = search_intervals(model, calibration, images, progress)
    if recipe.intervals == "reparameterized":
        calibration = reparameterize(model, calibration, images, progress)
    if recipe.intervals == "hessian":
        calibration = search_by_hessian(model, calibration, images, progress)
    return calibration


def site_parameters(graph: Graph, recipe: Recipe, observers: Mapping[str, SiteObserver]) -> dict[str, QParams]:
    """Compute the quantization parameters of every site from its observer."""
    found: dict[str, QParams] = {}
    for name, observer in observers.items():
        found[name] = observer.qparams(value_of(graph, graph.node(name), found))
    return trim_gelu_inputs(graph, found, plan(graph, recipe))


def value_of(graph: Graph, node: Node, found: Mapping[str, QParams]) -> QParams | None:
    """Return the parameters of V if the node is attention times V, otherwise None."""
    if not isinstance(node.leaf, Context):
        return None
    name, part = node.inputs[1], None
    while name not in found:  # follow V back through the nodes that split it into heads
        moved = graph.node(name)
        part = moved.leaf.part if isinstance(moved.leaf, Heads) else part
        name = moved.inputs[0]
    return found[name] if part is None else found[name].group(part)


def trim_gelu_inputs(graph: Graph, found: Mapping[str, QParams], sites: Mapping[str, SitePlan]) -> dict[str, QParams]:
    """Remove values whose GELU is rounded to 0 from the ranges of GELU inputs: nothing is lost, and the scale becomes finer.

    The paper and its code keep the input of GELU in float. An integer GELU reads codes, and trimming keeps their error small.
    """
    trimmed = dict(found)
    for node in graph.nodes:
        (x,) = node.inputs[:1]
        if isinstance(node.leaf, Gelu) and x in found and sites[x].fixed is None:
            q = found[x]
            low, high = float(-q.zero[0] * q.scale[0]), float((q.last - q.zero[0]) * q.scale[0])
            # With fewer than 8 bits, assume the scale of 8 bits: a later search may choose a finer scale than the range gives.
            finest = float(found[node.name].scale.min()) * 2.0 ** min(found[node.name].bits - 8, 0)
            cutoff = gelu_cutoff(finest / 2)
            # Start one code lower, so that code 0 lies below the cutoff however the zero point is rounded.
            codes = symmetric if sites[x].symmetric else affine
            trimmed[x] = codes(max(low, cutoff - (high - cutoff) / (q.last - 1)), high, q.bits)
    return trimmed


def gelu_cutoff(threshold: float) -> float:
    """Return the largest x <= 0 with |gelu(t)| < threshold for all t < x."""
    low, high = -40.0, -0.75  # |gelu| increases from x = -40 to its maximum over x < 0, which is near -0.75
    if gelu(high) > -threshold:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if gelu(middle) > -threshold else (low, middle)
    return low


def coded_attention(recipe: Recipe, observers: Mapping[str, SiteObserver]) -> Call:
    """Return a `call` for Graph.run that quantizes attention, as the paper's code does in its last calibration batch.

    The softmax is computed with the scale of the scores observed so far, including this batch, and its output is rounded to
    log2 codes. The rows of these codes do not sum to 1; the ranges and shifts of later sites are observed with that error.
    """

    def call(node: Node, inputs: list[Tensor]) -> Tensor:
        site = observers.get(node.name)
        if isinstance(node.leaf, Softmax) and site is not None and site.site.kind == "log2" and node.inputs[0] in observers:
            q = site.qparams()
            return q.decode(q.encode(table_softmax(node.leaf, inputs[0], observers[node.inputs[0]].qparams(), recipe.exp)))
        y: Tensor = node.leaf(*inputs, *node.params)
        return y

    return call


def observe_batch(
    graph: Graph, images: Tensor, *observers: Mapping[str, SiteObserver], call: Call | None = None
) -> tuple[Tensor, ...]:
    """Run the float graph and observe its sites; return its outputs.

    observers: one mapping {site: observer} per recipe   call: see Graph.run
    """
    points = observation_points(graph)

    def visit(node: Node, y: Tensor) -> Tensor:
        site = points.get(node.name)
        for observed in observers:
            if site is not None and site in observed:
                observed[site].observe(y if site == node.name else _tokens(node, y))
        return y

    return graph.run_all(images, visit, call)


def _tokens(chosen: Node, y: Tensor) -> Tensor:
    """Split concatenated tokens, so that the channels are those of the site: [N, T * C] -> [N, T, C]."""
    assert isinstance(chosen.leaf, Take)
    return y.reshape(len(y), len(chosen.leaf.index), -1)
