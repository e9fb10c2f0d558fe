"""Leveled keys: the row maxima of scores lie close together, and the function stays the same."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from fqvit.models.graph import Node, trace
from fqvit.models.layers import Linear
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.quant.calibrate import calibrate
from fqvit.quant.calibration import Calibration
from fqvit.quant.leveling import TARGET, ScoreRows
from fqvit.quant.observers import Attended
from fqvit.quant.recipe import RECIPES, SiteRule
from tests.factories import MODELS, float_model, images_for
from tests.factories import one_thread as one_thread

LEVELED = msgspec.structs.replace(RECIPES["embedding"], rounding="nearest")
CENTERED = msgspec.structs.replace(LEVELED, keys="centered")


def model_with_uneven_heads() -> FloatModel:
    """Return a model whose heads have scores of very different size.

    Half of the channels have a large bias in Q and large weights in K.
    """
    model = float_model("vit")
    for module in model.module.modules():
        if isinstance(module, Linear) and module.role == "qkv":
            channels = module.weight.shape[0] // 3
            module.bias.data[: channels // 2] += 3.0
            module.weight.data[channels : channels + channels // 2] *= 4.0
    return model


def scores_of(model: FloatModel, calibration: Calibration, images: np.ndarray) -> dict[str, torch.Tensor]:
    found = {}

    def visit(node: Node, y: torch.Tensor) -> torch.Tensor:
        if node.leaf.role == "scores":
            found[node.name] = y
        return y

    with torch.no_grad():
        calibration.graph(model).run(normalise(images, model.preprocess), visit)
    return found


def random_rows(tops: torch.Tensor, queries: torch.Tensor) -> ScoreRows:
    """Return rows of one head with the given maxima [R]; each row has a second score, which is 5 lower."""
    rows = ScoreRows(torch.full((1,), 0.5, dtype=torch.float64))
    rows.add(queries[None], torch.stack([tops, tops - 5], -1)[None])
    return rows


def test_maxima_that_depend_linearly_on_queries_become_nearly_equal() -> None:
    torch.manual_seed(0)
    queries, constant = torch.randn(500, 8), torch.randn(8) * 10
    found = random_rows(TARGET + 0.5 * queries @ constant, queries).level()
    before = float((0.5 * queries @ constant).max() - (0.5 * queries @ constant).min())
    assert found.high - found.least_top < 0.15 * before
    assert found.low == pytest.approx(found.least_top - 5) and found.least_top < TARGET < found.high
    np.testing.assert_allclose(found.constant, constant.numpy(), atol=0.15 * float(constant.abs().max()))


def test_nothing_is_subtracted_if_the_range_would_not_shrink() -> None:
    torch.manual_seed(0)
    tops = torch.zeros(500)
    found = random_rows(tops, torch.randn(500, 8)).level()
    assert not found.constant.any() and (found.low, found.least_top, found.high) == (-5.0, 0.0, 0.0)
    silent = random_rows(torch.randn(500), torch.zeros(500, 8)).level()
    assert not silent.constant.any()


def test_scores_of_uneven_heads_get_a_shorter_range() -> None:
    model = model_with_uneven_heads()
    images = images_for(model.preprocess, 8)
    centered, leveled = calibrate(model, [images], CENTERED), calibrate(model, [images], LEVELED)
    for name, site in leveled.sites.items():
        if name.endswith("scores"):
            assert site.scale[0] < centered.sites[name].scale[0], name


@pytest.mark.parametrize("kind", MODELS)
def test_leveled_keys_compute_the_same_function(kind: str) -> None:
    model = float_model(kind)
    images = images_for(model.preprocess, 4)
    calibration = calibrate(model, [images], LEVELED)
    x = normalise(images, model.preprocess)
    with torch.no_grad():
        torch.testing.assert_close(calibration.graph(model).run(x), trace(model.module).run(x), rtol=1e-4, atol=1e-5)


def test_ranges_are_those_of_the_leveled_keys_and_scores() -> None:
    """Ranges are adjusted, not observed again; the result must be the same as if they were observed again."""
    model = model_with_uneven_heads()
    images = images_for(model.preprocess, 8)
    calibration = calibrate(model, [images], LEVELED)
    for name, scores in scores_of(model, calibration, images).items():
        q = calibration.sites[name]
        low, high = -q.zero[0] * q.scale[0], (q.last - q.zero[0]) * q.scale[0]
        expected = min(max(float(scores.min()), float(scores.amax(-1).min()) - Attended.REACH), 0.0)
        assert low == pytest.approx(expected, abs=1.01 * q.scale[0]) and high == pytest.approx(
            max(float(scores.max()), 0.0), abs=1.01 * q.scale[0]
        )


def test_a_layer_whose_scores_have_a_fixed_range_keeps_the_constants_of_centering() -> None:
    model = model_with_uneven_heads()
    images = images_for(model.preprocess, 4)
    fixed = {**LEVELED.sites, "blocks.0.attn.scores": SiteRule(range=(-20.0, 20.0))}
    found = calibrate(model, [images], msgspec.structs.replace(LEVELED, sites=fixed)).centers
    centered, leveled = (calibrate(model, [images], recipe).centers for recipe in (CENTERED, LEVELED))
    np.testing.assert_array_equal(found["blocks.0.attn.qkv"], centered["blocks.0.attn.qkv"])
    np.testing.assert_array_equal(found["blocks.1.attn.qkv"], leveled["blocks.1.attn.qkv"])
    assert np.abs(leveled["blocks.1.attn.qkv"] - centered["blocks.1.attn.qkv"]).max() > 0.1
