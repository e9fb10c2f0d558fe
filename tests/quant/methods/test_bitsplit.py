"""Test Bit-Split against slow loops over single weights, by its objective, and in whole networks.

Steps 1 to 3 are those in the docstring of bitsplit.py: initialize, fit the weights W, fit the outputs Y = X W^T.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fqvit.models import embedded
from fqvit.models.graph import Node, run_float, trace
from fqvit.models.load import load_model
from fqvit.models.pixels import normalise
from fqvit.quant.calibrate import calibrate
from fqvit.quant.methods import bitsplit
from fqvit.quant.methods.bitsplit import BLOCK, Products, Split, bit_split, by_outputs, by_weights
from fqvit.quant.methods.lockstep import LinearLayer
from fqvit.quant.recipe import RECIPES, with_bits
from fqvit.quant.simulate import Simulation
from tests.factories import calibration_of, float_model, images_for
from tests.factories import one_thread as one_thread

Array = NDArray[np.float64]


def problem(seed: int, rows: int = 60, inputs: int = 7, outputs: int = 5) -> tuple[Array, Array, Array]:
    """Return correlated inputs [rows, K], weights [O, K], and the float outputs [rows, O] of slightly different inputs."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, inputs)) @ rng.normal(size=(inputs, inputs)) + rng.normal(size=inputs)
    weight = rng.normal(size=(outputs, inputs))
    return x, weight, (x + 0.02 * rng.normal(size=x.shape)) @ weight.T


def products_of(x: Array, y: Array) -> Products:
    return Products(x.T @ x, y.T @ x, (y * y).sum(0), len(x))


def real(split: Split) -> Array:
    return split.scale[:, None] * split.codes() / 2.0 ** (len(split.bits) - 1)


def slow_weights(row: Array, bits: int) -> tuple[float, list[list[float]]]:
    """Compute steps 1 and 2 for one output channel, weight by weight; return the scale a and the ternary bits [bits - 1][K]."""
    largest = 2 ** (bits - 1) - 1
    a, before = max(abs(w) for w in row) / largest, 0.0
    while abs(a - before) > 1e-9 * a:
        q = [min(max(int(np.floor(w / a + 0.5)), -largest), largest) for w in row]
        a, before = sum(w * c for w, c in zip(row, q, strict=True)) / sum(c * c for c in q), a
    split = [[float(np.sign(c) * (abs(c) >> k & 1)) for c in q] for k in reversed(range(bits - 1))]
    a *= 2 ** (bits - 2)
    for i in range(50):
        total = [sum(b[n] * 2.0**-k for k, b in enumerate(split)) for n in range(len(row))]
        a, before = sum(w * t for w, t in zip(row, total, strict=True)) / sum(t * t for t in total), a
        if i > 0 and abs(a - before) <= 1e-9 * a:
            break
        for k, n in itertools.product(range(bits - 1), range(len(row))):
            others = sum(split[m][n] * 2.0**-m for m in range(bits - 1) if m != k)
            r = (row[n] - a * others) * 2**k
            split[k][n] = 0.0 if 2 * abs(r) < a else float(np.sign(r))
    return a, split


def slow_outputs(split: Split, x: Array, y: Array, rounds: int) -> Split:
    """Compute step 3 by its definition, directly from the inputs x and the float outputs y."""
    bits, square = split.bits.copy(), x.T @ x
    a = split.scale
    for _ in range(rounds):
        total = sum(b * 2.0**-k for k, b in enumerate(bits))
        xb = x @ total.T
        a = (y * xb).sum(0) / (xb * xb).sum(0)
        for k in range(len(bits)):
            others = sum((b * 2.0**-m for m, b in enumerate(bits) if m != k), np.zeros_like(bits[0]))
            t = (y - x @ (a[:, None] * others).T).T @ x
            for n in range(x.shape[1]):
                bits[k][:, n] = 0
                slope = 2 * ((bits[k] @ square[n]) * a / 2**k - t[:, n])
                bits[k][:, n] = np.where(np.abs(slope) < a / 2**k * square[n, n], 0, -np.sign(slope))
    return Split(a, bits)


@pytest.mark.parametrize("bits", range(2, 9))
def test_steps_1_and_2_match_a_slow_loop(bits: int) -> None:
    for seed in range(3):
        _, weight, _ = problem(seed, outputs=4)
        found = by_weights(weight, bits)
        for row, scale, split in zip(weight, found.scale, found.bits.transpose(1, 0, 2), strict=True):
            a, expected = slow_weights(row, bits)
            assert scale == pytest.approx(a, rel=1e-9)
            np.testing.assert_array_equal(split, expected)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("inputs", [7, BLOCK + 5])
def test_step_3_matches_its_definition(bits: int, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitsplit, "WORTHWHILE", -np.inf)  # no row ends early
    x, weight, y = problem(bits, rows=3 * inputs, inputs=inputs)
    start = by_weights(weight, bits)
    for rounds in (1, 4):
        found, expected = by_outputs(start, products_of(x, y), rounds), slow_outputs(start, x, y, rounds)
        np.testing.assert_allclose(found.scale, expected.scale, rtol=1e-9)
        np.testing.assert_array_equal(found.bits, expected.bits)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_no_round_increases_the_error(bits: int) -> None:
    x, weight, y = problem(1, rows=200, inputs=40)
    largest = 2 ** (bits - 1) - 1
    split = by_weights(weight, bits)
    scale = np.abs(weight).max(1, keepdims=True) / largest
    nearest = np.clip(np.round(weight / scale), -largest, largest) * scale
    assert (np.square(weight - real(split)).sum(1) <= np.square(weight - nearest).sum(1) + 1e-12).all()
    errors = [np.square(y - x @ real(by_outputs(split, products_of(x, y), rounds)).T).sum(0) for rounds in range(8)]
    for before, after in itertools.pairwise(errors):
        assert (after <= before * (1 + 1e-9)).all()
    assert errors[-1].sum() < 0.7 * errors[0].sum()


def test_no_single_change_of_a_bit_reduces_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last round, with a and all other bits fixed, every bit is the best of its three values."""
    monkeypatch.setattr(bitsplit, "WORTHWHILE", 0.0)
    x, weight, y = problem(3, inputs=6, outputs=3)
    split = by_outputs(by_weights(weight, 3), products_of(x, y))
    least = np.square(y - x @ real(split).T).sum(0)
    for k, n, value in itertools.product(range(2), range(6), (-1.0, 0.0, 1.0)):
        bits = split.bits.copy()
        bits[k, :, n] = value
        assert (np.square(y - x @ real(Split(split.scale, bits)).T).sum(0) >= least * (1 - 1e-6)).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rows_of_zeros_constants_and_tiny_values_are_handled(bits: int) -> None:
    x, weight, _ = problem(0)
    weight[0], weight[1], weight[2] = 0, 0.3, weight[2] * 1e-14
    split = by_outputs(by_weights(weight, bits), products_of(x, x @ weight.T))
    assert split.scale[0] == 0 and not split.codes()[0].any() and np.isfinite(split.scale).all()
    np.testing.assert_allclose(real(split)[1], 0.3, rtol=1e-9)
    assert np.abs(split.codes()).max() <= 2 ** (bits - 1) - 1
    layer = LinearLayer.of(trace(float_model("vit").module).node("head"), float_model("vit").preprocess)
    bias = np.array([0.5, -2.0, 3.0, 0.0, 1.0])
    linear = LinearLayer(layer.leaf, layer.preprocess, weight, bias)
    found = bitsplit.fit(linear, products_of(x, x @ weight.T), np.array([0.1]), bits)
    np.testing.assert_allclose(found.bias * found.scale, bias, rtol=0, atol=found.scale.max())
    assert np.abs(found.bias).max() < 2**31 and (found.scale > 0).all() and not found.w[0].any()


def test_an_input_that_is_always_zero_keeps_its_weights() -> None:
    x, weight, _ = problem(2)
    x[:, 3] = 0
    start = by_weights(weight, 4)
    y = x @ weight.T
    found = by_outputs(start, products_of(x, y))
    np.testing.assert_array_equal(found.bits[:, :, 3], start.bits[:, :, 3])
    # The weights of the other inputs get the same bits as without this input.
    without = by_outputs(Split(start.scale, np.delete(start.bits, 3, 2)), products_of(np.delete(x, 3, 1), y))
    np.testing.assert_array_equal(np.delete(found.bits, 3, 2), without.bits)
    np.testing.assert_allclose(found.scale, without.scale, rtol=1e-9)


def test_rows_are_independent() -> None:
    x, weight, y = problem(7, inputs=20, outputs=30)
    whole = by_weights(weight, 3)
    fitted = by_outputs(whole, products_of(x, y))
    for i in range(30):
        single = by_weights(weight[i : i + 1], 3)
        np.testing.assert_array_equal(single.bits[:, 0], whole.bits[:, i])
        np.testing.assert_array_equal(by_outputs(single, products_of(x, y[:, i : i + 1])).bits[:, 0], fitted.bits[:, i])


def test_a_row_stops_after_the_first_round_with_little_improvement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitsplit, "WORTHWHILE", 0.2)  # large, so that further rounds would still change rows
    x, weight, y = problem(9, rows=200, inputs=30, outputs=12)
    start = by_weights(weight, 3)
    rounds = [slow_outputs(start, x, y, count) for count in range(1, 12)]
    errors = np.array([np.square(y - x @ real(split).T).sum(0) for split in rounds])
    found = by_outputs(start, products_of(x, y))
    last = [next(i for i in range(1, 11) if errors[i, row] >= 0.8 * errors[i - 1, row]) for row in range(12)]
    assert len(set(last)) > 1 and any((rounds[i].bits[:, row] != rounds[-1].bits[:, row]).any() for row, i in enumerate(last))
    for row, i in enumerate(last):
        np.testing.assert_array_equal(found.bits[:, row], rounds[i].bits[:, row])
        assert found.scale[row] == pytest.approx(rounds[i].scale[row])


def test_a_scale_that_would_not_be_positive_is_kept_unchanged() -> None:
    with np.errstate(all="raise"):
        found = bitsplit._least_squares(np.full(4, 3.0), np.array([2.0, -2.0, 0.0, 0.0]), np.array([4.0, 4.0, 4.0, 0.0]))
    assert found.tolist() == [0.5, 3.0, 3.0, 3.0]


def test_the_result_does_not_depend_on_the_unit_of_inputs_and_outputs() -> None:
    x, weight, y = problem(6)
    start = by_weights(weight, 4)
    expected = by_outputs(start, products_of(x, y))
    for unit in (1e-4, 1e4):
        found = by_outputs(start, products_of(unit * x, unit * y))
        np.testing.assert_array_equal(found.bits, expected.bits)
        np.testing.assert_allclose(found.scale, expected.scale, rtol=1e-9)


@pytest.mark.parametrize("rows", [8 * 7 - 1, 8 * 7, 8 * 7 + 1])
def test_fit_works_on_input_codes_and_uses_outputs_if_there_are_enough_rows(rows: int) -> None:
    """With input scales s [K], the result equals that for inputs x / s and weights w * s."""
    x, weight, y = problem(5, rows=rows)
    scales = np.array([0.5, 0.1, 3.0, 0.02, 1.0, 0.7, 0.3])
    layer = LinearLayer.of(trace(float_model("vit").module).node("head"), float_model("vit").preprocess)
    linear = LinearLayer(layer.leaf, layer.preprocess, weight, np.arange(5.0))
    found = bitsplit.fit(linear, products_of(x, y), scales, 4)
    split = by_weights(weight * scales, 4)
    if rows >= 8 * 7:
        split = by_outputs(split, products_of(x / scales, y))
    np.testing.assert_array_equal(found.w, split.codes())
    np.testing.assert_allclose(found.scale, split.scale / 4, rtol=1e-9)
    assert (np.abs(found.bias * found.scale - linear.bias) <= 0.5001 * found.scale).all()


@pytest.mark.parametrize("share", [0.6, 0.9, 1.1, 3.0])
def test_biases_are_at_most_2_to_the_30_units(share: float) -> None:
    """share: the bias as a fraction of 2^30 units; a unit is the scale that the row would have without a bias."""
    layer = LinearLayer.of(trace(float_model("vit").module).node("head"), float_model("vit").preprocess)
    weight = np.array([[0.5, -1.0, 0.25], [1.0, 1.0, 1.0]])
    own = by_weights(weight, 8).scale[0] / 2**6
    linear = LinearLayer(layer.leaf, layer.preprocess, weight, np.array([share * 2**30 * own, 0.0]))
    found = bitsplit.fit(linear, Products(np.eye(3), weight, np.ones(2), 0), np.ones(1), 8)
    assert abs(found.bias[0]) <= 2**30 and found.bias[0] * found.scale[0] == pytest.approx(linear.bias[0])
    assert (found.scale[0] == pytest.approx(own)) == (share < 1)


def test_a_layer_is_fitted_with_inputs_from_the_quantized_earlier_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = float_model("vit")
    images = images_for(model.preprocess, 12)
    seen: list[Products] = []

    def spy(linear: LinearLayer, products: Products, scales: Array, bits: int) -> Any:
        seen.append(products)
        return fit(linear, products, scales, bits)

    fit = bitsplit.fit
    monkeypatch.setattr(bitsplit, "fit", spy)
    calibration = calibration_of(model, msgspec.structs.replace(RECIPES["partial"], weight_bits=3))
    simulation, rows = Simulation(model, bit_split(model, calibration, images)), {}

    def visit(node: Node, y: torch.Tensor) -> torch.Tensor:
        rows[node.name] = simulation.visit(node, y)
        return rows[node.name]

    with torch.no_grad():
        simulation.graph.run(normalise(images, model.preprocess), visit, simulation.call)
    x = rows[simulation.graph.node("head").inputs[0]].double().numpy()
    np.testing.assert_allclose(seen[-1].inputs, x.T @ x, rtol=1e-3, atol=1e-3)


def test_products_sum_over_all_batches() -> None:
    x, weight, _ = problem(4)
    noisy = x + 0.1
    parts = [[torch.from_numpy(rows).float() for rows in np.split(values, [10, 30])] for values in (x, noisy)]
    found = Products.of(weight, *parts)
    y = x @ weight.T
    assert found.rows == 60
    np.testing.assert_allclose(found.inputs, noisy.T @ noisy, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(found.outputs, y.T @ noisy, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(found.power, (y * y).sum(0), rtol=1e-5)


@pytest.mark.parametrize("kind", ["vit", "swin", "padded swin"])
@torch.no_grad()
def test_the_patch_embedding_is_a_linear_layer_on_rows_of_pixels(kind: str) -> None:
    model = float_model(kind)
    node = trace(model.module).node("patch_embed.proj")
    images = normalise(images_for(model.preprocess, 3), model.preprocess)
    linear = LinearLayer.of(node, model.preprocess)
    rows = linear.rows(images).double() @ torch.from_numpy(linear.weight).T + torch.from_numpy(linear.bias)
    torch.testing.assert_close(rows.float(), node.leaf(images), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", embedded.MODELS)
def test_bit_split_beats_rounding_to_nearest_at_3_bits(name: str) -> None:
    model = load_model(name)
    images = embedded.test_images()[0][::4]
    exact = run_float(trace(model.module), normalise(images, model.preprocess))
    error = {}
    for recipe in ("partial", "bit-split"):
        calibration = calibrate(model, [embedded.calibration_images()[:48]], with_bits(RECIPES[recipe], "3/8/8"))
        error[recipe] = float((Simulation(model, calibration).run(images) - exact).square().mean())
    assert error["bit-split"] < 0.6 * error["partial"]


def test_every_linear_layer_is_split_and_progress_is_reported() -> None:
    model = float_model("padded swin")
    seen: list[object] = []

    def progress(items, count, label):  # type: ignore[no-untyped-def]
        seen.append((count, label))
        return items

    calibration = calibration_of(model, RECIPES["partial"])
    found = bit_split(model, calibration, images_for(model.preprocess, 6), progress)
    graph = trace(model.module)
    assert set(found.weights) == {
        node.name for node in graph.nodes if hasattr(node.leaf, "weight") and node.leaf.weight.ndim > 1
    }
    assert seen == [(len(graph.nodes), "splitting weights")]
