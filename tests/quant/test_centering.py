"""Centered keys: the model computes the same function, and every runtime gives the same bits."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from fqvit.errors import FqvitError
from fqvit.evaluate.compare import Comparer
from fqvit.lowering.lower import lower
from fqvit.models.graph import Graph, Node, trace
from fqvit.models.layers import Linear
from fqvit.models.pixels import normalise
from fqvit.quant.calibrate import calibrate
from fqvit.quant.calibration import Calibration
from fqvit.quant.centering import center, key_centers, key_layers
from fqvit.quant.plan import plan
from fqvit.quant.recipe import RECIPES
from fqvit.runtime.native import Engine
from fqvit.runtime.reference import Reference
from tests.factories import MODELS, assert_same, float_model, images_for
from tests.factories import one_thread as one_thread

EMBEDDING = RECIPES["embedding"]


def keys_of(graph: Graph, images: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {}

    def visit(node: Node, y: torch.Tensor) -> torch.Tensor:
        if node.leaf.role == "qkv":
            found[node.name] = y.chunk(3, -1)[1]
        return y

    with torch.no_grad():
        graph.run(images, visit)
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_centered_keys_compute_the_same_function(kind: str) -> None:
    model = float_model(kind)
    graph, images = trace(model.module), normalise(images_for(model.preprocess, 3), model.preprocess)
    centers = key_centers(graph, model.preprocess)
    assert list(centers) == key_layers(graph) == [node.name for node in graph.nodes if node.leaf.role == "qkv"]
    centered = center(graph, centers)
    with torch.no_grad():
        torch.testing.assert_close(centered.run(images), graph.run(images), rtol=1e-4, atol=1e-5)


def test_centered_keys_of_an_image_of_the_mean_color_have_mean_0() -> None:
    model = float_model("vit")
    graph, p = trace(model.module), model.preprocess
    centered = center(graph, key_centers(graph, p))
    for key in keys_of(centered, torch.zeros(1, p.channels, p.height, p.width)).values():
        assert key.flatten(0, 1).mean(0).abs().max() < 1e-5


def test_the_model_itself_is_not_modified() -> None:
    model = float_model("vit")
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    graph = trace(model.module)
    center(graph, {name: np.ones(24) for name in key_layers(graph)})
    after = model.module.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_layer_without_bias_gets_one() -> None:
    model = float_model("vit")
    for module in model.module.modules():
        if isinstance(module, Linear) and module.role == "qkv":
            module.bias = None
    graph = trace(model.module)
    name = key_layers(graph)[0]
    leaf = center(graph, {name: np.full(24, 0.5)}).node(name).leaf
    assert isinstance(leaf, Linear) and leaf.bias is not None
    assert leaf.bias.tolist() == [0.0] * 24 + [-0.5] * 24 + [0.0] * 24


def test_centers_of_another_model_are_rejected() -> None:
    graph = trace(float_model("vit").module)
    with pytest.raises(FqvitError, match="blocks.0.attn.proj: calibrated with centered keys"):
        center(graph, {"blocks.0.attn.proj": np.zeros(24)})
    with pytest.raises(FqvitError, match="centers of 5 key channels, expected 24"):
        center(graph, {"blocks.0.attn.qkv": np.zeros(5)})


def test_masked_scores_keep_their_whole_range() -> None:
    """With a mask, a row may be unable to attend to the largest score of its window."""
    sites = plan(trace(float_model("swin").module), EMBEDDING)
    observers = {site.observer for site in sites.values() if site.role == "scores"}
    assert observers == {"minmax", "attended"}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("bits", [4, 8])
def test_embedding_programs_equal_the_reference_and_can_be_rebuilt_from_a_saved_calibration(kind: str, bits: int) -> None:
    model = float_model(kind)
    images = images_for(model.preprocess, 8)
    recipe = msgspec.structs.replace(EMBEDDING, attention_bits=bits)
    calibration = calibrate(model, [images], recipe)
    assert calibration.centers
    program = lower(model, calibration)
    assert_same(Engine(program, threads=1).run(images), Reference(program).run(images), kind)
    again = lower(model, Calibration.from_json(calibration.to_json()))
    assert again.fingerprint() == program.fingerprint()


def test_compare_measures_the_sites_of_centered_keys() -> None:
    """The float model's keys must be centered, too, or the site would show an error that does not exist."""
    model = float_model("vit")
    images = images_for(model.preprocess, 8)
    comparer = Comparer(lower(model, calibrate(model, [images], EMBEDDING)), model)
    comparer.add(images)
    noise = {row.site: row for row in comparer.result().sites}
    for name in ("blocks.0.attn.qkv", "blocks.0.attn.scores"):
        assert noise[name].alone_db is not None and noise[name].alone_db > 25, noise[name]


def test_other_recipes_have_no_centers() -> None:
    model = float_model("vit")
    calibration = calibrate(model, [images_for(model.preprocess, 2)], RECIPES["fqvit"])
    assert not calibration.centers and "centers" not in calibration.to_json()
    stray = replace(calibration, centers={"nowhere": np.zeros(1)})
    with pytest.raises(FqvitError, match="nowhere: calibrated with centered keys"):
        lower(model, stray)
