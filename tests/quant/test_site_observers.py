"""Observers of one site: which ones a plan creates, which channels each observes, and ranges before GELU."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fqvit.models.config import ViTConfig
from fqvit.models.graph import trace
from fqvit.models.layers import Role
from fqvit.quant.calibrate import SiteObserver, gelu_cutoff, observation_points, trim_gelu_inputs
from fqvit.quant.channels import GELU_DEPTH
from fqvit.quant.observers import Ema, MinMax, Omse, Percentile
from fqvit.quant.plan import SitePlan, plan
from fqvit.quant.qparams import QParams, affine, concatenate
from fqvit.quant.recipe import RECIPES, Recipe
from tests.factories import float_model, model_of

ORIGINAL = RECIPES["fq-vit-original"]


def test_a_plan_creates_the_observer_that_it_names() -> None:
    kinds = {"minmax": MinMax, "ema": Ema, "percentile": Percentile, "omse": Omse}
    for name, kind in kinds.items():
        (part,) = SiteObserver(SitePlan("norm", "range", 6, "norm", name), ORIGINAL).parts  # type: ignore[arg-type]
        assert type(part) is kind
        wanted = {"momentum": 0.01, "quantile": 0.99999, "bits": 6, "last_batch": True}
        assert part.state()["settings"] == {key: wanted[key] for key in part.settings}


def test_each_group_observes_a_third_of_the_channels() -> None:
    observer = SiteObserver(SitePlan("qkv", "range", 8, "qkv", groups=3), ORIGINAL)
    observer.observe(torch.tensor([1.0, -1.0, 2.0, -2.0, 4.0, -4.0]).repeat(2, 9, 1))
    assert observer.qparams().scale == pytest.approx([2 / 255, 4 / 255, 8 / 255])


def test_the_levels_of_relative_attention_depend_on_the_number_of_tokens() -> None:
    observer = SiteObserver(SitePlan("softmax", "relative", 4, "attention"), ORIGINAL)
    for tokens, top in ((577, 2**13), (300, 2**14), (50, 2**15)):
        observer.observe(torch.full((1, 2, 3, tokens), 1 / tokens))
        assert max(observer.qparams().levels) == top
    observer.merge({"tokens": 577, "parts": []})
    assert max(observer.qparams().levels) == 2**13


def test_sites_with_known_parameters_observe_nothing() -> None:
    for site in (
        SitePlan("softmax", "log2", 4, "attention"),
        SitePlan("softmax", "relative", 4, "attention"),
        SitePlan("qkv", "range", 8, "qkv", groups=3, fixed=(-1.0, 1.0)),
    ):
        observer = SiteObserver(site, ORIGINAL)
        observer.observe(torch.full((1, 6), torch.nan))
        assert observer.parts == [] and observer.qparams().bits == site.bits


def test_symmetric_sites_have_the_middle_code_as_zero_point() -> None:
    for fixed in (None, (0.0, 3.0)):
        observer = SiteObserver(SitePlan("norm", "range", 8, "norm", fixed=fixed, symmetric=True), ORIGINAL)
        observer.observe(torch.arange(4.0))
        assert observer.qparams().zero.tolist() == [128]


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_range_before_gelu_is_trimmed_at_the_cutoff_of_the_finest_channel(symmetric: bool) -> None:
    graph = trace(float_model("vit").module)
    sites = plan(graph, msgspec.structs.replace(RECIPES["fq-vit"], symmetric=symmetric))
    fine, coarse = 0.001, 0.1
    after = concatenate([QParams(8, np.array([scale]), np.array([9])) for scale in (coarse, fine)])

    def trimmed(low: float) -> QParams:
        found = {"blocks.0.mlp.fc1": affine(low, 2.0, 8), "blocks.0.mlp.act": after}
        return trim_gelu_inputs(graph, found, sites)["blocks.0.mlp.fc1"]

    cutoff = gelu_cutoff(fine / 2)
    assert -5 < cutoff < gelu_cutoff(coarse / 2) - 1
    q, above = trimmed(-20.0), trimmed(-1.0)
    if symmetric:
        assert q.zero.tolist() == above.zero.tolist() == [128]
        assert q.scale[0] == pytest.approx(-cutoff / 128, rel=0.02) and above.scale[0] == pytest.approx(2 / 127, rel=0.01)
    else:
        assert -q.zero[0] * q.scale[0] == pytest.approx(cutoff, abs=2 * q.scale[0])
        assert above.scale[0] == pytest.approx(3 / 255, rel=0.01) and above.zero[0] == 85


def test_a_site_before_the_class_token_selection_is_observed_at_its_own_node_unless_it_is_a_norm() -> None:
    last = ViTConfig((8, 8), 4, 3, 5, 16, 1, 2, 24, norm_first=False, norm_last=True)
    graph = trace(model_of(last, "last").module)
    assert observation_points(graph) == {node.name: node.name for node in graph.nodes}


@pytest.mark.parametrize("images, factor", [(200, 1.2), (5000, 1.0)])
def test_balanced_extremes_widen_sites_with_few_rows_and_shorten_gelu_outputs(images: int, factor: float) -> None:
    x = torch.rand(images, 3)

    def ends(role: Role, extremes: Literal["observed", "balanced"]) -> NDArray[np.float64]:
        site = SitePlan("site", "channels", 8, role, k=4)
        observer = SiteObserver(site, Recipe(name="mine", channels=True, extremes=extremes))
        observer.observe(x)
        q = observer.qparams()
        return (q.last - q.zero) * q.scale

    np.testing.assert_allclose(ends("norm", "balanced"), factor * ends("norm", "observed"), rtol=1e-3)
    spans = [ends("gelu", extremes).max() + GELU_DEPTH for extremes in ("balanced", "observed")]
    high = float(x.max())
    np.testing.assert_allclose(spans[0] / spans[1], (0.85 * high + GELU_DEPTH) / (high + GELU_DEPTH), rtol=1e-2)
