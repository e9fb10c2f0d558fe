"""From a graph and a recipe to what happens at each site. The only place that knows which roles are quantized how."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from fqvit.errors import FqvitError
from fqvit.models.graph import Graph, Node
from fqvit.models.layers import BiasedScores, Context, Linear, Role, Scores
from fqvit.quant.recipe import RangeObserver, Recipe, SiteRule

# More bits than a matrix product takes: codes that only norms, sums, tables and the softmax read.
WIDE = ("residual", "hidden", "scores")
# Sites that may have a step for each channel.
CHANNELS = ("norm", "qkv", "context", "gelu")
# Matrix products of sites. Patches reads pixels, which are bytes already.
PRODUCTS = (Linear, Scores, BiasedScores, Context)
# Sites that stay in the accumulator unless the recipe wants codes there.
BRANCHES = ("branch", "patch")


@dataclass(frozen=True)
class SitePlan:
    """kind "range": one range a group of channels; "channels": a step for each channel; "ptf": Power-of-Two Factor;
    "log2" and "relative": attention, nothing to observe but the number of tokens."""

    site: str
    kind: Literal["range", "channels", "ptf", "log2", "relative"]
    bits: int
    role: Role = "residual"
    observer: RangeObserver = "minmax"
    k: int = 0
    groups: int = 1
    symmetric: bool = False  # around the middle code; attention has none below its zero point
    fixed: tuple[float, float] | None = None


def plan(graph: Graph, recipe: Recipe) -> dict[str, SitePlan]:
    """The plan of every quantized site, in the order of the graph. Sites left out are accumulators, logits or moves; and where
    nonlinear operations stay float, all that no matrix product reads."""
    sites = {}
    for node in graph.nodes:
        site = _plan_site(graph, node, recipe, _rule(node, recipe))
        if site is not None:
            sites[node.name] = site
    for pattern in recipe.sites:
        if not any(_matches(pattern, node) for node in graph.nodes if node.name in sites):
            raise FqvitError(
                f"recipe {recipe.name}: no site with codes is called {pattern!r}. `fqvit inspect --sites` lists them."
            )
    return sites


def _plan_site(graph: Graph, node: Node, recipe: Recipe, rule: SiteRule) -> SitePlan | None:
    role = node.leaf.role
    if recipe.nonlinear == "float" and not _read_by_product(graph, node.name):
        return None
    if role == "route" or (role == "logits" and recipe.logits == "accumulator"):
        return None
    if role in BRANCHES and recipe.branches == "accumulator":
        return None
    if role == "attention":
        return _plan_attention(node, recipe, rule)
    bits = rule.bits or recipe.activation_bits
    if bits > 8 and role not in WIDE:
        raise FqvitError(f"{node.name}: {bits} bits, but what a matrix product reads has 8 at most (this is {role}).")
    if role == "residual" and rule.observer is None and rule.range is None:
        observer: str = "ptf" if recipe.residual == "ptf" else recipe.observer
    else:
        observer = rule.observer or recipe.observer
    if observer == "ptf":
        if role != "residual":
            raise FqvitError(f"{node.name}: ptf is for LayerNorm inputs only (role residual, this is {role}).")
        k = recipe.k if rule.k is None else rule.k
        return SitePlan(node.name, "ptf", bits, role, k=k, symmetric=recipe.symmetric)
    if _has_channels(graph, node, recipe, rule):
        k = recipe.k if rule.k is None else rule.k
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


def _plan_attention(node: Node, recipe: Recipe, rule: SiteRule) -> SitePlan:
    bits = rule.bits or recipe.attention_bits
    if bits > 8:
        raise FqvitError(f"{node.name}: {bits} bits, but attention codes have 8 at most.")
    if recipe.symmetric:
        bits = min(bits, 7)  # attention is never negative: of an int8, the half that remains
    if recipe.attention == "relative":
        return SitePlan(node.name, "relative", bits, "attention")
    if recipe.attention == "log2-wide" or (recipe.log2_attention and bits <= 4):
        return SitePlan(node.name, "log2", bits, "attention")
    if rule.range is not None and rule.range[0] < 0:
        low, high = rule.range
        raise FqvitError(f"{node.name}: range {low:g}..{high:g}, but attention is never negative. Start it at 0.")
    observer = rule.observer or recipe.observer
    if observer == "ptf":
        raise FqvitError(f"{node.name}: ptf is for LayerNorm inputs only (role residual, this is attention).")
    return SitePlan(node.name, "range", bits, "attention", observer, fixed=rule.range)


def _has_channels(graph: Graph, node: Node, recipe: Recipe, rule: SiteRule) -> bool:
    """Whether each channel has its own step: it must be folded into the linear maps that read the site. V's steps stay in
    attention times V, so that V has them only where that site has them too."""
    if not recipe.channels or node.leaf.role not in CHANNELS or rule.range is not None or rule.observer is not None:
        return False
    if node.leaf.role != "qkv":
        return _read_by_linear(graph, node.name)
    heads = {reader.name for reader in graph.nodes if node.name in reader.inputs}
    readers = [reader for reader in graph.nodes if reader.leaf.role == "context" and heads & set(reader.inputs)]
    return all(_has_channels(graph, reader, recipe, _rule(reader, recipe)) for reader in readers)


def _read_by_linear(graph: Graph, name: str) -> bool:
    readers = [node for node in graph.nodes if name in node.inputs]
    return name != graph.output and all(
        isinstance(node.leaf, Linear) or (node.leaf.role == "route" and _read_by_linear(graph, node.name)) for node in readers
    )


def _read_by_product(graph: Graph, name: str) -> bool:
    """Whether a matrix product reads the site, be it through moves of rows."""
    return any(
        isinstance(node.leaf, PRODUCTS) or (node.leaf.role == "route" and _read_by_product(graph, node.name))
        for node in graph.nodes
        if name in node.inputs
    )


def _matches(pattern: str, node: Node) -> bool:
    return pattern == node.leaf.role or fnmatchcase(node.name, pattern)


def _rule(node: Node, recipe: Recipe) -> SiteRule:
    """All rules that match, later ones over earlier ones."""
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
