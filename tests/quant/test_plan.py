from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fqvit.errors import FqvitError
from fqvit.models.graph import trace
from fqvit.quant.plan import SitePlan, plan
from fqvit.quant.recipe import RECIPES, SiteRule
from tests.factories import MODELS, float_model

GRAPHS = {kind: trace(float_model(kind).module) for kind in MODELS}


def planned(
    recipe: str = "fq-vit", kind: str = "vit", sites: dict[str, SiteRule] | None = None, **changes: Any
) -> dict[str, SitePlan]:
    return plan(GRAPHS[kind], msgspec.structs.replace(RECIPES[recipe], sites=sites or {}, **changes))


def test_the_papers_method_site_by_site() -> None:
    sites = planned()
    kinds = {name.removeprefix("blocks.0."): (site.kind, site.bits) for name, site in sites.items() if "blocks.0" in name}
    assert kinds == {
        "norm1": ("range", 8),
        "attn.qkv": ("range", 8),
        "attn.scores": ("range", 8),
        "attn.softmax": ("log2", 4),
        "attn.context": ("range", 8),
        "add1": ("ptf", 8),
        "norm2": ("range", 8),
        "mlp.fc1": ("range", 8),
        "mlp.act": ("range", 8),
        "add2": ("ptf", 8),
    }
    assert sites["embed"].kind == "ptf" and sites["embed"].k == 3
    assert sites["blocks.0.attn.qkv"].groups == 3
    assert "patch_embed.proj" not in sites and "head" not in sites


def test_the_original_keeps_codes_at_branches_and_one_scale_for_qkv() -> None:
    sites = planned("fq-vit-original")
    assert {"patch_embed.proj", "blocks.0.attn.proj", "blocks.1.mlp.fc2"} <= set(sites)
    assert sites["blocks.0.attn.qkv"].groups == 1


@pytest.mark.parametrize("name", ["minmax", "ema", "percentile", "omse"])
def test_a_baseline_has_one_observer_everywhere(name: str) -> None:
    sites = planned(name)
    assert {(site.kind, site.observer, site.bits) for site in sites.values()} == {("range", name, 8)}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_site_is_a_node_in_the_order_of_the_graph(kind: str, recipe: str) -> None:
    sites = list(planned(recipe, kind))
    names = [node.name for node in GRAPHS[kind].nodes]
    assert sites == sorted(sites, key=names.index) and GRAPHS[kind].output not in sites


def test_a_site_is_overridden_by_name_by_glob_and_by_role() -> None:
    sites = planned(
        sites={
            "gelu": SiteRule(bits=6),
            "blocks.1.mlp.*act": SiteRule(bits=5, observer="omse"),
            "blocks.0.attn.scores": SiteRule(range=(-4.0, 4.0)),
            "blocks.?.add1": SiteRule(k=1),
        }
    )
    assert sites["blocks.0.mlp.act"].bits == 6 and sites["blocks.0.mlp.act"].observer == "minmax"
    assert sites["blocks.1.mlp.act"] == SitePlan("blocks.1.mlp.act", "range", 5, "omse")
    assert sites["blocks.0.attn.scores"].fixed == (-4.0, 4.0) and sites["blocks.1.attn.scores"].fixed is None
    assert (sites["blocks.1.add1"].k, sites["blocks.1.add2"].k) == (1, 3)


def test_a_glob_over_everything_in_a_block_changes_its_sites_with_codes() -> None:
    sites = planned(sites={"blocks.0.*": SiteRule(bits=3)})
    assert sites.keys() == planned().keys()
    assert {site.bits for name, site in sites.items() if name.startswith("blocks.0.")} == {3}
    assert 3 not in {site.bits for name, site in sites.items() if not name.startswith("blocks.0.")}


def test_later_rules_win_field_by_field() -> None:
    sites = planned(sites={"residual": SiteRule(k=5, bits=7), "embed": SiteRule(k=0)})
    assert (sites["embed"].k, sites["embed"].bits) == (0, 7)
    assert (sites["blocks.0.add1"].k, sites["blocks.0.add1"].bits) == (5, 7)


def test_residuals_can_be_moved_to_and_from_power_of_two_factors() -> None:
    assert planned(sites={"residual": SiteRule(observer="omse")})["embed"].kind == "range"
    assert planned("minmax", sites={"embed": SiteRule(observer="ptf")})["embed"].kind == "ptf"


def test_attention_of_more_than_four_bits_is_uniform() -> None:
    assert planned(attention_bits=8)["blocks.0.attn.softmax"].kind == "range"
    assert planned(attention_bits=2)["blocks.0.attn.softmax"] == SitePlan("blocks.0.attn.softmax", "log2", 2)
    assert planned(sites={"attention": SiteRule(bits=8)})["blocks.0.attn.softmax"] == SitePlan(
        "blocks.0.attn.softmax", "range", 8
    )


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(FqvitError, match=r"no site with codes is called 'blocks\.9\.\*'"):
        planned(sites={"blocks.9.*": SiteRule(bits=4)})


@pytest.mark.parametrize("site", ["head", "blocks.0.attn.proj", "patch_embed.proj", "branch"])
def test_a_site_without_codes_cannot_be_overridden(site: str) -> None:
    with pytest.raises(FqvitError, match=f"no site with codes is called {site!r}"):
        planned(sites={site: SiteRule(bits=4)})


def test_power_of_two_factors_are_for_residuals_only() -> None:
    with pytest.raises(FqvitError, match=r"blocks\.0\.mlp\.act: ptf is for LayerNorm inputs only"):
        planned(sites={"gelu": SiteRule(observer="ptf")})


@pytest.mark.parametrize("rule", [SiteRule(observer="omse"), SiteRule(range=(-1.0, 1.0))])
def test_attention_times_v_has_the_steps_of_a_v_with_one_for_each_channel(rule: SiteRule) -> None:
    with pytest.raises(FqvitError, match=r"blocks\.0\.attn\.context: its steps follow those of V"):
        planned("fqvit", sites={"context": rule})
    assert planned("fqvit", sites={"context": rule, "qkv": SiteRule(observer="omse")})["blocks.0.attn.context"].kind == "range"
    assert planned("fqvit", sites={"context": SiteRule(bits=6)})["blocks.0.attn.context"].kind == "channels"
