from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fqvit.errors import FqvitError
from fqvit.models.graph import Graph, Node, trace
from fqvit.models.layers import Add, Context, Heads, LayerNorm, Linear
from fqvit.models.maps import Relu, Upsample
from fqvit.quant.plan import SitePlan, plan, recipes_of_parts
from fqvit.quant.recipe import RECIPES, SiteRule
from tests.factories import MODELS, float_model

GRAPHS = {kind: trace(float_model(kind).module) for kind in MODELS}


def planned(
    recipe: str = "fq-vit", kind: str = "vit", sites: dict[str, SiteRule] | None = None, **changes: Any
) -> dict[str, SitePlan]:
    return plan(GRAPHS[kind], msgspec.structs.replace(RECIPES[recipe], sites=sites or {}, **changes))


def with_channels(graph: Graph, **changes: Any) -> set[str]:
    """The sites that have a step for each channel."""
    sites = plan(graph, msgspec.structs.replace(RECIPES["fqvit"], **changes))
    return {name for name, site in sites.items() if site.kind == "channels"}


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
    assert (sites["head"].kind, sites["head"].bits, sites["head"].role) == ("range", 8, "logits")


@pytest.mark.parametrize("name", ["minmax", "ema", "percentile", "omse"])
def test_a_baseline_has_one_observer_everywhere(name: str) -> None:
    sites = planned(name)
    assert {(site.kind, site.observer, site.bits) for site in sites.values()} == {("range", name, 8)}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_site_is_a_node_in_the_order_of_the_graph(kind: str, recipe: str) -> None:
    sites = list(planned(recipe, kind))
    names = [node.name for node in GRAPHS[kind].nodes]
    assert sites == sorted(sites, key=names.index)
    assert (GRAPHS[kind].output in sites) == (RECIPES[recipe].logits == "codes")


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
    assert sites["blocks.1.mlp.act"] == SitePlan("blocks.1.mlp.act", "range", 5, "gelu", "omse")
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
    assert planned(sites={"residual": SiteRule(k=5), "embed": SiteRule(bits=7)})["embed"].k == 5


def test_residuals_can_be_moved_to_and_from_power_of_two_factors() -> None:
    assert planned(sites={"residual": SiteRule(observer="omse")})["embed"].kind == "range"
    assert planned("minmax", sites={"embed": SiteRule(observer="ptf")})["embed"].kind == "ptf"


def test_attention_of_more_than_four_bits_is_uniform() -> None:
    for bits in (5, 8):
        assert planned(attention_bits=bits)["blocks.0.attn.softmax"].kind == "range"
        assert planned(sites={"attention": SiteRule(bits=bits)})["blocks.0.attn.softmax"].kind == "range"
    assert planned(attention_bits=2)["blocks.0.attn.softmax"] == SitePlan("blocks.0.attn.softmax", "log2", 2, "attention")
    assert planned(sites={"attention": SiteRule(bits=8)})["blocks.0.attn.softmax"] == SitePlan(
        "blocks.0.attn.softmax", "range", 8, "attention"
    )


def test_uniform_attention_is_uniform_with_few_bits_too() -> None:
    for bits in (2, 4, 8):
        assert planned("minmax", attention_bits=bits)["blocks.0.attn.softmax"].kind == "range"


def test_ranges_of_what_is_never_negative_start_at_0() -> None:
    for low in (0.0, -0.0):
        found = planned("minmax", sites={"attention": SiteRule(range=(low, 0.5))})["blocks.0.attn.softmax"]
        assert found.fixed == (0.0, 0.5)
    with pytest.raises(FqvitError, match=r"^blocks\.0\.attn\.softmax: range -1\.\.1, but attention is never negative"):
        planned("minmax", sites={"attention": SiteRule(range=(-1.0, 1.0))})
    graph = Graph((Node("act", Relu(), ("images",)),), "act")
    for rule, words in (
        (SiteRule(range=(-1.0, 1.0)), "range -1..1, but relu is never negative"),
        (SiteRule(bits=9), r"9 bits for an input of a matrix product \(role relu\), expected at most 8"),
        (SiteRule(observer="ptf"), "observer ptf for role relu, but ptf is for LayerNorm inputs"),
    ):
        with pytest.raises(FqvitError, match=f"^act: {words}"):
            plan(graph, msgspec.structs.replace(RECIPES["minmax"], sites={"relu": rule}))
    recipe = msgspec.structs.replace(RECIPES["minmax"], sites={"relu": SiteRule(bits=8, range=(0.0, 6.0))})
    assert plan(graph, recipe)["act"] == SitePlan("act", "range", 8, "relu", fixed=(0.0, 6.0))


@pytest.mark.parametrize("bits, found", [(8, 7), (7, 7), (4, 4)])
def test_a_symmetric_relu_has_the_half_of_an_int8_that_is_not_negative(bits: int, found: int) -> None:
    graph = Graph((Node("act", Relu(), ("images",)),), "act")
    recipe = msgspec.structs.replace(RECIPES["minmax"], symmetric=True, sites={"relu": SiteRule(bits=bits)})
    site = plan(graph, recipe)["act"]
    assert (site.bits, site.groups, site.symmetric) == (found, 1, False)


def test_a_branch_of_the_pyramid_is_no_site_unless_more_than_a_sum_reads_it() -> None:
    """An Upsample that takes only its size does not count."""
    lateral, other = (Node(name, Linear(4, 4, "pyramid"), ("images",)) for name in ("lateral", "other"))
    size = Node("size", Upsample(), ("other", "lateral"))
    total = Node("total", Add(), ("size", "lateral"))
    recipe = RECIPES["minmax"]
    nodes = (lateral, other, size, total)
    assert "lateral" not in plan(Graph(nodes, "total"), recipe) and "other" in plan(Graph(nodes, "total"), recipe)
    assert "lateral" in plan(Graph(nodes, "total", ("lateral",)), recipe)
    assert "lateral" in plan(Graph(nodes, "total"), msgspec.structs.replace(recipe, branches="codes"))
    nodes = (*nodes, Node("more", Upsample(), ("lateral", "total")))
    assert "lateral" in plan(Graph(nodes, "more"), recipe)


def test_a_part_has_the_rules_of_its_own_sites() -> None:
    relu = Graph((Node("act", Relu(), ("images",)),), "act")
    rules = {"relu": SiteRule(bits=5), "gelu": SiteRule(bits=6), "*act": SiteRule(observer="omse")}
    recipe = msgspec.structs.replace(RECIPES["minmax"], sites=rules)
    first, second = recipes_of_parts([GRAPHS["vit"], relu], recipe)
    assert set(first.sites) == {"gelu", "*act"} and set(second.sites) == {"relu", "*act"}
    assert msgspec.structs.replace(first, sites=rules) == recipe
    with pytest.raises(FqvitError, match="no site with codes is called 'relu'"):
        recipes_of_parts([GRAPHS["vit"]], recipe)


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(FqvitError, match=r"no site with codes is called 'blocks\.9\.\*'"):
        planned(sites={"blocks.9.*": SiteRule(bits=4)})


@pytest.mark.parametrize("site", ["head", "blocks.0.attn.proj", "patch_embed.proj", "branch"])
def test_a_site_without_codes_cannot_be_overridden(site: str) -> None:
    with pytest.raises(FqvitError, match=f"no site with codes is called {site!r}"):
        planned(sites={site: SiteRule(bits=4)})


def test_power_of_two_factors_are_for_residuals_only() -> None:
    with pytest.raises(FqvitError, match=r"blocks\.0\.mlp\.act: observer ptf for role gelu, but ptf is for LayerNorm inputs"):
        planned(sites={"gelu": SiteRule(observer="ptf")})
    with pytest.raises(
        FqvitError, match=r"blocks\.0\.attn\.softmax: observer ptf for role attention, but ptf is for LayerNorm inputs"
    ):
        planned("minmax", sites={"attention": SiteRule(observer="ptf")})


def test_ours_site_by_site() -> None:
    sites = plan(GRAPHS["vit"], RECIPES["fqvit"])
    kinds = {name.removeprefix("blocks.0."): (site.kind, site.bits) for name, site in sites.items() if "blocks.0" in name}
    assert kinds == {
        "norm1": ("channels", 8),
        "attn.qkv": ("channels", 8),
        "attn.scores": ("range", 8),
        "attn.softmax": ("relative", 4),
        "attn.context": ("channels", 8),
        "add1": ("range", 16),
        "norm2": ("channels", 8),
        "mlp.fc1": ("range", 10),
        "mlp.act": ("channels", 8),
        "add2": ("range", 16),
    }
    assert sites["blocks.0.mlp.act"].k == 4 and sites["norm"].kind == "channels"


@pytest.mark.parametrize("bits", [5, 8])
def test_relative_attention_stays_relative_with_more_bits(bits: int) -> None:
    found = planned("fqvit", attention_bits=bits)["blocks.0.attn.softmax"]
    assert found == SitePlan("blocks.0.attn.softmax", "relative", bits, "attention")


@pytest.mark.parametrize("role", ["norm", "qkv", "context", "gelu"])
def test_more_than_8_bits_are_refused_where_a_matrix_product_reads(role: str) -> None:
    name = next(node.name for node in GRAPHS["vit"].nodes if node.leaf.role == role)
    with pytest.raises(
        FqvitError, match=rf"^{name}: 9 bits for an input of a matrix product \(role {role}\), expected at most 8"
    ):
        planned(sites={role: SiteRule(bits=9)})
    assert planned(sites={role: SiteRule(bits=8)})[name].bits == 8


def test_more_than_8_bits_are_refused_for_attention_pools_and_branches() -> None:
    for bits in (9, 16):
        with pytest.raises(FqvitError, match=rf"^blocks\.0\.attn\.softmax: {bits} bits for an input of a matrix product"):
            planned(sites={"attention": SiteRule(bits=bits)})
    with pytest.raises(FqvitError, match=r"^pool: 9 bits"):
        planned(kind="swin", sites={"pooled": SiteRule(bits=9)})
    with pytest.raises(FqvitError, match=r"^blocks\.0\.attn\.proj: 12 bits"):
        planned("fq-vit-original", sites={"branch": SiteRule(bits=12)})


@pytest.mark.parametrize("role", ["residual", "hidden", "scores"])
@pytest.mark.parametrize("recipe", ["fq-vit", "fqvit", "minmax"])
def test_sums_tables_and_scores_take_16_bits(role: str, recipe: str) -> None:
    assert {site.bits for site in planned(recipe, sites={role: SiteRule(bits=16)}).values() if site.role == role} == {16}


def test_channels_are_for_sites_that_linear_maps_read() -> None:
    """Swin's norms reach them through windows; its last norm is averaged, which needs one step for all."""
    block = {"norm1", "attn.qkv", "attn.context", "norm2", "mlp.act"}
    vit = with_channels(GRAPHS["vit"])
    assert vit == {f"blocks.{i}.{name}" for i in (0, 1) for name in block} | {"norm"}
    swin = with_channels(GRAPHS["swin"])
    blocks = [f"layers.{stage}.blocks.{i}" for stage, i in ((0, 0), (0, 1), (1, 0))]
    assert swin == {f"{place}.{name}" for place in blocks for name in block} | {"layers.1.downsample.norm"}
    assert "norm" not in with_channels(GRAPHS["no class token"])  # norm, then mean
    assert "fc_norm" in with_channels(GRAPHS["mean"])  # mean, then norm


@pytest.mark.parametrize("features", ["tokens", "pooled"])
@pytest.mark.parametrize("kind", MODELS)
def test_features_have_one_step_for_all_channels(kind: str, features: Any) -> None:
    graph = trace(float_model(kind).module, features)
    assert not {"norm", "fc_norm"} & with_channels(graph)
    assert graph.output not in with_channels(graph)


def test_a_site_with_an_observer_or_range_of_its_own_has_one_step() -> None:
    for rule in (SiteRule(observer="omse"), SiteRule(range=(-1.0, 1.0))):
        assert with_channels(GRAPHS["vit"], sites={"gelu": rule}) == {
            name for name in with_channels(GRAPHS["vit"]) if not name.endswith("act")
        }
    found = planned("fqvit", sites={"gelu": SiteRule(bits=6, k=2)})["blocks.0.mlp.act"]
    assert (found.kind, found.bits, found.k) == ("channels", 6, 2)


def test_values_have_steps_for_each_channel_only_with_attention_times_v() -> None:
    """Attention times V is requantized by one number, which must be the ratio of the two sites in every channel."""
    sites = plan(
        GRAPHS["vit"],
        msgspec.structs.replace(RECIPES["fqvit"], sites={"blocks.0.attn.context": SiteRule(observer="omse")}),
    )
    qkv = {name: (site.kind, site.groups) for name, site in sites.items() if site.role == "qkv"}
    assert qkv == {"blocks.0.attn.qkv": ("range", 3), "blocks.1.attn.qkv": ("channels", 1)}
    other_way = with_channels(GRAPHS["vit"], sites={"qkv": SiteRule(observer="omse")})
    assert "blocks.0.attn.context" in other_way and "blocks.0.attn.qkv" not in other_way


def test_channels_need_linear_maps_and_nothing_else_to_read_them() -> None:
    norm = Node("norm", LayerNorm(4, 1e-6), ("images",))
    maps = tuple(Node(name, Linear(4, 4, "logits"), ("norm",)) for name in ("one", "two"))
    assert with_channels(Graph((norm, *maps), "two", ("one",)), sites={}) == {"norm"}
    total = Node("sum", Add(), ("norm", "images"))
    assert with_channels(Graph((norm, *maps, total), "sum", ("one", "two")), sites={}) == set()


def test_values_that_two_read_need_channels_in_both() -> None:
    qkv = Node("qkv", Linear(4, 12, "qkv"), ("images",))
    v = Node("v", Heads(2, 2), ("qkv",))
    products = tuple(Node(name, Context(), ("images", "v")) for name in ("one", "two"))
    ends = tuple(Node(f"{name}.end", Linear(4, 4, "logits"), (name,)) for name in ("one", "two"))
    graph = Graph((qkv, v, *products, *ends), "two.end", ("one.end",))
    assert with_channels(graph, sites={}) == {"qkv", "one", "two"}
    assert with_channels(graph, sites={"two": SiteRule(observer="omse")}) == {"one"}
