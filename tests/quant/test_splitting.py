"""Split MLPs: the model computes the same function, codes get finer, and every runtime gives the same bits."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from fqvit.errors import FqvitError
from fqvit.evaluate.compare import Comparer
from fqvit.lowering.lower import lower
from fqvit.models.graph import trace
from fqvit.models.layers import Linear
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.quant.calibrate import calibrate
from fqvit.quant.calibration import Calibration
from fqvit.quant.recipe import RECIPES, Recipe, with_profile
from fqvit.quant.simulate import Simulation
from fqvit.quant.splitting import find_mlps, outlying, split
from fqvit.runtime.native import Engine
from fqvit.runtime.reference import Reference
from tests.factories import MODELS, assert_same, float_model, images_for
from tests.factories import one_thread as one_thread

FQVIT = RECIPES["fqvit"]
FACTOR = 256.0
COUNT = 64  # with fewer images, the channels of a site share one range, because there are too few rows


def model_with_outlier(kind: str = "vit") -> tuple[FloatModel, str]:
    """Return a model with one neuron that is FACTOR times as large as the others, and the name of its layer.

    The weights that read the neuron are smaller by the same factor, so it matters no more than the others.
    """
    model = float_model(kind)
    mlp = next(reversed(find_mlps(trace(model.module)).values()))
    with torch.no_grad():
        for leaf, rows in ((mlp.fc1.leaf, True), (mlp.fc2.leaf, False)):
            assert isinstance(leaf, Linear) and leaf.bias is not None
            if rows:
                leaf.weight[3] *= FACTOR
                leaf.bias[3] *= FACTOR
            else:
                leaf.weight[:, 3] /= FACTOR
    return model, mlp.fc1.name


@pytest.mark.parametrize("kind", MODELS)
def test_split_mlps_compute_the_same_function(kind: str) -> None:
    model = float_model(kind)
    graph, images = trace(model.module), normalise(images_for(model.preprocess, 3), model.preprocess)
    mlps = find_mlps(graph)
    assert list(mlps) == [node.name for node in graph.nodes if node.leaf.role == "hidden"]
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    found = split(graph, dict.fromkeys(mlps, (5, 2)))
    assert len(found.nodes) == len(graph.nodes) + 4 * len(mlps)
    with torch.no_grad():
        torch.testing.assert_close(found.run(images), graph.run(images), rtol=1e-4, atol=1e-5)
    after = model.module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_outliers_are_few_and_far_from_the_others() -> None:
    even = np.linspace(1.0, 5.0, 64)
    assert outlying(even) == ()
    assert outlying(np.append(even, 40.0)) == (64,)
    assert outlying(np.full(64, 0.01)) == ()
    assert outlying(np.append(np.full(64, 0.01), 2.0)) == ()
    assert len(outlying(np.append(even, np.full(16, 40.0)))) == 0


@pytest.mark.parametrize("kind", MODELS)
def test_programs_of_split_mlps_are_exact_and_follow_from_their_calibration(kind: str) -> None:
    model, name = model_with_outlier(kind)
    images = images_for(model.preprocess, COUNT)
    calibration = calibrate(model, [images], FQVIT)
    assert calibration.recipe.outliers == {name: (3,)}
    program = lower(model, calibration)
    assert_same(Engine(program, threads=1).run(images), Reference(program).run(images), kind)
    again = lower(model, Calibration.from_json(calibration.to_json()))
    assert again.fingerprint() == program.fingerprint()
    assert calibrate(model, [images], calibration.recipe).to_json() == calibration.to_json()


def test_the_sum_with_the_outliers_does_not_saturate() -> None:
    """Its range is not observed, but computed from other ranges."""
    model, name = model_with_outlier()
    images = images_for(model.preprocess, COUNT)
    calibration = calibrate(model, [images], FQVIT)
    graph = calibration.graph(model)
    sum_name = find_mlps(trace(model.module))[name].add.name + ".outliers"
    with torch.no_grad():
        y = graph.ending_at(sum_name).run(normalise(images, model.preprocess))
    q = calibration.sites[sum_name]
    assert q.bits == 16 and float((q.decode(q.encode(y)) - y).abs().max()) < 0.51 * float(q.scale[0])


def test_splitting_makes_the_codes_of_the_other_neurons_finer() -> None:
    model, name = model_with_outlier()
    images = images_for(model.preprocess, COUNT)
    whole, parts = (calibrate(model, [images], msgspec.structs.replace(FQVIT, mlps=mlps)) for mlps in ("whole", "split"))
    assert not whole.recipe.outliers
    assert float(parts.sites[name].scale[0]) * 20 < float(whole.sites[name].scale[0])
    graph = trace(model.module)
    with torch.no_grad():
        exact = graph.run(normalise(images, model.preprocess))
        errors = [float((Simulation(model, each).run(images) - exact).square().mean()) for each in (whole, parts)]
    assert errors[1] < 0.5 * errors[0]


def test_compare_reads_the_outliers_from_the_program() -> None:
    model, name = model_with_outlier()
    images = images_for(model.preprocess, COUNT)
    program = lower(model, calibrate(model, [images], FQVIT))
    comparer = Comparer(program, model)
    comparer.add(images)
    assert f"{name}.outliers" in {row.site for row in comparer.result().sites}


def test_a_model_without_outliers_is_not_changed() -> None:
    model = float_model("vit")
    images = images_for(model.preprocess, COUNT)
    whole, parts = (calibrate(model, [images], msgspec.structs.replace(FQVIT, mlps=mlps)) for mlps in ("whole", "split"))
    assert not parts.recipe.outliers and whole.sites.keys() == parts.sites.keys()
    assert all(np.array_equal(whole.sites[name].scale, parts.sites[name].scale) for name in whole.sites)


def test_recipes_with_other_statistics_do_not_split() -> None:
    """The ranges of the two parts cannot be computed from the statistics of Power-of-Two Factors or of other observers."""
    model, _ = model_with_outlier()
    images = images_for(model.preprocess, COUNT)
    for change in ({"residual": "ptf", "sites": {}}, {"observer": "ema"}, {"channels": False}):
        assert not calibrate(model, [images], msgspec.structs.replace(FQVIT, **change)).recipe.outliers
    assert with_profile(FQVIT, "npu").mlps == "whole"


def test_wrong_outliers_are_rejected() -> None:
    model = float_model("vit")
    graph, images = trace(model.module), images_for(model.preprocess, COUNT)
    with pytest.raises(FqvitError, match="no MLP with GELU whose first layer is nowhere"):
        split(graph, {"nowhere": (0,)})
    for neurons in ((), (10**6,), (1, 1), tuple(range(10**3))):
        with pytest.raises(FqvitError, match="expected some, not all, of the neurons"):
            split(graph, {"blocks.0.mlp.fc1": neurons})
    with pytest.raises(FqvitError, match="nowhere"):
        calibrate(model, [images], msgspec.structs.replace(FQVIT, outliers={"nowhere": (0,)}))
    with pytest.raises(ValueError, match="outliers require mlps split"):
        Recipe(name="wrong", outliers={"blocks.0.mlp.fc1": (0,)})
