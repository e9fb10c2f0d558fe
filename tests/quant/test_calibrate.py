"""Calibration: fixed batches, ranges before GELU, JSON, and rejected images and files."""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fqvit.errors import FqvitError
from fqvit.lowering.lower import lower
from fqvit.models.graph import Node, trace
from fqvit.models.layers import gelu
from fqvit.models.pixels import normalise
from fqvit.quant.batches import shuffle_batches
from fqvit.quant.calibrate import (
    SiteObserver,
    calibrate,
    coded_attention,
    gelu_cutoff,
    observe_batch,
    trim_gelu_inputs,
)
from fqvit.quant.calibration import Calibration
from fqvit.quant.plan import plan
from fqvit.quant.qparams import affine
from fqvit.quant.recipe import RECIPES, SiteRule, load_recipe
from fqvit.quant.simulate import Simulation
from tests.factories import MODELS, calibration_of, float_model, images_for
from tests.factories import few_steps as few_steps
from tests.factories import one_thread as one_thread

MODEL = float_model("vit")
IMAGES = images_for(MODEL.preprocess, 20, 4)
FQ = msgspec.structs.replace(RECIPES["fq-vit"], batch=4)


def fingerprint(calibration: Calibration) -> str:
    """Return the fingerprint of the program, or the simulated outputs if the recipe has no integer program."""
    if calibration.recipe.integer:
        return lower(MODEL, calibration).fingerprint()
    return Simulation(MODEL, calibration).run(IMAGES).numpy().tobytes().hex()


@pytest.mark.parametrize("name", RECIPES)
def test_the_result_does_not_depend_on_how_images_are_cut_into_arrays(name: str) -> None:
    recipe = msgspec.structs.replace(RECIPES[name], batch=6)
    whole = calibrate(MODEL, [IMAGES], recipe)
    single = calibrate(MODEL, iter(IMAGES), recipe)
    ragged = calibrate(MODEL, (part for part in np.split(IMAGES, [1, 8, 9, 9])), recipe)
    assert whole.to_json() == single.to_json() == ragged.to_json()
    assert whole.images == 20 and fingerprint(whole) == fingerprint(single)


@pytest.mark.parametrize("name", ["minmax", "fq-vit"])
def test_observers_over_all_images_do_not_depend_on_the_batch_size(name: str) -> None:
    """EMA (exponential moving average) and last_batch depend on the batch size by definition.

    The other observers differ only by float32 rounding of matrix products.
    """
    a, b = (calibrate(MODEL, [IMAGES], msgspec.structs.replace(RECIPES[name], batch=size)) for size in (3, 20))
    for site in a.sites:
        np.testing.assert_allclose(a.sites[site].scale, b.sites[site].scale, rtol=1e-4)


def test_calibrate_reads_no_more_images_than_the_recipe_sets() -> None:
    taken = []

    def endless() -> Iterator[NDArray[np.uint8]]:
        while True:
            taken.append(1)
            yield IMAGES[len(taken) % 20]

    recipe = msgspec.structs.replace(FQ, images=10)
    assert calibrate(MODEL, endless(), recipe).images == 10 and len(taken) == 10


def test_the_shuffle_seed_decides_the_last_batch() -> None:
    recipe = msgspec.structs.replace(RECIPES["fq-vit-original"], batch=4)

    def sites(images: NDArray[np.uint8], seed: int | None) -> Any:
        return json.loads(calibrate(MODEL, [images], msgspec.structs.replace(recipe, shuffle=seed)).to_json())["sites"]

    a, b = sites(IMAGES, 0), sites(IMAGES, 1)
    assert a == sites(IMAGES, 0) != b
    np.testing.assert_allclose(a["embed"]["scale"], b["embed"]["scale"], rtol=1e-4)  # ranges come from all images
    assert any(a[site].get("alpha") != b[site].get("alpha") for site in a)
    assert b == sites(np.concatenate(list(shuffle_batches([IMAGES], 4, 1))), None)


def test_recipe_fq_vit_original_quantizes_attention_in_its_last_batch() -> None:
    recipe = msgspec.structs.replace(RECIPES["fq-vit-original"], batch=4, shuffle=None)
    graph = trace(MODEL.module)
    observers = {name: SiteObserver(site, recipe) for name, site in plan(graph, recipe).items()}
    call = coded_attention(recipe, observers)
    seen = {}

    def visit(node: Node, y: torch.Tensor) -> torch.Tensor:
        if node.name in observers:
            observers[node.name].observe(y)
        seen[node.name] = y
        return y

    with torch.no_grad():
        for start in range(0, 20, 4):
            pixels = normalise(IMAGES[start : start + 4], MODEL.preprocess)
            graph.run(pixels, visit, call if start == 16 else None)
    attention = seen["blocks.0.attn.softmax"]
    assert set(attention.unique().tolist()) <= {0.0, *(2.0**-code for code in range(15))}
    exact = seen["blocks.0.attn.scores"].softmax(-1)
    assert bool((attention <= 2 * exact).all() and (attention >= exact / 2).all())
    found = calibrate(MODEL, [IMAGES], recipe)
    for name, observer in observers.items():
        if name in ("blocks.0.attn.context", "blocks.1.add2", "blocks.1.attn.scores"):
            assert observer.qparams().scale == found.sites[name].scale, name
    plain = calibrate(MODEL, [IMAGES], msgspec.structs.replace(recipe, last_batch=False))
    assert plain.sites["blocks.0.attn.scores"].scale == found.sites["blocks.0.attn.scores"].scale
    assert plain.sites["blocks.1.add2"].scale != found.sites["blocks.1.add2"].scale


def test_observer_memory_does_not_grow_with_the_number_of_images() -> None:
    observers = {name: SiteObserver(site, FQ) for name, site in plan(trace(MODEL.module), FQ).items()}
    graph = trace(MODEL.module)

    def size() -> int:
        return sum(
            value.nbytes if isinstance(value, np.ndarray) else 0
            for observer in observers.values()
            for part in observer.parts
            for value in flat(part.state())
        )

    sizes = []
    for start in range(0, 20, 4):
        with torch.no_grad():
            observe_batch(graph, normalise(IMAGES[start : start + 4], MODEL.preprocess), observers)
        sizes.append(size())
    assert sizes[-1] <= 1.5 * sizes[0] + 1000


def flat(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in flat(value)]
    if isinstance(state, list | tuple):
        return [leaf for value in state for leaf in flat(value)]
    return [np.asarray(state)] if hasattr(state, "numpy") else [state]


@pytest.mark.parametrize("images", [[], [IMAGES[:0]], iter(())])
def test_calibrate_rejects_an_empty_set_of_images(images: Any) -> None:
    with pytest.raises(FqvitError, match="vit: no calibration images. Pass at least one"):
        calibrate(MODEL, images, FQ)


@pytest.mark.parametrize(
    "images, found",
    [
        ([IMAGES.astype(np.float32)], "float32"),
        ([IMAGES.transpose(0, 3, 1, 2)], "3, 12, 12"),
        ([IMAGES[0, :, :, 0]], "."),
        ([IMAGES[0], IMAGES[1, :8]], "."),
        ([IMAGES[0].tolist()], "."),
    ],
    ids=["float", "channels first", "grey", "two sizes", "lists"],
)
def test_calibrate_rejects_images_of_another_type_or_shape(images: Any, found: str) -> None:
    with pytest.raises(FqvitError, match=found):
        calibrate(MODEL, images, FQ)


@pytest.mark.parametrize("kind", MODELS)
def test_the_same_inputs_give_the_same_fingerprint(kind: str) -> None:
    fingerprints = set()
    for _ in range(2):
        model = float_model(kind)
        fingerprints.add(lower(model, calibration_of(model)).fingerprint())
    assert len(fingerprints) == 1
    model = float_model(kind, seed=1)
    assert lower(model, calibration_of(model)).fingerprint() not in fingerprints


@pytest.mark.parametrize("name", RECIPES)
def test_json_round_trip_keeps_the_calibration(name: str) -> None:
    before = calibrate(MODEL, [IMAGES], RECIPES[name])
    after = Calibration.from_json(before.to_json())
    assert after.recipe == before.recipe and after.to_json() == before.to_json()
    assert fingerprint(after) == fingerprint(before)


def test_json_round_trip_keeps_site_rules() -> None:
    recipe = msgspec.structs.replace(FQ, sites={"gelu": SiteRule(bits=5, range=(-1.0, 2.0))})
    before = calibrate(MODEL, [IMAGES], recipe)
    q = before.sites["blocks.0.mlp.act"]
    assert q.bits == 5 and q.scale[0] == 3.0 / 31 and q.zero[0] == 10
    assert fingerprint(Calibration.from_json(before.to_json())) == fingerprint(before)


GOOD = calibrate(MODEL, [IMAGES[:4]], FQ).to_json()


def edited(change: Any) -> str:
    whole = json.loads(GOOD)
    change(whole)
    return json.dumps(whole)


def with_weights(groups: dict[str, Any] | None = None, **fields: Any) -> str:
    """Return the calibration with one row of three weights of the head."""
    weights = {"w": "AAAA", "scale": [1.0], "bias": [1], **fields} | ({} if groups is None else {"groups": groups})
    return edited(lambda whole: whole.update(weights={"head": weights}))


CODEBOOKS = {"choice": "AA==", "codebooks": "AAAAAA==", "levels": 4, "size": 8}  # one codebook of 4 levels of 0

MALFORMED = {
    "not JSON": "{",
    "a list": "[]",
    "no sites": edited(lambda w: w.pop("sites")),
    "sites that are a list": edited(lambda w: w.update(sites=[])),
    "an unknown recipe field": edited(lambda w: w["recipe"].update(colour=1)),
    "bits as text": edited(lambda w: w["sites"]["embed"].update(bits="8")),
    "17 bits": edited(lambda w: w["sites"]["embed"].update(bits=17)),
    "a scale as text": edited(lambda w: w["sites"]["embed"].update(scale=["x"])),
    "no scale": edited(lambda w: w["sites"]["embed"].pop("scale")),
    "an empty scale": edited(lambda w: w["sites"]["embed"].update(scale=[], zero=[])),
    "two scales and one zero": edited(lambda w: w["sites"]["embed"].update(scale=[1.0, 1.0], zero=[0])),
    "a negative alpha": edited(lambda w: w["sites"]["embed"].update(alpha=[-1] * 24)),
    "unknown features": edited(lambda w: w.update(features="boxes")),
    "images as text": edited(lambda w: w.update(images="many")),
    "a scale of 0": edited(lambda w: w["sites"]["embed"].update(scale=[0.0])),
    "levels of 0 only": edited(lambda w: w["sites"]["embed"].update(levels=[0] * 256)),
    "a level below 0": edited(lambda w: w["sites"]["embed"].update(levels=[-1] * 256)),
    "weights without rows": with_weights(w="", scale=[], bias=[]),
    "weights without columns": with_weights(w=""),
    "ragged weights": with_weights(scale=[1, 1], bias=[1, 1]),
    "weights that are not base64": with_weights(w="!"),
    "weights with exponents, of an older fqvit": with_weights(exponent="AA=="),
    "no choices": with_weights(CODEBOOKS | {"choice": ""}),
    "ragged choices": with_weights(CODEBOOKS | {"choice": "AAAA"}, w="AAAAAAAA", scale=[1, 1], bias=[1, 1]),
    "no codebooks": with_weights(CODEBOOKS | {"codebooks": ""}),
    "ragged codebooks": with_weights(CODEBOOKS | {"codebooks": "AAAAAAA="}),
    "17 codebooks": with_weights(CODEBOOKS | {"codebooks": base64.b64encode(bytes(17 * 4)).decode()}),
    "codebooks of 3 levels": with_weights(CODEBOOKS | {"codebooks": "AAAA", "levels": 3}),
    "groups of 1 weight": with_weights(CODEBOOKS | {"size": 1}),
    "groups without a size": with_weights({name: x for name, x in CODEBOOKS.items() if name != "size"}),
    "a scale of NaN": edited(lambda w: w["sites"]["embed"].update(scale=[float("nan")])),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_from_json_rejects_malformed_calibrations(case: str) -> None:
    with pytest.raises(FqvitError, match="calibration: ") as caught:
        Calibration.from_json(MALFORMED[case])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("groups", [None, CODEBOOKS])
def test_from_json_reads_weights_with_and_without_groups(groups: dict[str, Any] | None) -> None:
    found = Calibration.from_json(with_weights(groups)).weights["head"]
    assert found.w.tolist() == [[0, 0, 0]] and found.scale.tolist() == [1] and found.bias.tolist() == [1]
    if groups is None:
        assert found.groups is None
    else:
        assert found.groups is not None and found.groups.size == 8
        assert found.groups.choice.tolist() == [[0]] and found.groups.codebooks.tolist() == [[0, 0, 0, 0]]


def test_weights_without_groups_of_an_older_fqvit_are_read() -> None:
    """Until codebooks were added, all weights had a field `exponent`, which is null without groups."""
    assert Calibration.from_json(with_weights(exponent=None)).to_json() == Calibration.from_json(with_weights()).to_json()


def test_lowering_names_the_first_missing_site() -> None:
    whole = calibrate(MODEL, [IMAGES[:4]], FQ)
    sites = {name: q for name, q in whole.sites.items() if name != "blocks.0.attn.scores"}
    with pytest.raises(FqvitError, match=r"blocks\.0\.attn\.scores: not calibrated"):
        lower(MODEL, Calibration(whole.recipe, whole.features, whole.images, sites))


def test_calibrate_rejects_an_unknown_device() -> None:
    with pytest.raises(FqvitError, match="device 'abacus' is not available"):
        calibrate(MODEL, [IMAGES], FQ, device="abacus")


def test_calibrate_does_not_modify_the_model() -> None:
    before = {name: value.clone() for name, value in MODEL.module.state_dict().items()}
    calibrate(MODEL, [IMAGES], FQ)
    assert all(torch.equal(value, before[name]) for name, value in MODEL.module.state_dict().items())


@pytest.mark.parametrize("least", [1e-6, 0.01, 0.1, 0.16, 0.1699, 0.17, 0.3])
def test_below_the_cutoff_gelu_is_smaller_than_the_bound(least: float) -> None:
    cutoff = gelu_cutoff(least)
    assert all(abs(gelu(cutoff - d)) < least for d in np.linspace(0, 30, 3001)[1:])
    assert cutoff == 0 or abs(gelu(cutoff + 1e-6)) >= least


@pytest.mark.parametrize("high", [0.5, 3.0, 8.0, 50.0])
def test_the_range_before_gelu_starts_where_gelu_rounds_to_zero(high: float) -> None:
    graph = trace(MODEL.module)
    wide, after = affine(-10.0, high, 8), affine(-0.17, high, 8)
    found = {"blocks.0.mlp.fc1": wide, "blocks.0.mlp.act": after}
    x = trim_gelu_inputs(graph, found, plan(graph, FQ))["blocks.0.mlp.fc1"]
    lowest = float(-x.zero[0] * x.scale[0])
    assert x.scale[0] < wide.scale[0] and lowest > -10.0
    assert all(
        abs(gelu(value)) < after.scale[0] / 2 for value in np.linspace(-10, lowest, 101)
    )  # clipped values have the code of 0
    # The range starts one code below the cutoff; its end is unchanged.
    end = (wide.last - wide.zero[0]) * wide.scale[0]
    assert end - x.scale[0] * 255 == pytest.approx(gelu_cutoff(after.scale[0] / 2) - x.scale[0])


def test_json_round_trip_keeps_the_parameters_of_roi_features() -> None:
    before = replace(calibration_of(MODEL, FQ), square=affine(-1.0, 3.0, 8))
    after = Calibration.from_json(before.to_json())
    assert after.square is not None and after.square.scale == before.square.scale and after.square.zero == before.square.zero  # type: ignore[union-attr]
    assert Calibration.from_json(calibration_of(MODEL, FQ).to_json()).square is None


def test_a_range_set_by_a_rule_is_not_trimmed_before_gelu() -> None:
    recipe = msgspec.structs.replace(FQ, sites={"hidden": SiteRule(range=(-20.0, 20.0))})
    q = calibrate(MODEL, [IMAGES[:2]], recipe).sites["blocks.0.mlp.fc1"]
    assert q.scale[0] == 40.0 / 255


def test_the_last_norm_is_observed_on_the_class_token_only() -> None:
    """Only the class token reaches the head; if the tokens are the output, all of them are observed."""
    graph = trace(MODEL.module)
    values: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        graph.run(normalise(IMAGES, MODEL.preprocess), lambda node, y: values.setdefault(node.name, y))
    token, tokens = values["norm"][:, 0], values["norm"]
    minmax = RECIPES["minmax"]
    for features, seen in (("logits", token), ("pooled", token), ("tokens", tokens)):
        with pytest.deprecated_call():
            q = calibrate(MODEL, [IMAGES], minmax, features=features).sites["norm"]  # type: ignore[arg-type]
        assert np.isclose(q.scale[0], affine(float(seen.min()), float(seen.max()), 8).scale[0], rtol=1e-5)


def test_two_class_tokens_share_the_channels_of_the_norm() -> None:
    """A distilled head reads two concatenated tokens; the norm before it has the channels of one token."""
    model = float_model("distilled")
    calibration = calibration_of(model, "fqvit")
    assert len(calibration.sites["norm"].scale) == 16
    lower(model, calibration)


def test_layers_with_zero_weights_can_be_calibrated() -> None:
    """Zero weights give sites that are always 0: any scale is exact, but it must be valid."""
    model = float_model("vit")
    with torch.no_grad():
        for leaf in (model.module.blocks[0].attn.qkv, model.module.blocks[1].mlp.fc1, model.module.blocks[1].norm1):  # type: ignore[index, union-attr]
            leaf.weight.zero_()
            leaf.bias.zero_()
    for recipe in ("fqvit", "w4"):
        lower(model, calibration_of(model, recipe))


def test_calibrate_shows_progress_in_a_terminal_unless_progress_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    model = float_model("vit")
    images = images_for(model.preprocess, 20)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    for given in ([images], iter(images), list(images)):
        monkeypatch.setattr(sys, "stderr", screen := Terminal())
        calibrate(model, given)
        assert "calibrating" in screen.getvalue() and ("2/2" in screen.getvalue() or "2/?" in screen.getvalue())
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    calibrate(model, [images], progress=None)
    assert screen.getvalue() == ""


def test_recipes_may_be_given_by_name_and_models_must_be_loaded() -> None:
    model = float_model("vit")
    images = [images_for(model.preprocess, 4)]
    assert calibrate(model, images, "minmax").to_json() == calibrate(model, images, load_recipe("minmax")).to_json()
    assert calibrate(model, images).recipe == load_recipe("fqvit") == load_recipe()
    with pytest.raises(FqvitError, match="model: str, expected the result of load_model"):
        calibrate("vit", images)  # type: ignore[arg-type]
