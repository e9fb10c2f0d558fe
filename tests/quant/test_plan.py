"""Plans: the kind, bits and observer of each site for given graphs and recipes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fqvit.errors import FqvitError
from fqvit.models.general import Route
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
    """The sites that have one scale per channel."""
    sites = plan(graph, msgspec.structs.replace(RECIPES["fqvit"], **changes))
    return {name for name, site in sites.items() if site.kind == "channels"}


def test_recipe_fq_vit_plans_each_site_as_the_paper_does() -> None:
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


def test_recipe_fq_vit_original_quantizes_branches_and_uses_one_scale_for_qkv() -> None:
    sites = planned("fq-vit-original")
    assert {"patch_embed.proj", "blocks.0.attn.proj", "blocks.1.mlp.fc2"} <= set(sites)
    assert sites["blocks.0.attn.qkv"].groups == 1
    assert (sites["head"].kind, sites["head"].bits, sites["head"].role) == ("range", 8, "logits")


@pytest.mark.parametrize("name", ["minmax", "ema", "percentile", "omse"])
def test_baseline_recipes_use_one_observer_for_every_site(name: str) -> None:
    sites = planned(name)
    assert {(site.kind, site.observer, site.bits) for site in sites.values()} == {("range", name, 8)}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_sites_are_nodes_in_graph_order(kind: str, recipe: str) -> None:
    sites = list(planned(recipe, kind))
    names = [node.name for node in GRAPHS[kind].nodes]
    assert sites == sorted(sites, key=names.index)
    assert (GRAPHS[kind].output in sites) == (RECIPES[recipe].logits == "codes")


def test_rules_match_sites_by_name_by_glob_and_by_role() -> None:
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


def test_a_glob_over_a_block_changes_all_of_its_quantized_sites() -> None:
    sites = planned(sites={"blocks.0.*": SiteRule(bits=3)})
    assert sites.keys() == planned().keys()
    assert {site.bits for name, site in sites.items() if name.startswith("blocks.0.")} == {3}
    assert 3 not in {site.bits for name, site in sites.items() if not name.startswith("blocks.0.")}


def test_later_rules_win_field_by_field() -> None:
    sites = planned(sites={"residual": SiteRule(k=5, bits=7), "embed": SiteRule(k=0)})
    assert (sites["embed"].k, sites["embed"].bits) == (0, 7)
    assert (sites["blocks.0.add1"].k, sites["blocks.0.add1"].bits) == (5, 7)
    assert planned(sites={"residual": SiteRule(k=5), "embed": SiteRule(bits=7)})["embed"].k == 5


def test_rules_switch_the_power_of_two_factor_of_residual_sites_on_and_off() -> None:
    assert planned(sites={"residual": SiteRule(observer="omse")})["embed"].kind == "range"
    assert planned("minmax", sites={"embed": SiteRule(observer="ptf")})["embed"].kind == "ptf"


def test_log2_attention_with_more_than_4_bits_becomes_uniform() -> None:
    for bits in (5, 8):
        assert planned(attention_bits=bits)["blocks.0.attn.softmax"].kind == "range"
        assert planned(sites={"attention": SiteRule(bits=bits)})["blocks.0.attn.softmax"].kind == "range"
    assert planned(attention_bits=2)["blocks.0.attn.softmax"] == SitePlan("blocks.0.attn.softmax", "log2", 2, "attention")
    assert planned(sites={"attention": SiteRule(bits=8)})["blocks.0.attn.softmax"] == SitePlan(
        "blocks.0.attn.softmax", "range", 8, "attention"
    )


def test_uniform_attention_stays_uniform_with_few_bits() -> None:
    for bits in (2, 4, 8):
        assert planned("minmax", attention_bits=bits)["blocks.0.attn.softmax"].kind == "range"


def test_ranges_of_attention_and_relu_must_start_at_0() -> None:
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
def test_a_symmetric_relu_has_at_most_7_bits(bits: int, found: int) -> None:
    graph = Graph((Node("act", Relu(), ("images",)),), "act")
    recipe = msgspec.structs.replace(RECIPES["minmax"], symmetric=True, sites={"relu": SiteRule(bits=bits)})
    site = plan(graph, recipe)["act"]
    assert (site.bits, site.groups, site.symmetric) == (found, 1, False)


def test_a_branch_of_the_pyramid_that_is_only_added_is_not_quantized() -> None:
    """An Upsample that reads only the size of the branch does not count as a reader."""
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


def test_each_part_gets_the_rules_that_match_its_sites() -> None:
    relu = Graph((Node("act", Relu(), ("images",)),), "act")
    rules = {"relu": SiteRule(bits=5), "gelu": SiteRule(bits=6), "*act": SiteRule(observer="omse")}
    recipe = msgspec.structs.replace(RECIPES["minmax"], sites=rules)
    first, second = recipes_of_parts([GRAPHS["vit"], relu], recipe)
    assert set(first.sites) == {"gelu", "*act"} and set(second.sites) == {"relu", "*act"}
    assert msgspec.structs.replace(first, sites=rules) == recipe
    with pytest.raises(FqvitError, match="'relu' matches no quantized site"):
        recipes_of_parts([GRAPHS["vit"]], recipe)


def test_a_pattern_that_matches_nothing_is_rejected() -> None:
    with pytest.raises(FqvitError, match=r"'blocks\.9\.\*' matches no quantized site"):
        planned(sites={"blocks.9.*": SiteRule(bits=4)})


def test_rules_of_built_in_recipes_need_not_match_a_site() -> None:
    """A model without an MLP has no site of role hidden, for which the recipe fqvit has a rule."""
    graph = Graph((Node("act", Relu(), ("images",)),), "act")
    assert "hidden" in RECIPES["fqvit"].sites and set(plan(graph, RECIPES["fqvit"])) == {"act"}
    with pytest.raises(FqvitError, match="'hidden' matches no quantized site"):
        plan(graph, msgspec.structs.replace(RECIPES["fqvit"], sites={"hidden": SiteRule(bits=9)}))


@pytest.mark.parametrize("site", ["head", "blocks.0.attn.proj", "patch_embed.proj", "branch"])
def test_rules_for_sites_that_are_not_quantized_are_rejected(site: str) -> None:
    with pytest.raises(FqvitError, match=f"{site!r} matches no quantized site"):
        planned(sites={site: SiteRule(bits=4)})


def test_ptf_is_rejected_except_for_residual_sites() -> None:
    with pytest.raises(FqvitError, match=r"blocks\.0\.mlp\.act: observer ptf for role gelu, but ptf is for LayerNorm inputs"):
        planned(sites={"gelu": SiteRule(observer="ptf")})
    with pytest.raises(
        FqvitError, match=r"blocks\.0\.attn\.softmax: observer ptf for role attention, but ptf is for LayerNorm inputs"
    ):
        planned("minmax", sites={"attention": SiteRule(observer="ptf")})


def test_recipe_fqvit_plans_channels_relative_attention_and_wide_residuals() -> None:
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
def test_more_than_8_bits_are_rejected_for_inputs_of_matrix_products(role: str) -> None:
    name = next(node.name for node in GRAPHS["vit"].nodes if node.leaf.role == role)
    with pytest.raises(
        FqvitError, match=rf"^{name}: 9 bits for an input of a matrix product \(role {role}\), expected at most 8"
    ):
        planned(sites={role: SiteRule(bits=9)})
    assert planned(sites={role: SiteRule(bits=8)})[name].bits == 8


def test_more_than_8_bits_are_rejected_for_attention_pooling_and_branches() -> None:
    for bits in (9, 16):
        with pytest.raises(FqvitError, match=rf"^blocks\.0\.attn\.softmax: {bits} bits for an input of a matrix product"):
            planned(sites={"attention": SiteRule(bits=bits)})
    with pytest.raises(FqvitError, match=r"^pool: 9 bits"):
        planned(kind="swin", sites={"pooled": SiteRule(bits=9)})
    with pytest.raises(FqvitError, match=r"^blocks\.0\.attn\.proj: 12 bits"):
        planned("fq-vit-original", sites={"branch": SiteRule(bits=12)})


@pytest.mark.parametrize("role", ["residual", "hidden", "scores"])
@pytest.mark.parametrize("recipe", ["fq-vit", "fqvit", "minmax"])
def test_residual_hidden_and_scores_may_have_16_bits(role: str, recipe: str) -> None:
    assert {site.bits for site in planned(recipe, sites={role: SiteRule(bits=16)}).values() if site.role == role} == {16}


def test_sites_read_by_linear_layers_have_per_channel_scales() -> None:
    """Swin's norms are read through window partitioning; its last norm is averaged, which needs a per-tensor scale."""
    block = {"norm1", "attn.qkv", "attn.context", "norm2", "mlp.act"}
    vit = with_channels(GRAPHS["vit"])
    assert vit == {f"blocks.{i}.{name}" for i in (0, 1) for name in block} | {"norm"}
    swin = with_channels(GRAPHS["swin"])
    blocks = [f"layers.{stage}.blocks.{i}" for stage, i in ((0, 0), (0, 1), (1, 0))]
    assert swin == {f"{prefix}.{name}" for prefix in blocks for name in block} | {"layers.1.downsample.norm"}
    assert "norm" not in with_channels(GRAPHS["no class token"])  # norm, then mean
    assert "fc_norm" in with_channels(GRAPHS["mean"])  # mean, then norm


@pytest.mark.parametrize("features", ["tokens", "pooled"])
@pytest.mark.parametrize("kind", MODELS)
def test_features_have_a_per_tensor_scale(kind: str, features: Any) -> None:
    graph = trace(float_model(kind).module, features)
    assert not {"norm", "fc_norm"} & with_channels(graph)
    assert graph.output not in with_channels(graph)


def test_a_rule_with_an_observer_or_range_disables_per_channel_scales() -> None:
    for rule in (SiteRule(observer="omse"), SiteRule(range=(-1.0, 1.0))):
        assert with_channels(GRAPHS["vit"], sites={"gelu": rule}) == {
            name for name in with_channels(GRAPHS["vit"]) if not name.endswith("act")
        }
    found = planned("fqvit", sites={"gelu": SiteRule(bits=6, k=2)})["blocks.0.mlp.act"]
    assert (found.kind, found.bits, found.k) == ("channels", 6, 2)


def test_v_has_per_channel_scales_only_if_attention_times_v_has_them() -> None:
    """Attention times V is requantized by one multiplier, so the ratio of the two sites' scales is the same in all channels."""
    sites = plan(
        GRAPHS["vit"],
        msgspec.structs.replace(RECIPES["fqvit"], sites={"blocks.0.attn.context": SiteRule(observer="omse")}),
    )
    qkv = {name: (site.kind, site.groups) for name, site in sites.items() if site.role == "qkv"}
    assert qkv == {"blocks.0.attn.qkv": ("range", 3), "blocks.1.attn.qkv": ("channels", 1)}
    other_way = with_channels(GRAPHS["vit"], sites={"qkv": SiteRule(observer="omse")})
    assert "blocks.0.attn.context" in other_way and "blocks.0.attn.qkv" not in other_way


def test_per_channel_scales_require_that_only_linear_layers_read_the_site() -> None:
    norm = Node("norm", LayerNorm(4, 1e-6), ("images",))
    readers = tuple(Node(name, Linear(4, 4, "logits"), ("norm",)) for name in ("one", "two"))
    assert with_channels(Graph((norm, *readers), "two", ("one",)), sites={}) == {"norm"}
    total = Node("sum", Add(), ("norm", "images"))
    assert with_channels(Graph((norm, *readers, total), "sum", ("one", "two")), sites={}) == set()


def test_v_read_twice_needs_per_channel_scales_in_both_readers() -> None:
    qkv = Node("qkv", Linear(4, 12, "qkv"), ("images",))
    v = Node("v", Heads(2, 2), ("qkv",))
    products = tuple(Node(name, Context(), ("images", "v")) for name in ("one", "two"))
    ends = tuple(Node(f"{name}.end", Linear(4, 4, "logits"), (name,)) for name in ("one", "two"))
    graph = Graph((qkv, v, *products, *ends), "two.end", ("one.end",))
    assert with_channels(graph, sites={}) == {"qkv", "one", "two"}
    assert with_channels(graph, sites={"two": SiteRule(observer="omse")}) == {"one"}


def value_in_heads(view: tuple[int, ...], perm: tuple[int, ...], shape: tuple[int, ...]) -> Graph:
    """A graph of V [3, 4] (3 tokens), a route that splits it into heads, attention times V, and a linear layer."""
    v = Node("v", Linear(4, 4, "value"), ("images",))
    route = Node("heads", Route(view, perm, shape), ("v",))
    product = Node("context", Context(), ("images", "heads"))
    return Graph((v, route, product, Node("end", Linear(4, 4, "logits"), ("context",))), "end")


def test_v_has_per_channel_scales_only_if_heads_keep_the_order_of_channels() -> None:
    in_order = value_in_heads((3, 2, 2), (1, 0, 2), (2, 3, 2))
    assert with_channels(in_order, sites={}) == {"v", "context"}
    # Channel c belongs to head c mod 2: attention times V has the channels 0, 2, 1, 3 of V.
    interleaved = value_in_heads((3, 2, 2), (2, 0, 1), (2, 3, 2))
    assert with_channels(interleaved, sites={}) == {"context"}
    # One half of the channels per window: attention times V has two channels.
    windows = value_in_heads((3, 2, 2), (1, 0, 2), (2, 1, 3, 2))
    assert with_channels(windows, sites={}) == {"context"}
