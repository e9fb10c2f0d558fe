"""Tests of wider ranges of V, which make the codes of attention times V finer.

Attention averages V over tokens, so most channels of the product span a fraction of V's range. A channel that is not
averaged makes the codes of all channels coarse, unless its range is widened. See also: src/fqvit/quant/values.py.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from fqvit.models.graph import trace
from fqvit.quant.recipe import RECIPES, SiteRule
from fqvit.quant.values import value_paths, widened
from tests.factories import calibration_of, float_model
from tests.factories import one_thread as one_thread

PLAIN = RECIPES["fqvit"]
WIDENED = msgspec.structs.replace(PLAIN, values="widened")


def cost(ranges: np.ndarray, wanted: np.ndarray, kept: np.ndarray, norms: np.ndarray) -> float:
    """Return the cost in src/fqvit/quant/values.py, where ranges, wanted, kept and norms are called range, p, a2 and n."""
    factor = float((wanted / ranges).max())
    return float((norms * ranges**2 * (kept + factor**2)).sum())


def test_one_channel_that_is_not_averaged_gets_a_wider_range_and_the_others_keep_theirs() -> None:
    reach, wanted = np.ones(8), np.full(8, 0.3)
    wanted[3] = 1.0
    found = widened(reach, wanted, np.full(8, 0.05), np.ones(8))
    assert found[3] > 2 and (np.delete(found, 3) <= 1.05).all()


def test_values_that_are_not_averaged_keep_their_ranges() -> None:
    reach = np.linspace(0.5, 2, 8)
    np.testing.assert_array_equal(widened(reach, reach, np.ones(8), np.ones(8)), reach)


@pytest.mark.parametrize("seed", range(5))
def test_the_cost_never_rises(seed: int) -> None:
    generator = np.random.default_rng(seed)
    reach, norms, kept = generator.uniform(0.1, 3, (3, 32))
    wanted = reach * generator.uniform(0, 1, 32)
    arguments = wanted, kept / 3, norms
    found = widened(reach, *arguments)
    assert (found >= reach).all() and cost(found, *arguments) <= cost(reach, *arguments) * (1 + 1e-9)


def test_channels_that_are_always_0_stay_finite() -> None:
    assert not widened(np.zeros(4), np.zeros(4), np.zeros(4), np.zeros(4)).any()


def test_calibration_widens_v_only_and_makes_the_product_finer() -> None:
    model = float_model("vit")
    plain, ours = (calibration_of(model, recipe) for recipe in (PLAIN, WIDENED))
    assert [path.layer for path in value_paths(trace(model.module))] == ["blocks.0.attn.qkv", "blocks.1.attn.qkv"]
    for path in value_paths(trace(model.module)):
        before, after = plain.sites[path.layer].scale, ours.sites[path.layer].scale
        values = 2 * len(before) // 3
        np.testing.assert_array_equal(before[:values], after[:values])
        assert (after[values:] >= before[values:] * (1 - 1e-3)).all()
        factors = [each.sites[path.context].scale[0] / each.sites[path.layer].scale[values] for each in (plain, ours)]
        assert factors[1] <= factors[0] * (1 + 1e-9)
    same = {
        name
        for name in plain.sites
        if name not in {site for p in value_paths(trace(model.module)) for site in (p.layer, p.context)}
    }
    assert all((plain.sites[name].scale == ours.sites[name].scale).all() for name in same)


@pytest.mark.parametrize("change", [{"channels": False}, {"sites": {"context": SiteRule(observer="omse")}}])
def test_sites_without_per_channel_ranges_keep_their_scales(change: dict[str, object]) -> None:
    recipes = [msgspec.structs.replace(recipe, **change) for recipe in (PLAIN, WIDENED)]
    plain, ours = (calibration_of(float_model("vit"), recipe) for recipe in recipes)
    assert all((plain.sites[name].scale == ours.sites[name].scale).all() for name in plain.sites)
