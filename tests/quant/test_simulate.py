"""The float simulation on its own; against the program it is tested in tests/runtime/test_networks.py."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from fqvit.ir.exptable import EXP_TABLES
from fqvit.models import layers
from fqvit.models.graph import run_float, trace
from fqvit.models.pixels import normalise
from fqvit.quant.qparams import affine
from fqvit.quant.recipe import RECIPES
from fqvit.quant.simulate import Simulation, table_softmax
from fqvit.quant.weights import pixel_linear
from tests.factories import MODELS, calibration_of, float_model, images_for
from tests.factories import one_thread as one_thread


@pytest.mark.parametrize("kind", MODELS)
def test_simulation_at_8_bits_follows_the_float_model(kind: str) -> None:
    model = float_model(kind)
    images = images_for(model.preprocess, 12, 9)
    simulated = Simulation(model, calibration_of(model, "fq-vit-8")).run(images).numpy()
    exact = run_float(trace(model.module), normalise(images, model.preprocess)).numpy()
    assert simulated.shape == exact.shape and np.corrcoef(simulated.ravel(), exact.ravel())[0, 1] > 0.98


def test_simulated_sites_hold_only_values_of_their_codes() -> None:
    model = float_model("padded swin")
    simulation = Simulation(model, calibration_of(model))
    seen: dict[str, torch.Tensor] = {}

    def visit(node: object, y: torch.Tensor) -> torch.Tensor:
        seen[node.name] = simulation.visit(node, y)  # type: ignore[attr-defined, arg-type]
        return seen[node.name]

    with torch.no_grad():
        images = normalise(images_for(model.preprocess, 2), model.preprocess)
        simulation.graph.run(images, visit, simulation.call)  # type: ignore[arg-type]
    for name, q in simulation.sites.items():
        again = q.decode(q.encode(seen[name]))
        torch.testing.assert_close(again, seen[name], rtol=1e-5, atol=1e-6, msg=name)


def test_masked_models_have_a_zero_code_everywhere() -> None:
    model = float_model("swin")
    recipe = msgspec.structs.replace(RECIPES["fq-vit"], zero_code=False)
    simulation = Simulation(model, calibration_of(model, recipe))
    assert {q.zero_code for q in simulation.sites.values() if q.log2} == {True}
    plain = float_model("vit")
    assert {q.zero_code for q in Simulation(plain, calibration_of(plain, recipe)).sites.values() if q.log2} == {False}


def test_rounded_weights_are_within_half_a_step() -> None:
    model = float_model("vit")
    simulation = Simulation(model, calibration_of(model))
    for node in simulation.graph.nodes:
        if isinstance(node.leaf, layers.Linear):
            weight, _ = simulation.weights[node.name]
            exact = node.leaf.weight.detach()
            assert ((weight - exact).abs().amax(1) <= exact.abs().amax(1) / 127 / 2 * 1.001).all(), node.name


def test_a_unit_of_the_patch_embedding_is_that_of_whole_pixels() -> None:
    model = float_model("vit")
    simulation = Simulation(model, calibration_of(model))
    leaf = simulation.graph.node("patch_embed.proj").leaf
    assert isinstance(leaf, layers.Patches)
    weight, _, _ = pixel_linear(leaf.weight.detach().double().numpy(), leaf.bias.detach().double().numpy(), model.preprocess)
    np.testing.assert_allclose(simulation.patch_units["patch_embed.proj"].numpy(), np.abs(weight).max(1) / 255 / 127, rtol=1e-9)


@pytest.mark.parametrize("exp", EXP_TABLES)
@pytest.mark.parametrize("masked", [False, True])
def test_table_softmax_is_the_table_of_the_distance_to_the_largest_code(exp: str, masked: bool) -> None:
    mask = torch.ones(2, 5, 5, dtype=torch.bool)
    mask[1, :, 3:] = not masked
    leaf = layers.Softmax(mask if masked else None)
    q = affine(-6.0, 6.0, 8)
    scores = q.decode(torch.randint(0, 256, (3, 2, 4, 5, 5), generator=torch.Generator().manual_seed(0)).float())
    table = EXP_TABLES[exp](float(q.scale[0]), 256, 5)
    found = table_softmax(leaf, scores, q, exp)
    torch.testing.assert_close(found.sum(-1), torch.ones(3, 2, 4, 5))
    for image, window, head, row in np.ndindex(3, 2, 4, 5):
        codes = q.encode(scores[image, window, head, row]).long().tolist()
        seen = [code for code, kept in zip(codes, mask[window, row].tolist(), strict=True) if kept]
        weights = [float(table[min(max(seen) - code, len(table) - 1)]) for code in seen]
        expected = [w / sum(weights) for w in weights] + [0.0] * (5 - len(seen))
        assert found[image, window, head, row].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("exp", EXP_TABLES)
def test_a_recipes_exponentials_are_simulated(exp: str) -> None:
    """But the exact table, which is softmax itself."""
    model = float_model("vit")
    simulation = Simulation(model, calibration_of(model, msgspec.structs.replace(RECIPES["fq-vit"], exp=exp)))
    node = simulation.graph.node("blocks.0.attn.softmax")
    q = simulation.sites["blocks.0.attn.scores"]
    scores = q.decode(torch.randint(0, 256, (1, 2, 3, 7), generator=torch.Generator().manual_seed(0)).float())
    assert isinstance(node.leaf, layers.Softmax)
    expected = scores.softmax(-1) if exp == "table" else table_softmax(node.leaf, scores, q, exp)
    torch.testing.assert_close(simulation.call(node, [scores]), expected)


def test_the_model_is_only_read() -> None:
    model = float_model("vit")
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    Simulation(model, calibration_of(model)).run(images_for(model.preprocess, 2))
    assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())
