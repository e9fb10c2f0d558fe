"""Learning segment by segment: how graphs are cut, the error compared with plain compensation, and whole programs."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from fqvit.lowering.lower import lower
from fqvit.models import layers
from fqvit.models.graph import run_float, trace
from fqvit.models.outputs import output_graph
from fqvit.models.pixels import normalise
from fqvit.quant.calibration import Calibration
from fqvit.quant.methods import reconstruct as module
from fqvit.quant.methods import segments as cuts
from fqvit.quant.methods.segments import importance, segments
from fqvit.quant.recipe import RECIPES, Recipe
from fqvit.quant.simulate import Simulation
from fqvit.quant.weights import fits_groups
from fqvit.runtime.native import Engine
from fqvit.runtime.reference import Reference
from tests.factories import calibration_of, float_model, images_for
from tests.factories import one_thread as one_thread

LOW = ("w6a6", "w4", "w4a4")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 40)
    monkeypatch.setattr(module, "WEIGHT_STEPS", 40)


def divergence(model, calibration: Calibration, images) -> float:  # type: ignore[no-untyped-def]
    """Mean squared error of the simulated logits."""
    exact = run_float(trace(model.module), normalise(images, model.preprocess))
    return float((Simulation(model, calibration).run(images) - exact).square().mean())


@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_segments_partition_the_graph_at_residual_sums(kind: str) -> None:
    graph = trace(float_model(kind).module)
    found = segments(graph)
    assert [node for each in found for node in each.nodes] == list(graph.nodes)
    assert all(each.nodes[-1].leaf.role == "residual" for each in found[:-1])
    assert any(each.alike for each in found) and not all(each.alike for each in found)
    for each in found:
        inside = {each.start, *(node.name for node in each.nodes)}
        assert all(name in inside for node in each.nodes for name in node.inputs)


def test_only_the_class_token_has_importance_after_the_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "EQUAL", 0.0)
    model = float_model("vit")
    graph = trace(model.module)
    found = importance(graph, model.preprocess, images_for(model.preprocess, 8))
    last = found[segments(graph)[-2].nodes[-1].name]
    assert last.shape[0] > 1 and float(last[1:].abs().max()) == 0 < float(last[0].min())
    assert all(abs(float(value.mean()) - 1) < 1e-4 for value in found.values())


def test_half_of_the_importance_of_a_channel_is_the_same_for_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = float_model("vit")
    graph, images = trace(model.module), images_for(model.preprocess, 8)
    found = importance(graph, model.preprocess, images)
    monkeypatch.setattr(cuts, "EQUAL", 0.0)
    for name, value in importance(graph, model.preprocess, images).items():
        torch.testing.assert_close(found[name], 0.5 * value + 0.5 * value.mean(0))


def test_sign_bits_give_no_importance_because_they_have_no_gradient() -> None:
    model = float_model("vit")
    p = model.preprocess
    graph = output_graph(model.module, (p.channels, p.height, p.width), outputs=("class:sign",))
    assert importance(graph, p, images_for(p, 4)) == {}


def test_learning_reduces_the_error_of_compensated_rounding(one_thread: None) -> None:
    model = float_model("swin")
    images = images_for(model.preprocess, 12)
    learned = calibration_of(model, RECIPES["w4a4"])
    compensated = calibration_of(model, msgspec.structs.replace(RECIPES["w4a4"], rounding="compensated"))
    assert divergence(model, learned, images) < divergence(model, compensated, images)


@pytest.mark.parametrize("kind", ["vit", "swin"])
@pytest.mark.parametrize("name", LOW)
def test_inputs_of_products_are_narrow_and_the_engine_equals_the_reference(kind: str, name: str, one_thread: None) -> None:
    model, recipe = float_model(kind), RECIPES[name]
    calibration = calibration_of(model, recipe)
    for node in calibration.graph(model).nodes:
        q = calibration.sites.get(node.name)
        if q is not None and node.leaf.role in ("qkv", "context", "gelu", "attention"):
            assert q.width == (recipe.attention_bits if node.leaf.role == "attention" else recipe.activation_bits)
    for layer, weights in calibration.weights.items():
        leaf = calibration.graph(model).node(layer).leaf
        bits = 8 if leaf.role == "logits" else recipe.weight_bits
        assert fits_groups(weights, bits, recipe.weight_group if bits <= 4 else 0)
    program, images = lower(model, calibration), images_for(model.preprocess, 3, seed=5)
    np.testing.assert_array_equal(Engine(program).run(images), Reference(program).run(images))
    assert Calibration.from_json(calibration.to_json()).to_json() == calibration.to_json()
    assert lower(model, Calibration.from_json(calibration.to_json())).fingerprint() == program.fingerprint()


def test_the_same_images_give_the_same_program(one_thread: None) -> None:
    model = float_model("vit")
    first, second = (lower(model, calibration_of(model, RECIPES["w4a4"])).fingerprint() for _ in range(2))
    assert first == second


def test_the_model_is_not_changed(one_thread: None) -> None:
    model = float_model("vit")
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    calibration_of(model, RECIPES["w4a4"])
    for name, value in model.module.state_dict().items():
        assert torch.equal(value, before[name]) and not value.requires_grad


def test_segments_learned_on_random_tokens_treat_every_token_alike() -> None:
    """MLPs are learned on random tokens, so all of their leaves must treat every token alike."""
    graph = trace(float_model("vit").module)
    kinds = {type(node.leaf) for each in segments(graph) if each.alike for node in each.nodes}
    assert layers.Gelu in kinds and layers.Softmax not in kinds


def test_recipe_w4a4_has_16_bit_residuals_and_8_bit_scores() -> None:
    recipe: Recipe = RECIPES["w4a4"]
    assert recipe.sites["residual"].bits == 16 and recipe.sites["scores"].bits == 8
