"""Doubled neurons: the model computes the same function, codes get finer, and every runtime gives the same bits."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from fqvit.errors import FqvitError
from fqvit.evaluate.compare import Comparer
from fqvit.lowering.lower import lower
from fqvit.models.graph import trace
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.quant.calibrate import calibrate
from fqvit.quant.calibration import Calibration
from fqvit.quant.doubling import OFFSET, SHARE, double, offsets
from fqvit.quant.recipe import RECIPES, Recipe, detector_recipe, with_bits, with_methods, with_profile
from fqvit.quant.simulate import Simulation
from fqvit.quant.splitting import find_mlps, weight_of
from fqvit.runtime.native import Engine
from fqvit.runtime.reference import Reference
from tests.factories import MODELS, assert_same, float_model, images_for
from tests.factories import one_thread as one_thread

EMBEDDING = RECIPES["embedding"]
COUNT = 8


def doubled_everywhere(model: FloatModel) -> Recipe:
    """Return a recipe in which all neurons but the first have two copies."""
    mlps = find_mlps(trace(model.module))
    neurons = {name: tuple(range(1, len(weight_of(mlp.fc1)))) for name, mlp in mlps.items()}
    return msgspec.structs.replace(EMBEDDING, doubled=neurons)


@pytest.mark.parametrize("kind", MODELS)
def test_doubled_neurons_compute_the_same_function(kind: str) -> None:
    model = float_model(kind)
    graph, images = trace(model.module), normalise(images_for(model.preprocess, 3), model.preprocess)
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    found = double(graph, dict.fromkeys(find_mlps(graph), (5, 2)))
    with torch.no_grad():
        torch.testing.assert_close(found.run(images), graph.run(images), rtol=1e-4, atol=1e-5)
    after = model.module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(len(weight_of(mlp.fc1)) == len(weight_of(found.node(name))) - 2 for name, mlp in find_mlps(graph).items())


@pytest.mark.parametrize("kind", MODELS)
def test_programs_of_doubled_neurons_are_exact_and_follow_from_their_calibration(kind: str) -> None:
    model = float_model(kind)
    images = images_for(model.preprocess, COUNT)
    calibration = calibrate(model, [images], EMBEDDING)
    total = sum(len(weight_of(mlp.fc1)) for mlp in find_mlps(trace(model.module)).values())
    assert 0 < sum(map(len, calibration.recipe.doubled.values())) <= total * SHARE
    program = lower(model, calibration)
    assert_same(Engine(program, threads=1).run(images), Reference(program).run(images), kind)
    again = lower(model, Calibration.from_json(calibration.to_json()))
    assert again.fingerprint() == program.fingerprint()
    assert calibrate(model, [images], calibration.recipe).to_json() == calibration.to_json()


def test_the_inputs_of_both_copies_differ() -> None:
    model = float_model("vit")
    calibration = calibrate(model, [images_for(model.preprocess, COUNT)], EMBEDDING)
    graph = calibration.graph(model)
    for name, found in offsets(graph, calibration.recipe.doubled, calibration.sites).items():
        neurons = calibration.recipe.doubled[name]
        scales = calibration.sites[find_mlps(graph)[name].act.name].scale
        first, second = found[list(neurons)], found[-len(neurons) :]
        np.testing.assert_allclose(second - first, 2 * OFFSET * scales[-len(neurons) :])
        assert np.array_equal(first, -second) and np.count_nonzero(found) == 2 * len(neurons)


def test_doubling_makes_the_outputs_of_mlps_more_precise() -> None:
    """Only codes of GELU outputs are rounded. One neuron is not doubled."""
    model = float_model("vit")
    images = images_for(model.preprocess, COUNT)
    recipes = msgspec.structs.replace(EMBEDDING, mlps="whole"), doubled_everywhere(model)
    errors = []
    for recipe in recipes:
        calibration = calibrate(model, [images], recipe)
        simulation = Simulation(model, calibration)
        mlp = next(iter(find_mlps(simulation.graph).values()))
        shift = offsets(simulation.graph, recipe.doubled, calibration.sites).get(mlp.fc1.name, 0.0)
        with torch.no_grad():
            x = simulation.graph.ending_at(mlp.fc1.name).run(normalise(images, model.preprocess))
            exact = mlp.fc2.leaf(mlp.act.leaf(x))
            q = calibration.sites[mlp.act.name]
            found = mlp.fc2.leaf(q.decode(q.encode(mlp.act.leaf((x + torch.as_tensor(shift)).float()))))
        errors.append(float((found - exact).square().mean()))
    assert errors[1] < 0.6 * errors[0]  # the rounding errors of both copies are nearly independent


def test_compare_reads_the_doubled_neurons_from_the_program() -> None:
    model = float_model("vit")
    images = images_for(model.preprocess, COUNT)
    calibration = calibrate(model, [images], EMBEDDING)
    comparer = Comparer(lower(model, calibration), model)
    comparer.add(images)
    rows = {row.site for row in comparer.result().sites}
    assert rows >= {mlp.act.name for mlp in find_mlps(comparer.graph).values()}
    assert calibration.recipe.doubled
    before = find_mlps(trace(model.module))
    for name, neurons in calibration.recipe.doubled.items():
        assert len(weight_of(comparer.graph.node(name))) == len(weight_of(before[name].fc1)) + len(neurons)


def test_wrong_neurons_are_rejected() -> None:
    graph = trace(float_model("vit").module)
    with pytest.raises(FqvitError, match="no MLP with GELU whose first layer is nowhere"):
        double(graph, {"nowhere": (0,)})
    for neurons in ((), (10**6,), (1, 1)):
        with pytest.raises(FqvitError, match="expected some of the neurons"):
            double(graph, {"blocks.0.mlp.fc1": neurons})
    with pytest.raises(ValueError, match="doubled requires mlps doubled"):
        Recipe(name="wrong", doubled={"blocks.0.mlp.fc1": (0,)})
    with pytest.raises(ValueError, match="doubled requires rounding compensated"):
        Recipe(name="wrong", mlps="doubled", doubled={"blocks.0.mlp.fc1": (0,)})


def test_methods_without_doubled_neurons_clear_their_list() -> None:
    chosen = msgspec.structs.replace(EMBEDDING, doubled={"blocks.0.mlp.fc1": (0,)})
    npu = with_profile(chosen, "npu")
    assert npu.mlps == "whole" and not npu.doubled
    assert not with_methods(with_bits(chosen, "6/6/4")).doubled
    assert not detector_recipe(chosen).doubled
