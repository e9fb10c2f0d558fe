from __future__ import annotations

import dataclasses

import pytest

from fqvit.errors import FqvitError
from fqvit.ir.lower import lower
from fqvit.models.config import ViTConfig
from fqvit.models.load import FloatModel, build
from fqvit.preprocess import Preprocess
from fqvit.quant.calibrate import calibrate
from fqvit.quant.calibration import Calibration
from fqvit.quant.recipe import Recipe
from tests.factories import images_for

CONFIG = ViTConfig(image=(8, 8), patch=4, channels=3, classes=3, width=12, depth=2, heads=2, hidden=24)
PREPROCESS = Preprocess(8, 8, 3, 8, "bicubic", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def model(config: ViTConfig = CONFIG) -> FloatModel:
    return FloatModel("tiny", build(config).eval(), PREPROCESS, None, "random")


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate(model(), [images_for(PREPROCESS, 4)], Recipe(name="fq-vit"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"depth": 3}, r"blocks\.2\.\S+: not calibrated"),
        ({"depth": 1}, r"blocks\.1\.\S+: calibrated, but tiny does not have"),
        ({"width": 16}, "calibrated for 12 channels, tiny has 16"),
    ],
)
def test_a_calibration_of_another_model_is_refused(change: dict[str, int], said: str, calibration: Calibration) -> None:
    with pytest.raises(FqvitError, match=said):
        lower(model(dataclasses.replace(CONFIG, **change)), calibration)


@pytest.mark.parametrize(("change", "said"), [({"bits": 5}, "other codes"), ({"alpha": None}, "other codes")])
def test_codes_that_the_recipe_does_not_ask_for_are_refused(
    change: dict[str, None], said: str, calibration: Calibration
) -> None:
    name = next(name for name, q in calibration.sites.items() if q.alpha is not None)
    sites = {**calibration.sites, name: dataclasses.replace(calibration.sites[name], **change)}
    with pytest.raises(FqvitError, match=said):
        lower(model(), dataclasses.replace(calibration, sites=sites))
