"""Calibration: the methods that refine it, its JSON form, workers and progress reports."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from fqvit.data.images import ImageArray
from fqvit.errors import FqvitError
from fqvit.models.graph import trace
from fqvit.models.layers import Linear, Patches
from fqvit.quant.calibrate import calibrate
from fqvit.quant.calibration import Calibration
from fqvit.quant.recipe import RECIPES
from tests.distributed.together import together
from tests.factories import few_steps as few_steps
from tests.factories import float_model, images_for
from tests.factories import one_thread as one_thread

MODEL = float_model("mean")
IMAGES = images_for(MODEL.preprocess, 20, 4)


def test_recipes_that_read_images_twice_run_their_refinement() -> None:
    found = {
        name: calibrate(MODEL, [IMAGES], RECIPES[name]) for name in ("minmax", "fqvit", "w4", "auto", "bit-split", "ptq-vit")
    }
    nodes = trace(MODEL.module).nodes
    linear = {node.name for node in nodes if isinstance(node.leaf, Linear)}
    embedding = {node.name for node in nodes if isinstance(node.leaf, Patches)}
    assert {name: set(each.weights) for name, each in found.items() if name != "ptq-vit"} == {
        "minmax": set(),
        "fqvit": linear | embedding,
        "w4": linear,
        "auto": linear,
        "bit-split": linear | embedding,
    }
    assert [name for name, each in found.items() if each.choice is not None] == ["auto"]
    observed = calibrate(MODEL, [IMAGES], msgspec.structs.replace(RECIPES["ptq-vit"], intervals="observed"))
    searched = found["ptq-vit"]
    assert any(searched.sites[name].scale[0] != q.scale[0] for name, q in observed.sites.items())


GOOD = json.loads(calibrate(MODEL, [IMAGES[:4]], RECIPES["w4"]).to_json())


@pytest.mark.parametrize("field", ["", "recipe", "sites", "weights"])
def test_from_json_rejects_unknown_fields(field: str) -> None:
    whole: Any = json.loads(json.dumps(GOOD))
    table = whole[field] if field else whole
    (next(iter(table.values())) if field in ("sites", "weights") else table)["colour"] = 1
    with pytest.raises(FqvitError, match="unknown field `colour`"):
        Calibration.from_json(json.dumps(whole))


def test_to_json_omits_empty_weights_and_square() -> None:
    assert list(GOOD) == ["recipe", "features", "images", "sites", "weights", "centers"]
    assert list(json.loads(calibrate(MODEL, [IMAGES[:4]], RECIPES["minmax"]).to_json())) == list(GOOD)[:-2]


def test_calibrate_rejects_workers_with_different_weights() -> None:
    source = ImageArray(IMAGES, [0] * 20, MODEL.preprocess)

    def work(worker: Any) -> None:
        calibrate(replace(MODEL, source=f"weights {worker.rank}"), source, RECIPES["minmax"], workers=worker)

    with pytest.raises(FqvitError, match=r"weights 1, .*weights 0.*same checkpoint"):
        together(2, work)


@pytest.mark.parametrize("size", [1, 2])
def test_only_the_first_worker_reports_progress(size: int) -> None:
    source = ImageArray(IMAGES, [0] * 20, MODEL.preprocess)
    recipe = msgspec.structs.replace(RECIPES["minmax"], batch=3)

    def work(worker: Any) -> list[tuple[int, str, int]]:
        reported = []

        def progress(items: Any, total: int, label: str) -> Any:
            passed = list(items)
            reported.append((total, label, len(passed)))
            return passed

        calibrate(MODEL, source, recipe, progress=progress, workers=worker)
        return reported

    share = 7 // size  # batches of the first worker
    assert together(size, work) == [[(share, "calibrating", share)], *([[]] * (size - 1))]
