"""Calibrations that do not fit a model are rejected, and the error names the site."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.lowering.lower import lower
from fqvit.models.config import ViTConfig
from fqvit.models.graph import trace
from fqvit.models.load import FloatModel, build
from fqvit.quant.calibrate import calibrate
from fqvit.quant.calibration import Calibration
from fqvit.quant.fit import check_fit
from fqvit.quant.recipe import Recipe
from fqvit.quant.weights import QuantizedLinear
from tests.factories import images_for

CONFIG = ViTConfig(image=(8, 8), patch=4, channels=3, classes=3, width=12, depth=2, heads=2, hidden=24)
PREPROCESS = Preprocess(8, 8, 3, 8, "bicubic", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def model(config: ViTConfig = CONFIG) -> FloatModel:
    return FloatModel("tiny", build(config).eval(), PREPROCESS, None, "random")


def random_weights(outputs: int, inputs: int) -> QuantizedLinear:
    w = np.random.default_rng(0).integers(-127, 128, (outputs, inputs)).astype(np.int8)
    return QuantizedLinear(w, np.ones(outputs), np.zeros(outputs, np.int64))


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate(model(), [images_for(PREPROCESS, 4)], Recipe(name="fq-vit"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 3}, r"blocks\.2\.\S+: not calibrated"),
        ({"depth": 1}, r"blocks\.1\.\S+: calibrated, but tiny has no such site"),
        ({"width": 16}, "calibrated for 12 channels, but tiny has 16"),
    ],
)
def test_a_calibration_of_another_model_is_rejected(change: dict[str, int], message: str, calibration: Calibration) -> None:
    with pytest.raises(FqvitError, match=message):
        lower(model(dataclasses.replace(CONFIG, **change)), calibration)


@pytest.mark.parametrize(("change", "message"), [({"bits": 5}, "other codes"), ({"alpha": None}, "other codes")])
def test_codes_that_differ_from_the_recipe_are_rejected(
    change: dict[str, None], message: str, calibration: Calibration
) -> None:
    name = next(name for name, q in calibration.sites.items() if q.alpha is not None)
    sites = {**calibration.sites, name: dataclasses.replace(calibration.sites[name], **change)}
    with pytest.raises(FqvitError, match=message):
        lower(model(), dataclasses.replace(calibration, sites=sites))


def test_invalid_scales_levels_and_zero_points_are_rejected(calibration: Calibration) -> None:
    ours = calibrate(model(), [images_for(PREPROCESS, 4)], Recipe(name="ours", attention="relative", channels=True))
    graph = trace(model().module)
    cases = [
        (calibration, "blocks.0.attn.qkv", {"scale": np.ones(2), "zero": np.zeros(2, np.int64)}, "2 scales, expected 3"),
        (calibration, "blocks.0.attn.qkv", {"zero": np.array([0, 256, 0])}, "zero point 256, expected at most 255 for 8 bits"),
        (ours, "blocks.0.norm1", {"scale": np.ones(11), "zero": np.zeros(11, np.int64)}, "11 channels, but tiny has 12"),
        (ours, "blocks.0.attn.softmax", {"levels": tuple(range(15))}, "15 levels, expected 16 for 4 bits"),
        (calibration, "blocks.0.attn.softmax", {"octave": 2}, "codes that are only simulated"),
        (calibration, "blocks.0.mlp.act", {"bits": 12, "grid": tuple(range(0, 4096, 16))}, "codes that are only simulated"),
    ]
    for whole, name, change, message in cases:
        sites = {**whole.sites, name: dataclasses.replace(whole.sites[name], **change)}
        with pytest.raises(FqvitError, match=f"^{name}: .*{message}"):
            check_fit(graph, dataclasses.replace(whole, sites=sites), PREPROCESS, "tiny")
    # The zero point may be the last code, and channels may share one scale.
    last = dataclasses.replace(calibration.sites["blocks.0.norm1"], zero=np.array([255]))
    check_fit(graph, dataclasses.replace(calibration, sites={**calibration.sites, "blocks.0.norm1": last}), PREPROCESS, "tiny")
    one = dataclasses.replace(ours.sites["blocks.0.norm1"], scale=np.ones(1), zero=np.zeros(1, np.int64))
    check_fit(graph, dataclasses.replace(ours, sites={**ours.sites, "blocks.0.norm1": one}), PREPROCESS, "tiny")


def test_weights_must_have_the_shape_bits_and_groups_of_a_linear_layer(calibration: Calibration) -> None:
    """The patch embedding counts as a linear layer, with weights [C, channels * patch * patch]."""
    graph = trace(model().module)
    widths = {"patch_embed.proj": (12, 48), "blocks.0.attn.qkv": (36, 12), "head": (3, 12)}
    weights = {name: random_weights(*shape) for name, shape in widths.items()}
    check_fit(graph, dataclasses.replace(calibration, weights=weights), PREPROCESS, "tiny")
    for name, shape in (("patch_embed.proj", (12, 47)), ("head", (4, 12)), ("norm", (12, 12))):
        with pytest.raises(FqvitError, match=f"^{name}: weights of shape .* do not fit tiny"):
            check_fit(graph, dataclasses.replace(calibration, weights={name: random_weights(*shape)}), PREPROCESS, "tiny")
    narrow = msgspec.structs.replace(calibration.recipe, weight_bits=7)
    with pytest.raises(FqvitError, match=r"^head: weights do not have the bits and groups of recipe fq-vit"):
        check_fit(graph, dataclasses.replace(calibration, recipe=narrow, weights={"head": weights["head"]}), PREPROCESS, "tiny")


@pytest.mark.parametrize("missing", [True, False])
def test_the_first_missing_or_unknown_site_is_named(missing: bool, calibration: Calibration) -> None:
    sites = dict(calibration.sites)
    if missing:
        del sites["blocks.1.norm1"]
    else:
        sites["blocks.7.norm1"] = sites["blocks.1.norm1"]
    missing_site, unknown_site = "blocks.1.norm1: not calibrated, but tiny has", "blocks.7.norm1: calibrated, but tiny has no"
    with pytest.raises(FqvitError, match=f"^{missing_site if missing else unknown_site}"):
        check_fit(trace(model().module), dataclasses.replace(calibration, sites=sites), PREPROCESS, "tiny")
