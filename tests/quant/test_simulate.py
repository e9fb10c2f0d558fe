"""The float simulation on its own; against the program it is tested in tests/runtime/test_networks.py."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from fqvit.models import layers
from fqvit.models.graph import run_float, trace
from fqvit.models.pixels import normalise
from fqvit.quant.recipe import RECIPES
from fqvit.quant.simulate import Simulation
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


def test_the_model_is_only_read() -> None:
    model = float_model("vit")
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    Simulation(model, calibration_of(model)).run(images_for(model.preprocess, 2))
    assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())
