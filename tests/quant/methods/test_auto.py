"""Tests of recipe auto: its measures, the sites to which it gives more bits, and the lowering of its result."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fqvit.errors import FqvitError
from fqvit.lowering.lower import lower
from fqvit.models.graph import run_float, trace
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.quant.calibrate import calibrate
from fqvit.quant.calibration import Calibration, Choice, Measure
from fqvit.quant.fit import check_fit
from fqvit.quant.methods.auto import PROBE_IMAGES, WIDER, choose, measure, wide
from fqvit.quant.plan import plan
from fqvit.quant.recipe import Recipe, SiteRule
from fqvit.quant.simulate import Simulation
from fqvit.runtime.reference import run
from tests.factories import few, float_model, images_for
from tests.factories import one_thread as one_thread

# This recipe only raises the bits of sites; test_narrow.py tests the search for widths of weights.
AUTO = Recipe(name="auto", attention="relative", channels=True, k=4, max_loss=0.5)


def with_choice(kind: str, recipe: Recipe) -> tuple[FloatModel, Calibration, Choice]:
    model = float_model(kind)
    calibration = calibrate(model, [images_for(model.preprocess, 12, 7)], recipe)
    assert calibration.choice is not None
    return model, calibration, calibration.choice


@cache
def at(kind: str, max_loss: float) -> tuple[FloatModel, Calibration, Choice]:
    return with_choice(kind, msgspec.structs.replace(AUTO, max_loss=max_loss))


@few
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(2, 5))
def test_measures_match_their_definitions(seed: int, images: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    exact, other = rng.normal(0, 3, (2, images, classes)).astype(np.float32)
    kl = agreement = loss = 0.0
    for a, b in zip(exact.tolist(), other.tolist(), strict=True):
        p, q = ([math.exp(x) / sum(map(math.exp, row)) for x in row] for row in (a, b))
        kl += sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))
        best, chosen = p.index(max(p)), q.index(max(q))
        agreement += best == chosen
        loss += p[best] - p[chosen]
    found = measure(torch.from_numpy(exact), torch.from_numpy(other))
    assert found.kl == pytest.approx(kl / images, abs=1e-9)
    assert found.agreement == pytest.approx(100 * agreement / images)
    assert found.loss == pytest.approx(100 * loss / images, abs=1e-9)


def test_equal_logits_have_no_loss() -> None:
    logits = 30 * torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    found = measure(logits, logits)
    assert (found.kl, found.agreement, found.loss) == (0, 100, 0)


def test_nothing_is_raised_if_the_initial_loss_is_within_the_limit() -> None:
    model, calibration, choice = at("vit", 100.0)
    assert choice.raised == [] and choice.reached and choice.start == choice.end and choice.images == 12
    assert calibration.recipe == msgspec.structs.replace(AUTO, max_loss=None)
    plain = calibrate(model, [images_for(model.preprocess, 12, 7)], calibration.recipe)
    assert plain.to_json() == calibration.to_json()


@pytest.mark.parametrize("kind", ["vit", "padded swin"])
def test_every_unit_is_raised_when_the_limit_is_unreachable(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worse = Measures(loss=lambda calls: 1.0)
    monkeypatch.setattr("fqvit.quant.methods.auto.measure", worse)
    model, calibration, choice = with_choice(kind, msgspec.structs.replace(AUTO, max_loss=0.0))
    assert not choice.reached and len(choice.raised) == choice.units > 0 and choice.end.loss == 1.0
    roles = {node.name: node.leaf.role for node in trace(model.module).nodes}
    for name, q in calibration.sites.items():
        assert q.bits == WIDER.get(roles[name], 8), name
    assert sum(raised.sites for raised in choice.raised) == sum(roles[name] in WIDER for name in calibration.sites)
    lower(model, calibration)


class Measures:
    """Replacement for `measure` whose loss depends on the number of calls."""

    def __init__(self, loss: Any) -> None:
        self.loss, self.calls = loss, 0

    def __call__(self, exact: torch.Tensor, other: torch.Tensor) -> Any:
        self.calls += 1
        return msgspec.structs.replace(measure(exact, other), loss=self.loss(self.calls))


@pytest.mark.parametrize("kind", ["vit", "padded swin"])
def test_the_reported_choice_matches_simulations(kind: str) -> None:
    """If half the initial loss is allowed, the reported start and end are those measured by simulating the calibrations."""
    model, _, loose = at(kind, 100.0)
    images = images_for(model.preprocess, 12, 7)
    exact = run_float(trace(model.module), normalise(images, model.preprocess))
    assert loose.start.loss >= 0
    _, calibration, choice = at(kind, loose.start.loss / 2)
    again = measure(exact, Simulation(model, calibration).run(images))
    assert again == choice.end and choice.start == loose.start
    assert choice.reached == (choice.end.loss <= choice.max_loss)
    gains = [raised.gain for raised in choice.raised]
    assert gains == sorted(gains, reverse=True) and 0.0 not in gains  # a gain is the cost of leaving only that unit narrow
    assert all(raised.before < raised.after == WIDER[raised.role] for raised in choice.raised)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": "log2"},
        {"attention": "uniform"},
        {"observer": "ema"},
        {"observer": "percentile", "channels": False},
        {"activation_bits": 6, "attention_bits": 3},
        {"residual": "tensor"},
        {"weight_bits": 4, "weight_group": 16, "rounding": "compensated"},
        {"sites": {"residual": SiteRule(observer="ptf", k=2)}},
        {"sites": {"embed": SiteRule(range=(-4.0, 4.0)), "blocks.0.add1": SiteRule(observer="omse")}},
        {"sites": {"scores": SiteRule(bits=7), "blocks.1.mlp.fc1": SiteRule(observer="omse")}},
    ],
    ids=str,
)
def test_the_returned_recipe_reproduces_the_calibration(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrating again with the returned recipe and the same images gives the same sites, without measuring losses."""
    monkeypatch.setattr("fqvit.quant.methods.auto.measure", Measures(loss=lambda calls: 1.0))
    recipe = msgspec.structs.replace(AUTO, max_loss=0.0, **changes)
    model, calibration, choice = with_choice("vit", recipe)
    graph = trace(model.module)
    check_fit(graph, calibration, model.preprocess, model.name)
    assert calibration.recipe.max_loss is None and choice.raised
    program = lower(model, calibration)
    again = calibrate(model, [images_for(model.preprocess, 12, 7)], calibration.recipe)
    assert again.to_json() == calibration.to_json() and lower(model, again).fingerprint() == program.fingerprint()
    assert run(program, images_for(model.preprocess, 2)).shape == (2, 5)
    for name, rule in recipe.sites.items():
        if rule.bits is not None:  # bits set by a rule are kept
            assert all(
                q.bits == rule.bits for site, q in calibration.sites.items() if name in (site, graph.node(site).leaf.role)
            )


def test_the_wide_recipe_raises_no_input_of_a_matrix_product() -> None:
    for kind in ("vit", "padded swin"):
        graph = trace(float_model(kind).module)
        narrow, wider = plan(graph, AUTO), plan(graph, wide(AUTO))
        assert narrow.keys() == wider.keys()
        for name, site in wider.items():
            assert site.bits == WIDER.get(site.role, 8) and (site.role in WIDER or site == narrow[name])


def test_a_recipes_own_rules_come_after_the_raised_roles() -> None:
    """The order matters: if several rules match a site, the last one wins."""
    own = {"blocks.0.*": SiteRule(k=2), "residual": SiteRule(observer="minmax"), "*.scores": SiteRule(bits=9)}
    found = wide(msgspec.structs.replace(AUTO, sites=own))
    assert list(found.sites.items()) == [
        ("hidden", SiteRule(bits=12)),
        ("scores", SiteRule(bits=10)),
        ("blocks.0.*", SiteRule(k=2)),
        ("residual", SiteRule(observer="minmax", bits=16)),
        ("*.scores", SiteRule(bits=9)),
    ]
    assert (found.attention_bits, found.residual, found.max_loss) == (8, "tensor", None)


class Counted:
    """Replacement for `Simulation` whose logits are the number of raised sites, for every image."""

    def __init__(self, model: FloatModel, calibration: Calibration) -> None:
        self.raised = sum(q.bits > (4 if name.endswith("softmax") else 8) for name, q in calibration.sites.items())

    def run(self, images: Any) -> torch.Tensor:
        return torch.full((len(images), 5), float(self.raised))


@torch.no_grad()
def test_the_fewest_units_are_raised_in_order_of_decreasing_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    model = float_model("vit")
    images = images_for(model.preprocess, 40, 7)
    recipe = msgspec.structs.replace(AUTO, max_loss=1.5)
    plain = msgspec.structs.replace(recipe, max_loss=None)
    narrow, wider = replace(calibrate(model, [images], plain), recipe=recipe), calibrate(model, [images], wide(recipe))
    exact = run_float(trace(model.module), normalise(images, model.preprocess))
    monkeypatch.setattr("fqvit.quant.methods.auto.Simulation", Counted)
    counts: list[int] = []
    for enough in range(14):

        def counted(float_logits: torch.Tensor, logits: torch.Tensor, enough: int = enough) -> Measure:
            counts.append(len(logits))
            torch.testing.assert_close(float_logits, exact[: len(logits)])
            raised = float(logits[0, 0])
            return Measure(kl=-raised, agreement=0.0, loss=1.5 if raised >= enough else 1.6)  # just within the limit

        monkeypatch.setattr("fqvit.quant.methods.auto.measure", counted)
        chosen = choose(model, narrow, wider, images)
        found = chosen.choice
        assert found is not None
        sizes = [unit.sites for unit in found.raised]
        assert min(enough, 11) <= sum(sizes) and (sum(sizes[:-1]) < enough or not sizes)
        assert [unit.gain for unit in found.raised] == sizes == sorted(sizes, reverse=True)
        assert found.reached == (enough <= 11) and found.units == 9 and found.end.kl == -sum(sizes)
    # A rule names an observer only if that observer differs from the recipe's.
    roles = {node.name: node.leaf.role for node in trace(model.module).nodes}
    named = {(roles[name] == "residual", rule.observer) for name, rule in chosen.recipe.sites.items()}
    assert named == {(True, "minmax"), (False, None)}
    # Gains are measured on PROBE_IMAGES images, everything else on all of them.
    assert set(counts) == {40, PROBE_IMAGES} and counts.count(PROBE_IMAGES) == 13 * (1 + 9)


@pytest.mark.parametrize("features", ["tokens", "pooled"])
def test_features_are_rejected_before_any_image_is_read(features: Any) -> None:
    def images() -> Any:
        raise AssertionError("an image was read")
        yield

    said = rf"recipe auto: the output is {features}, expected only logits.*--recipe fqvit"
    with pytest.raises(FqvitError, match=said), pytest.deprecated_call():
        calibrate(float_model("vit"), images(), AUTO, features=features)
    with pytest.raises(FqvitError, match="the output is logits, mean@0, expected only logits"):
        calibrate(float_model("vit"), images(), AUTO, outputs=("logits", "mean@0"))


def test_the_progress_of_probing_counts_the_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fqvit.quant.methods.auto.measure", Measures(loss=lambda calls: 1.0))
    model, reported = float_model("vit"), []
    unreachable = msgspec.structs.replace(AUTO, max_loss=0.0)

    def progress(items, total, label):  # type: ignore[no-untyped-def]
        reported.append((total, label))
        return items

    calibration = calibrate(model, [images_for(model.preprocess, 4)], unreachable, progress=progress)
    assert calibration.choice is not None and reported == [(1, "calibrating"), (calibration.choice.units, "probing sites")]
    # Residual sums, scores, attention and fc1 of each of two blocks, plus the embedding.
    assert calibration.choice.units == 9
