"""The observers of one site: which ones, and what each sees of it."""

from __future__ import annotations

import pytest
import torch

from fqvit.quant.calibrate import SiteObserver
from fqvit.quant.observers import Ema, MinMax, Omse, Percentile
from fqvit.quant.plan import SitePlan
from fqvit.quant.recipe import RECIPES

ORIGINAL = RECIPES["fq-vit-original"]


def test_a_site_has_the_observer_that_its_plan_names() -> None:
    kinds = {"minmax": MinMax, "ema": Ema, "percentile": Percentile, "omse": Omse}
    for name, kind in kinds.items():
        (part,) = SiteObserver(SitePlan("norm", "range", 6, "norm", name), ORIGINAL).parts  # type: ignore[arg-type]
        assert type(part) is kind
        wanted = {"momentum": 0.01, "quantile": 0.99999, "bits": 6, "last_batch": True}
        assert part.state()["settings"] == {key: wanted[key] for key in part.settings}


def test_groups_are_thirds_of_the_channels() -> None:
    observer = SiteObserver(SitePlan("qkv", "range", 8, "qkv", groups=3), ORIGINAL)
    observer.observe(torch.tensor([1.0, -1.0, 2.0, -2.0, 4.0, -4.0]).repeat(2, 9, 1))
    assert observer.qparams().scale == pytest.approx([2 / 255, 4 / 255, 8 / 255])
