"""From a graph and a recipe to what happens at each site. The only place that knows which roles are quantized how."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from fqvit.errors import FqvitError
from fqvit.models.graph import Graph, Node
from fqvit.quant.recipe import RangeObserver, Recipe, SiteRule

# Sites that stay in the accumulator unless the recipe wants codes there.
BRANCHES = ("branch", "patch")


@dataclass(frozen=True)
class SitePlan:
    """kind "range": one range a group of channels; "ptf": Power-of-Two Factor; "log2": nothing to observe."""

    site: str
    kind: Literal["range", "ptf", "log2"]
    bits: int
    observer: RangeObserver = "minmax"
    k: int = 0
    groups: int = 1
    fixed: tuple[float, float] | None = None


def plan(graph: Graph, recipe: Recipe) -> dict[str, SitePlan]:
    """The plan of every quantized site, in the order of the graph. Sites left out are accumulators, logits or moves."""
    sites = {}
    for node in graph.nodes:
        site = _plan_site(node, recipe, _rule(node, recipe))
        if site is not None:
            sites[node.name] = site
    for pattern in recipe.sites:
        if not any(_matches(pattern, node) for node in graph.nodes if node.name in sites):
            raise FqvitError(
                f"recipe {recipe.name}: no site with codes is called {pattern!r}. `fqvit inspect --sites` lists them."
            )
    return sites


def _plan_site(node: Node, recipe: Recipe, rule: SiteRule) -> SitePlan | None:
    role = node.leaf.role
    if role in ("route", "logits") or (role in BRANCHES and recipe.branches == "accumulator"):
        return None
    if role == "attention":
        bits = rule.bits or recipe.attention_bits
        if recipe.log2_attention and bits <= 4:
            return SitePlan(node.name, "log2", bits)
        if rule.range is not None and rule.range[0] < 0:
            low, high = rule.range
            raise FqvitError(f"{node.name}: range {low:g}..{high:g}, but attention is never negative. Start it at 0.")
    else:
        bits = rule.bits or recipe.activation_bits
    if role == "residual" and rule.observer is None and rule.range is None:
        observer: str = "ptf" if recipe.residual == "ptf" else recipe.observer
    else:
        observer = rule.observer or recipe.observer
    if observer == "ptf":
        if role != "residual":
            raise FqvitError(f"{node.name}: ptf is for LayerNorm inputs only (role residual, this is {role}).")
        return SitePlan(node.name, "ptf", bits, k=recipe.k if rule.k is None else rule.k)
    groups = 3 if role == "qkv" and recipe.qkv == "separate" else 1
    return SitePlan(node.name, "range", bits, observer, groups=groups, fixed=rule.range)  # type: ignore[arg-type]


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
