"""Tests of compensated rounding: rounding column by column, the bias correction, and whole networks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from fqvit.errors import FqvitError
from fqvit.lowering.lower import lower
from fqvit.models import layers
from fqvit.models.graph import Node, run_float, trace
from fqvit.models.pixels import normalise
from fqvit.quant.calibration import Calibration
from fqvit.quant.codebooks import Groups
from fqvit.quant.methods.compensate import BLOCK, Moments, compensate, round_columns
from fqvit.quant.methods.compensate import fit as fit_layer
from fqvit.quant.methods.lockstep import LinearLayer
from fqvit.quant.recipe import RECIPES
from fqvit.quant.simulate import Simulation
from fqvit.quant.weights import QuantizedLinear, fits_groups, short_output_scales
from tests.factories import calibration_of, float_model, images_for
from tests.factories import one_thread as one_thread

W4 = msgspec.structs.replace(RECIPES["fqvit"], name="w4", weight_bits=4, weight_group=16, rounding="compensated")


def correlated(seed: int, size: int, rows: int = 400) -> Tensor:
    """Inputs [rows, K], strongly correlated, with different variances and means."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(max(size // 3, 1), size, generator=generator, dtype=torch.float64)
    x = torch.randn(rows, len(mix), generator=generator, dtype=torch.float64) @ mix
    x += 0.1 * torch.randn(rows, size, generator=generator, dtype=torch.float64)
    return x * torch.rand(size, generator=generator, dtype=torch.float64) + torch.randn(size, generator=generator)


def fit(node: Node, moments: Moments, input_scales: np.ndarray, calibration: Calibration) -> QuantizedLinear:
    layer, recipe = LinearLayer.of(node, float_model("vit").preprocess), calibration.recipe
    output = short_output_scales(recipe, node.leaf, calibration.sites.get(node.name), len(layer.weight))
    return fit_layer(node, [moments], input_scales, recipe, layer, output)


def covariance(x: Tensor) -> Tensor:
    centred = x - x.mean(0)
    return centred.T @ centred / len(x)


def nearest(values: Tensor, units: Tensor, largest: int) -> Tensor:
    return (values / units + 0.5).floor().clamp(-largest, largest) * units


def in_units(values: Tensor, cov: Tensor, units: Tensor, largest: int) -> Tensor:
    """Round values [O, K] to multiples of units, which are equal in every row."""
    return round_columns(values / units, cov, largest) * units


def error(values: Tensor, rounded: Tensor, cov: Tensor) -> float:
    """Return the squared output error caused by rounding, for inputs with covariance `cov` [K, K]."""
    wrong = values - rounded
    return float((wrong @ cov * wrong).sum())


@pytest.mark.parametrize("size", [3, BLOCK - 1, BLOCK, 2 * BLOCK + 7])
def test_column_rounding_has_less_error_than_rounding_to_nearest(size: int) -> None:
    """Compare the sums over seeds: the method is greedy and not better for every input."""
    ours = plain = 0.0
    for seed in range(12):
        values = torch.randn(8, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        units = (values.abs().amax(1, keepdim=True) / 7).expand(8, size)
        cov = covariance(correlated(seed, size))
        rounded = in_units(values, cov, units, 7)
        codes = rounded / units
        torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-9)
        assert codes.abs().max() <= 7 + 1e-9
        ours += error(values, rounded, cov)
        plain += error(values, nearest(values, units, 7), cov)
    assert ours < plain and (size < BLOCK - 1 or ours < 0.5 * plain)


def test_weights_of_constant_inputs_are_rounded_to_nearest() -> None:
    values = torch.randn(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    units = torch.full((4, 9), 0.3, dtype=torch.float64)
    for cov in (torch.zeros(9, 9, dtype=torch.float64), -1e-20 * torch.ones(9, 9, dtype=torch.float64)):
        assert torch.equal(in_units(values, cov, units, 7), nearest(values, units, 7))


def test_the_column_with_the_largest_variance_is_rounded_to_nearest_and_later_columns_compensate() -> None:
    values = torch.randn(40, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    units = torch.full((40, 8), 0.3, dtype=torch.float64)
    cov = covariance(correlated(0, 8))
    first = int(cov.diagonal().argmax())
    same = in_units(values, cov, units, 7) == nearest(values, units, 7)
    assert same[:, first].all() and not same.all()


def test_weights_of_independent_inputs_are_rounded_to_nearest() -> None:
    values = torch.randn(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    units = torch.full((4, 9), 0.3, dtype=torch.float64)
    cov = torch.diag(torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1)
    torch.testing.assert_close(in_units(values, cov, units, 7), nearest(values, units, 7))


def test_a_covariance_of_rounding_noise_is_damped_until_it_has_a_cholesky_factor() -> None:
    noise = torch.randn(40, 40, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    noise = 1e-12 * (noise + noise.T) + 1e-13 * torch.eye(40, dtype=torch.float64)  # not positive definite
    noise.diagonal().abs_()
    values = torch.randn(3, 40, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    units = torch.full((3, 40), 0.5, dtype=torch.float64)
    codes = in_units(values, noise, units, 7) / units
    assert torch.equal(codes, codes.round()) and codes.abs().max() <= 7


def test_a_covariance_whose_inverse_has_no_cholesky_factor_is_damped_further() -> None:
    """Two inputs stay nearly equal after the first damping. Try many matrices: which of them fails depends on the last bit."""
    values = torch.tensor([[0.3, 0.9, -1.2], [1.1, -0.7, 0.2]], dtype=torch.float64)
    units = torch.full((2, 3), 0.5, dtype=torch.float64)
    for step in range(-4, 12):
        cov = torch.eye(3, dtype=torch.float64)
        cov[0, 1] = cov[1, 0] = 1.01 - step * 2.0**-52
        codes = in_units(values, cov, units, 7) / units
        assert torch.equal(codes, codes.round()) and codes.abs().max() <= 7


@pytest.mark.parametrize("definite", [True, False])
def test_rounding_does_not_depend_on_the_unit_of_the_inputs(definite: bool) -> None:
    """Damping is relative to the variances, even if it has to be increased."""
    values = torch.randn(5, 12, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    units = torch.full((5, 12), 0.4, dtype=torch.float64)
    cov = covariance(correlated(8, 12)) if definite else covariance(correlated(8, 12)) - 0.2 * torch.eye(12)
    expected = in_units(values, cov, units, 7)
    assert not torch.equal(expected, nearest(values, units, 7))
    for unit in (2.0**-20, 2.0**10):
        torch.testing.assert_close(in_units(values, unit * cov, units, 7), expected)


def test_moments_are_precise_for_small_variances_around_a_large_mean() -> None:
    x = correlated(1, 6)
    far = (x + 3000).float()
    found = Moments.of([far[:100], far[100:]], [far[:100], far[100:]])
    torch.testing.assert_close(found.covariance, covariance(far.double()), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.mean_simulated, far.double().mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.mean_float, found.mean_simulated, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("ends", "codes"), [("codes", 7), ("halves", 7.5)])
def test_weight_ends_decides_the_scale_of_the_weights(ends: Any, codes: float) -> None:
    leaf = layers.Linear(6, 3, "branch")
    recipe = msgspec.structs.replace(W4, weight_group=0, weight_ends=ends, channels=False)
    moments = Moments(torch.eye(6, dtype=torch.float64), *torch.zeros(2, 6, dtype=torch.float64))
    found = fit(Node("one", leaf, ("x",)), moments, np.array([0.5]), Calibration(recipe, "logits", 1, {}))
    weight = leaf.weight.detach().double().numpy() * 0.5
    np.testing.assert_allclose(found.scale, np.abs(weight).max(1) / codes)
    # Independent inputs: codes are rounded to nearest.
    np.testing.assert_array_equal(found.w, np.clip(np.floor(weight / found.scale[:, None] + 0.5), -7, 7))


def test_each_weight_is_rounded_to_a_level_of_its_group() -> None:
    generator = torch.Generator().manual_seed(2)
    size = BLOCK + 9
    values = 127 * torch.rand(3, size, generator=generator, dtype=torch.float64) - 60
    codebooks = np.array([[-64, -8, 0, 8], [-3, 0, 5, 127]], np.int8)
    choice = torch.randint(0, 2, (3, -(-size // 8)), generator=generator).numpy().astype(np.uint8)
    groups = Groups(choice, codebooks, 8)
    for cov in (covariance(correlated(2, size)), torch.eye(size, dtype=torch.float64)):
        found = round_columns(values, cov, 127, groups)
        assert groups.fits(found.numpy().astype(np.int8), 2, 8)
    assert torch.equal(found, groups.nearest(values))  # independent inputs
    parts = [round_columns(values[:, a:b], cov[a:b, a:b], 127, groups, a) for a, b in ((0, 20), (20, size))]
    assert torch.equal(torch.cat(parts, 1), found)


def test_input_scales_are_equivalent_to_scaled_weights() -> None:
    x, scales = correlated(4, 20), np.linspace(0.01, 2.0, 20)
    leaf, other = (layers.Linear(20, 7, "branch", bias=False) for _ in range(2))
    with torch.no_grad():
        other.weight.copy_((leaf.weight.double() * torch.from_numpy(scales)).float())
        leaf.weight.copy_((other.weight.double() / torch.from_numpy(scales)).float())
    calibration = Calibration(msgspec.structs.replace(W4, weight_group=0), "logits", 1, {})
    scaled = x / torch.from_numpy(scales)
    found = fit(Node("one", leaf, ("x",)), Moments.of([x], [x]), scales, calibration)
    same = fit(Node("one", other, ("x",)), Moments.of([scaled], [scaled]), np.ones(20), calibration)
    np.testing.assert_array_equal(found.w, same.w)
    np.testing.assert_allclose(found.scale, same.scale, rtol=1e-6)


def test_biases_saturate_at_2_to_the_30_units() -> None:
    leaf = layers.Linear(6, 3, "branch")
    moments = Moments(torch.eye(6, dtype=torch.float64), torch.zeros(6).double(), 1e15 * leaf.weight[0].detach().double())
    found = fit(Node("one", leaf, ("x",)), moments, np.ones(1), Calibration(W4, "logits", 1, {}))
    assert found.bias[0] == 2**30 and np.abs(found.bias).max() == 2**30


@pytest.mark.parametrize("group", [0, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_the_bias_removes_the_mean_error(group: int, bias: bool) -> None:
    """The outputs for simulated inputs have the same mean as the float outputs, within half an accumulator unit."""
    exact = correlated(5, 20).float()
    simulated = exact + 0.3 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(6)) + 0.2
    leaf = layers.Linear(20, 7, "branch", bias=bias)
    recipe = msgspec.structs.replace(W4, weight_group=group)
    scales = np.linspace(0.01, 0.1, 20)
    found = fit(Node("one", leaf, ("x",)), Moments.of([exact], [simulated]), scales, Calibration(recipe, "logits", 1, {}))
    assert fits_groups(found, 4, group)
    weight = torch.from_numpy(found.w * found.scale[:, None] / scales)
    ours = simulated.double() @ weight.T + torch.from_numpy(found.bias * found.scale)
    with torch.no_grad():
        wanted = leaf.double()(exact.double())
    assert ((ours - wanted).mean(0).abs() <= torch.from_numpy(found.scale) * 0.51).all()


def test_compensation_is_deterministic_and_covers_every_linear_layer() -> None:
    model = float_model("vit")
    calibration, images = (
        calibration_of(model, msgspec.structs.replace(W4, rounding="nearest")),
        images_for(model.preprocess, 20),
    )
    first, second = (compensate(model, calibration, images) for _ in range(2))
    assert first.to_json() == second.to_json() and first.weights.keys() == second.weights.keys()
    assert {
        "head",
        "blocks.0.attn.proj",
        "blocks.1.mlp.fc2",
    } <= first.weights.keys() and "patch_embed.proj" not in first.weights
    assert compensate(model, calibration, images[:8]).to_json() != first.to_json()


@pytest.mark.parametrize("kind", ["vit", "padded swin"])
def test_compensated_weights_reduce_the_error_against_float(kind: str) -> None:
    near = far = 0.0
    for seed in range(3):
        model = float_model(kind, seed)
        plain = calibration_of(model, msgspec.structs.replace(W4, rounding="nearest"))
        ours = compensate(model, plain, images_for(model.preprocess, 64, 1))
        images = images_for(model.preprocess, 64, 2)
        exact = run_float(trace(model.module), normalise(images, model.preprocess))
        near += float((Simulation(model, ours).run(images) - exact).square().mean())
        far += float((Simulation(model, plain).run(images) - exact).square().mean())
    assert near < far


def test_the_logits_keep_their_mean() -> None:
    """Every layer compensates the errors of the quantized layers before it, including mean errors."""
    model = float_model("vit")
    images = images_for(model.preprocess, 20, 1)
    found = compensate(model, calibration_of(model, msgspec.structs.replace(W4, rounding="nearest")), images)
    exact = run_float(trace(model.module), normalise(images, model.preprocess))
    wrong = (Simulation(model, found).run(images) - exact).double().mean(0).abs().numpy()
    assert (wrong <= 0.51 * found.weights["head"].scale + 1e-5).all()


@pytest.mark.parametrize("kind", ["vit", "swin"])
@pytest.mark.parametrize("count", [1, 2])
def test_one_image_is_enough(kind: str, count: int) -> None:
    """The head then sees one token, or two equal ones: the covariance is zero or rounding noise."""
    model = float_model(kind)
    same = np.repeat(images_for(model.preprocess, 1), count, 0)
    calibration = calibration_of(model, msgspec.structs.replace(W4, rounding="nearest"))
    lower(model, compensate(model, calibration, same))


def test_the_progress_of_rounding_counts_the_nodes() -> None:
    model, reported = float_model("vit"), []

    def progress(items, total, label):  # type: ignore[no-untyped-def]
        reported.append((total, label))
        return items

    calibration = calibration_of(model, W4, progress=progress)
    assert reported == [(1, "calibrating"), (len(trace(model.module).nodes), "rounding weights")] and calibration.weights


def test_lowering_rejects_weights_of_other_shapes_bits_or_groups() -> None:
    model = float_model("vit")
    calibration = calibration_of(model, W4)
    found = calibration.weights["blocks.0.mlp.fc1"]
    groups = found.groups
    assert groups is not None
    for change, message in (
        (replace(found, w=found.w[:, :-1]), "weights of"),
        (replace(found, groups=None), "bits and groups"),
        (replace(found, groups=replace(groups, choice=groups.choice[:, :0])), "bits and groups"),
        (replace(found, groups=replace(groups, choice=groups.choice + 16)), "bits and groups"),
        (replace(found, groups=replace(groups, codebooks=np.zeros_like(groups.codebooks))), "bits and groups"),
        (replace(found, w=np.full_like(found.w, -128)), "bits and groups"),
    ):
        broken = replace(calibration, weights={**calibration.weights, "blocks.0.mlp.fc1": change})
        with pytest.raises(FqvitError, match=rf"blocks\.0\.mlp\.fc1: .*{message}"):
            lower(model, broken)
    with pytest.raises(FqvitError, match="nowhere: weights of"):
        lower(model, replace(calibration, weights={"nowhere": found}))


def test_moments_can_be_weighted_by_position() -> None:
    """A weight of 2 is the same as observing the position twice."""
    x = correlated(3, 5, 60).reshape(10, 6, 5)
    weights = torch.tensor([2.0, 0.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    found = Moments.of([x[:4], x[4:]], [x[:4] + 1, x[4:] + 1], weights)
    same = Moments.of([x[:, [0, 0, 2, 3, 4, 5]]], [x[:, [0, 0, 2, 3, 4, 5]] + 1])
    for name in ("covariance", "mean_simulated", "mean_float"):
        torch.testing.assert_close(getattr(found, name), getattr(same, name), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["vit", "padded swin"])
def test_weighted_rounding_covers_the_patch_embedding(kind: str) -> None:
    model = float_model(kind)
    recipe = msgspec.structs.replace(RECIPES["embedding"], keys="plain")
    calibration = calibration_of(model, recipe)
    assert "patch_embed.proj" in calibration.weights
    plain = calibration_of(model, msgspec.structs.replace(recipe, rounding="nearest"))
    images = images_for(model.preprocess, 32, 2)
    exact = run_float(trace(model.module), normalise(images, model.preprocess))
    errors = [float((Simulation(model, each).run(images) - exact).square().mean()) for each in (calibration, plain)]
    assert errors[0] < 2 * errors[1]
    lower(model, calibration)
