"""Turn a graph and a recipe into one plan per site: which observer, how many bits, which kind of codes.

No other module decides how a role is quantized. See also: recipe.py (recipes), observers.py (the observers that a plan names).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import msgspec
import torch

from fqvit.errors import FqvitError
from fqvit.models.general import Activation, Depthwise, Gather, Join, Multiply, Rotary, Route
from fqvit.models.graph import IMAGES, Graph, Node
from fqvit.models.layers import Add, Context, Gelu, Heads, Leaf, Linear, Role, Scores, Softmax
from fqvit.models.maps import Conv2d, Deconv, Upsample
from fqvit.quant.fuse_relu import fuse_relus
from fqvit.quant.recipe import RECIPES, RangeObserver, Recipe, SiteRule
from fqvit.quant.weights import bits_and_group

# Roles that may have more than 8 bits: no matrix product reads them, only norms, sums, tables and the softmax.
WIDE = ("residual", "hidden", "scores")
# Roles that may have one scale per channel.
CHANNELS = ("norm", "qkv", "value", "context", "gelu")
# Products that read sites: matrix products, depthwise convolutions, gates and rotary embeddings. Patches is not among them: it
# reads pixels, which are bytes already.
PRODUCTS = (Linear, Conv2d, Deconv, Scores, Context, Depthwise, Multiply, Rotary)
# Roles that stay in the accumulator unless the recipe asks for codes.
BRANCHES = ("branch", "patch")


@dataclass(frozen=True)
class SitePlan:
    """How one site is quantized.

    kind: "range": one range per group of channels; "channels": one scale per channel; "ptf": Power-of-Two Factor; "log2" and
    "relative": codes of attention, which need no observed range.
    """

    site: str
    kind: Literal["range", "channels", "ptf", "log2", "relative"]
    bits: int
    role: Role = "residual"
    observer: RangeObserver | Literal["attended"] = "minmax"
    k: int = 0
    groups: int = 1
    symmetric: bool = False  # the zero point is the middle code; False for attention and ReLU, which are never negative
    fixed: tuple[float, float] | None = None  # a range set by the recipe, instead of an observed one


def plan(graph: Graph, recipe: Recipe) -> dict[str, SitePlan]:
    """Plan every quantized site, in graph order: {site: plan}.

    Accumulators, data movement, box regressions and, by default, logits are not quantized. If nonlinear operations stay float,
    only inputs of matrix products are quantized. Raises FqvitError for a rule of the recipe that matches no quantized site;
    the rules of built-in recipes need not match, because a model without MLPs has no site of role hidden.
    """
    sites = _plan_sites(graph, recipe)
    for pattern in recipe.sites:
        if not _is_used(graph, sites, pattern) and not _is_built_in(recipe, pattern):
            raise _unused(recipe, pattern)
    return sites


def recipes_of_parts(graphs: Sequence[Graph], recipe: Recipe) -> list[Recipe]:
    """Return one recipe per part of a detector, each with the rules that match a site of that part."""
    rules: list[dict[str, SiteRule]] = []
    for graph in graphs:
        sites = _plan_sites(graph, recipe)
        rules.append({pattern: rule for pattern, rule in recipe.sites.items() if _is_used(graph, sites, pattern)})
    for pattern in recipe.sites:
        if not any(pattern in part for part in rules) and not _is_built_in(recipe, pattern):
            raise _unused(recipe, pattern)
    return [msgspec.structs.replace(recipe, sites=part) for part in rules]


def _plan_sites(graph: Graph, recipe: Recipe) -> dict[str, SitePlan]:
    found = {node.name: _plan_site(graph, node, recipe, _rule(node, recipe)) for node in graph.nodes}
    return {name: site for name, site in found.items() if site is not None}


def _is_used(graph: Graph, sites: Mapping[str, SitePlan], pattern: str) -> bool:
    return any(_matches(pattern, node) for node in graph.nodes if node.name in sites)


def _is_built_in(recipe: Recipe, pattern: str) -> bool:
    """Whether a built-in recipe has the same rule."""
    return any(each.sites.get(pattern) == recipe.sites[pattern] for each in RECIPES.values())


def _unused(recipe: Recipe, pattern: str) -> FqvitError:
    return FqvitError(f"recipe {recipe.name}: {pattern!r} matches no quantized site. `fqvit inspect --sites` lists them.")


def _plan_site(graph: Graph, node: Node, recipe: Recipe, rule: SiteRule) -> SitePlan | None:
    role = node.leaf.role
    if recipe.nonlinear == "float" and not _read_by_product(graph, node.name):
        return None
    if role == "output":
        return _plan_output(node, recipe, rule)
    if role in ("route", "deltas", "signs") or (role == "logits" and recipe.logits == "accumulator"):
        return None
    if recipe.branches == "accumulator" and role == "pyramid" and _is_added(graph, node):
        return None
    if node.name in fuse_relus(graph):
        return None
    if role in BRANCHES and recipe.branches == "accumulator":
        return None
    if role == "attention":
        return _plan_attention(node, recipe, rule)
    if role in ("relu", "probability"):
        return _plan_positive(node, recipe, rule)
    bits = rule.bits or (8 if role == "norm" and _feeds_output(graph, node.name, recipe) else recipe.activation_bits)
    if role not in WIDE:
        _check_bits(node, bits)
    if role == "residual" and rule.observer is None and rule.range is None:
        observer: str = "ptf" if recipe.residual == "ptf" else recipe.observer
    else:
        observer = rule.observer or recipe.observer
    k = recipe.k if rule.k is None else rule.k
    joined = isinstance(node.leaf, Join)  # its inputs are requantized to one scale
    if role == "residual" and observer == "ptf" and (joined or not _keeps_channels(graph, node.name)):
        observer = recipe.observer
    if role == "residual" and observer == "ptf":
        return SitePlan(node.name, "ptf", bits, role, k=k, symmetric=recipe.symmetric)
    if recipe.scores == "attended" and rule.observer is None and _is_plain_scores(graph, node):
        observer = "attended"
    _check_observer(node, observer)
    if _has_channels(graph, node, recipe, rule):
        return SitePlan(node.name, "channels", bits, role, k=k, symmetric=recipe.symmetric)
    groups = 3 if role == "qkv" and recipe.qkv == "separate" else 1
    return SitePlan(
        node.name,
        "range",
        bits,
        role,
        observer,  # type: ignore[arg-type]
        groups=groups,
        fixed=rule.range,
        symmetric=recipe.symmetric,
    )


def _feeds_output(graph: Graph, name: str, recipe: Recipe) -> bool:
    """Return whether only output layers that keep 8 bits read the site, directly or through data movement."""
    readers = [node for node in graph.nodes if name in node.inputs]
    return (
        recipe.ranges == "least-error"
        and bool(readers)
        and all(
            _feeds_output(graph, node.name, recipe)
            if node.leaf.role == "route"
            else isinstance(node.leaf, Linear) and node.leaf.role == "logits" and bits_and_group(recipe, node)[0] == 8
            for node in readers
        )
    )


def _plan_output(node: Node, recipe: Recipe, rule: SiteRule) -> SitePlan:
    """Plan an output that a user asked for: one range for all channels. Wide codes need not be clipped."""
    leaf = node.leaf
    bits = leaf.bits or rule.bits or recipe.activation_bits
    observer = rule.observer or ("minmax" if bits > 8 else recipe.observer)
    _check_observer(node, observer)
    # The elements of a vector of length 1 are within -1..1; with wide codes, covering this range costs nothing.
    whole = (-1.0, 1.0) if leaf.symmetric and bits > 8 else None
    symmetric = recipe.symmetric or leaf.symmetric
    return SitePlan(node.name, "range", bits, "output", observer, fixed=rule.range or whole, symmetric=symmetric)  # type: ignore[arg-type]


def _plan_attention(node: Node, recipe: Recipe, rule: SiteRule) -> SitePlan:
    bits = rule.bits or recipe.attention_bits
    _check_bits(node, bits)
    if recipe.symmetric:
        bits = min(bits, 7)  # attention is never negative, so only half of the int8 codes can be used
    if recipe.attention == "relative":
        return SitePlan(node.name, "relative", bits, "attention")
    if recipe.attention == "log2-wide" or (recipe.log2_attention and bits <= 4):
        return SitePlan(node.name, "log2", bits, "attention")
    return _plan_from_zero(node, bits, recipe, rule)


def _plan_positive(node: Node, recipe: Recipe, rule: SiteRule) -> SitePlan:
    """Plan a ReLU or a softmax. The zero point is 0, so that saturation at code 0 computes the ReLU."""
    bits = rule.bits or recipe.activation_bits
    _check_bits(node, bits)
    if recipe.symmetric:
        bits = min(bits, 7)  # as for attention
    return _plan_from_zero(node, bits, recipe, rule)


def _plan_from_zero(node: Node, bits: int, recipe: Recipe, rule: SiteRule) -> SitePlan:
    """Plan one range that starts at 0, for values that are never negative."""
    role = node.leaf.role
    observer = rule.observer or recipe.observer
    _check_observer(node, observer)
    if rule.range is not None and rule.range[0] < 0:
        low, high = rule.range
        raise FqvitError(f"{node.name}: range {low:g}..{high:g}, but {role} is never negative. Start the range at 0.")
    return SitePlan(node.name, "range", bits, role, observer, fixed=rule.range)  # type: ignore[arg-type]


def _check_bits(node: Node, bits: int) -> None:
    if bits > 8:
        role = node.leaf.role
        raise FqvitError(f"{node.name}: {bits} bits for an input of a matrix product (role {role}), expected at most 8.")


def _check_observer(node: Node, observer: str) -> None:
    if observer == "ptf":
        role = node.leaf.role
        raise FqvitError(f"{node.name}: observer ptf for role {role}, but ptf is for LayerNorm inputs (role residual) only.")


def plan_roi_features(recipe: Recipe) -> SitePlan:
    """Plan the input of a detector's heads: RoIAlign features, with the same parameters for every level of the pyramid."""
    return SitePlan(IMAGES, "range", recipe.activation_bits, "pyramid", recipe.observer, symmetric=recipe.symmetric)


def _is_plain_scores(graph: Graph, node: Node) -> bool:
    """Return whether softmaxes without a mask read the site, and nothing else does."""
    readers = [reader.leaf for reader in graph.nodes if node.name in reader.inputs]
    return bool(readers) and all(isinstance(leaf, Softmax) and leaf.mask is None for leaf in readers)


def _is_added(graph: Graph, node: Node) -> bool:
    """Return whether node is a linear layer whose output is only added to other values: a branch of the pyramid."""
    # An Upsample reads only the size of its second input.
    readers = [n for n in graph.nodes if node.name in (n.inputs[:1] if isinstance(n.leaf, Upsample) else n.inputs)]
    added = bool(readers) and all(isinstance(reader.leaf, Add) for reader in readers)
    return isinstance(node.leaf, Linear) and added and node.name not in graph.outputs


def _has_channels(graph: Graph, node: Node, recipe: Recipe, rule: SiteRule) -> bool:
    """Return whether the site has one scale per channel.

    Only linear layers may read such a site, because the scales are folded into their weights. The scales of attention times V
    are those of V times one factor, so V has per-channel scales only if attention times V has them, in the same order.
    """
    if not recipe.channels or node.leaf.role not in CHANNELS or rule.range is not None or rule.observer is not None:
        return False
    if node.leaf.role not in ("qkv", "value"):
        return read_by_linear(graph, node.name)
    contexts: list[Node] = []
    for route in _readers(graph, node.name):
        if isinstance(route.leaf, Heads) and route.leaf.part < 2:
            continue
        if not isinstance(route.leaf, Heads) and not _orders_heads(route.leaf, node.leaf):
            return False
        contexts += _readers(graph, route.name)
    return all(isinstance(each.leaf, Context) and _has_channels(graph, each, recipe, _rule(each, recipe)) for each in contexts)


def _readers(graph: Graph, name: str) -> list[Node]:
    return [node for node in graph.nodes if name in node.inputs]


@torch.no_grad()
def _orders_heads(leaf: Leaf, value: Leaf) -> bool:
    """Return whether a leaf that splits V into heads maps channel c of V to channel c of attention times V, for every token."""
    if not isinstance(leaf, Route | Gather) or not isinstance(value, Linear):
        return False
    channels = value.weight.shape[0]
    size = math.prod(leaf.view) if isinstance(leaf, Route) else (int(leaf.index.max()) + 1) * leaf.width
    numbers = torch.arange(channels, dtype=torch.float32)
    heads = leaf(numbers.repeat(-(-size // channels))[None])
    if heads.ndim < 4:
        return False
    merged = heads.transpose(-2, -3).flatten(-2)
    return merged.shape[-1] == channels and bool((merged == numbers).all())


def read_by_linear(graph: Graph, name: str) -> bool:
    """Return whether only linear layers read a site, directly or through moves of whole rows, so that scales can be folded."""
    readers = [node for node in graph.nodes if name in node.inputs]
    return name not in graph.outputs and all(
        isinstance(node.leaf, Linear)
        or (node.leaf.role == "route" and _moves_rows(node.leaf) and read_by_linear(graph, node.name))
        for node in readers
    )


def _moves_rows(leaf: Leaf) -> bool:
    """Return whether a leaf that moves data keeps rows of channels together."""
    return bool(getattr(leaf, "keeps_channels", True))


def _keeps_channels(graph: Graph, name: str) -> bool:
    """Return whether every reader of a site, directly or through data movement, can read one shift per channel (PTF)."""
    readers = [node for node in graph.nodes if name in node.inputs]
    return all(
        _moves_rows(node.leaf) and _keeps_channels(graph, node.name)
        if node.leaf.role == "route"
        else not isinstance(node.leaf, Activation | Context | Depthwise | Gelu | Multiply | Rotary | Scores | Softmax)
        for node in readers
    )


def _read_by_product(graph: Graph, name: str) -> bool:
    """Return whether a product (see PRODUCTS) reads the site, directly or through data movement."""
    return any(
        isinstance(node.leaf, PRODUCTS) or (node.leaf.role == "route" and _read_by_product(graph, node.name))
        for node in graph.nodes
        if name in node.inputs
    )


def _matches(pattern: str, node: Node) -> bool:
    return pattern == node.leaf.role or fnmatchcase(node.name, pattern)


def _rule(node: Node, recipe: Recipe) -> SiteRule:
    """Merge all rules that match the node; later rules override earlier ones."""
    merged = SiteRule()
    for pattern, rule in recipe.sites.items():
        if _matches(pattern, node):
            merged = SiteRule(
                bits=rule.bits or merged.bits,
                observer=rule.observer or merged.observer,
                k=merged.k if rule.k is None else rule.k,
                range=rule.range or merged.range,
            )
    return merged
