"""Mixed precision for recipe `auto`: raise the bits of as few sites as possible, without labels.

There are two calibrations of the same images. At some sites the wide one has more bits than the narrow one; in the residual
stream it also has per-tensor scales instead of PTF. A unit is the set of such sites of one role in one block. Its gain
is the decrease in KL divergence from the float model if it is raised, measured with all other units wide. Units are raised from
narrow to wide, in order of decreasing gain, until the expected top-1 loss is at most recipe.max_loss. Then narrow.py narrows
weights of layers.
See also: narrow.py (weights), calibrate.py (makes both calibrations), simulate.py (runs them).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.errors import FqvitError
from fqvit.models.graph import Features, run_float, trace
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.quant.calibration import Calibration, Choice, Measure, Raised
from fqvit.quant.plan import SitePlan, plan
from fqvit.quant.recipe import Recipe, SiteRule
from fqvit.quant.simulate import Simulation
from fqvit.system.progress import Progress

WIDER = {"residual": 16, "hidden": 12, "scores": 10, "attention": 8}  # bits that `auto` may raise a site to, by role
PROBE_IMAGES = 32  # images for measuring the gain of one unit; the number of raised units is decided on all images
BATCH = 16
NO_SEARCH: dict[str, Any] = {"max_loss": None, "max_size": None, "widths": ()}  # fields of a recipe without a search


Parts = Mapping[str, Calibration]  # one calibration per network of a Subject


class Subject(Protocol):
    """What is searched: a classifier, or the networks of a detector, which are measured together.

    models: {name: network}; a single network has the name ""   images: number of images for measuring
    """

    @property
    def models(self) -> Mapping[str, FloatModel]: ...
    @property
    def images(self) -> int: ...

    def measure(self, found: Parts, count: int) -> Measure:
        """Compare the quantized networks with the float ones on the first `count` images."""

    def inputs(self, part: str) -> NDArray[Any]:
        """Return sample inputs of a network, for rounding its weights: as in compensate."""


class Classifier:
    """A single network with logits. images: uint8 [n, H, W, C]"""

    def __init__(self, model: FloatModel, images: NDArray[np.uint8]) -> None:
        self.models, self.pixels, self.images = {"": model}, images, len(images)
        graph = trace(model.module)
        self.logits = torch.cat([run_float(graph, normalise(batch, model.preprocess)) for batch in batches(images)])

    def measure(self, found: Parts, count: int) -> Measure:
        simulation = Simulation(self.models[""], found[""])
        logits = torch.cat([simulation.run(batch) for batch in batches(self.pixels[:count])])
        return measure(self.logits[:count], logits)

    def inputs(self, part: str) -> NDArray[np.uint8]:
        return self.pixels


@dataclass(frozen=True)
class _Unit:
    """Sites of one role in one block. part: the network that they belong to"""

    part: str
    name: str
    role: str
    sites: tuple[str, ...]


def label_of(part: str, name: str) -> str:
    """Return how a site or layer of a network is named in a report: PART/NAME, or NAME if there is only one network."""
    return f"{part}/{name}" if part else name


def wide(recipe: Recipe) -> Recipe:
    """Return `recipe` with every eligible site raised, except those whose bits are set by a rule of the recipe."""
    sites = {role: SiteRule(bits=bits) for role, bits in WIDER.items() if role != "attention" and role not in recipe.sites}
    for pattern, rule in recipe.sites.items():
        sites[pattern] = msgspec.structs.replace(rule, bits=rule.bits or WIDER.get(pattern))
    own: dict[str, Any] = {"attention_bits": WIDER["attention"], "residual": "tensor", **NO_SEARCH}
    return msgspec.structs.replace(recipe, sites=sites, **own)


def check(features: Features, outputs: Sequence[str] = ()) -> None:
    """Raise FqvitError unless the model returns logits."""
    if features != "logits" or outputs:
        found = ", ".join(outputs) or features
        raise FqvitError(f"recipe auto: the output is {found}, expected only logits. Use --recipe fqvit for other outputs.")


def choose(
    model: FloatModel,
    narrow: Calibration,
    wider: Calibration,
    images: NDArray[np.uint8],
    progress: Progress | None = None,
) -> Calibration:
    """Replace some sites of `narrow` by those of `wider`; the result's `choice` records which ones and why."""
    found, choice = choose_parts(Classifier(model, images), {"": narrow}, {"": wider}, progress)
    return replace(found[""], choice=choice)


def choose_parts(
    subject: Subject, narrow: Parts, wider: Parts, progress: Progress | None = None
) -> tuple[dict[str, Calibration], Choice]:
    """Replace some sites of the networks in `narrow` by those of `wider`. Also returns which ones, and why."""
    limit = next(iter(narrow.values())).recipe.max_loss
    assert limit is not None
    raised_sites = {part: plan(trace(subject.models[part].module), each.recipe) for part, each in wider.items()}

    def mixed(units: Sequence[_Unit]) -> dict[str, Calibration]:
        return {part: mixed_part(part, [unit for unit in units if unit.part == part]) for part in narrow}

    @functools.cache
    def mixed_names(part: str, names: tuple[str, ...]) -> Calibration:
        before = narrow[part]
        sites = {**before.sites, **{name: wider[part].sites[name] for name in names}}
        rules = {name: _rule(raised_sites[part][name], before.recipe.sites.get(name, SiteRule())) for name in names}
        recipe = msgspec.structs.replace(before.recipe, **NO_SEARCH, sites={**before.recipe.sites, **rules})
        return replace(before, recipe=recipe, sites=sites)

    def mixed_part(part: str, units: Sequence[_Unit]) -> Calibration:
        # The same object for the same units: a subject can then reuse what it computed for this network.
        return mixed_names(part, tuple(site for unit in units for site in unit.sites))

    def measured(units: Sequence[_Unit], count: int) -> Measure:
        return subject.measure(mixed(units), count)

    units = [unit for part, model in subject.models.items() for unit in _units(part, model, narrow[part], wider[part])]
    start = measured([], subject.images)
    if start.loss <= limit:
        return mixed([]), Choice(limit, subject.images, start, start, True, len(units), [])
    probes = min(PROBE_IMAGES, subject.images)
    best = measured(units, probes).kl
    gains = {}
    # All other units are wide: small errors add up, whereas the large errors of narrow units would mask each other.
    for unit in progress(units, len(units), "probing sites") if progress else units:
        gains[unit] = measured([other for other in units if other != unit], probes).kl - best
    order = sorted(units, key=lambda unit: -gains[unit])
    low, high = 0, len(order)  # raising `low` units is not enough; raising `high` units is, or there are no more
    while high - low > 1:
        middle = (low + high) // 2
        if measured(order[:middle], subject.images).loss <= limit:
            high = middle
        else:
            low = middle
    end = measured(order[:high], subject.images)
    raised = [_raised(unit, gains[unit], narrow[unit.part], wider[unit.part]) for unit in order[:high]]
    return mixed(order[:high]), Choice(limit, subject.images, start, end, end.loss <= limit, len(units), raised)


def measure(float_logits: Tensor, logits: Tensor) -> Measure:
    """Compare the logits of the quantized model with those of the float model; both [N, classes]."""
    exact, other = float_logits.double().log_softmax(1), logits.double().log_softmax(1)
    best, chosen = exact.argmax(1, keepdim=True), other.argmax(1, keepdim=True)
    kl = float((exact.exp() * (exact - other)).sum(1).mean())
    loss = float((exact.gather(1, best).exp() - exact.gather(1, chosen).exp()).mean())
    return Measure(kl, 100 * float((best == chosen).double().mean()), 100 * loss)


def _rule(site: SitePlan, own: SiteRule) -> SiteRule:
    """Return the site's rule with raised bits.

    A residual site also gets the observer of the wide recipe, because the narrow recipe's default is PTF.
    """
    if site.role != "residual":
        return msgspec.structs.replace(own, bits=site.bits)
    return msgspec.structs.replace(own, bits=site.bits, observer="ptf" if site.kind == "ptf" else site.observer)


def _units(part: str, model: FloatModel, narrow: Calibration, wider: Calibration) -> list[_Unit]:
    """Group the sites that the wide recipe raises by block and role."""
    found: dict[tuple[str, str], list[str]] = {}
    for node in trace(model.module).nodes:
        low, high = narrow.sites.get(node.name), wider.sites.get(node.name)
        if low is None or high is None or high.bits <= low.bits:
            continue
        block = re.match(r"(.*\.\d+)\.", node.name)
        found.setdefault((block[1] if block else node.name, node.leaf.role), []).append(node.name)
    return [_Unit(part, block, role, tuple(sites)) for (block, role), sites in found.items()]


def _raised(unit: _Unit, gain: float, narrow: Calibration, wider: Calibration) -> Raised:
    first = unit.sites[0]
    label = label_of(unit.part, unit.name)
    return Raised(label, unit.role, len(unit.sites), narrow.sites[first].bits, wider.sites[first].bits, gain)


def batches(images: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """Split images for the simulation."""
    return [images[i : i + BATCH] for i in range(0, len(images), BATCH)]
