"""The float simulation. Its agreement with the integer program is tested in tests/runtime/test_networks.py."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fqvit.frontend.load import load_model
from fqvit.models import layers, maps
from fqvit.models.graph import run_float, trace
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.quant.calibration import Calibration
from fqvit.quant.exptable import EXP_TABLES
from fqvit.quant.qparams import QParams, affine
from fqvit.quant.recipe import RECIPES, Recipe
from fqvit.quant.simulate import Simulation, table_softmax
from fqvit.quant.weights import QuantizedLinear, pixel_linear, pixel_zero
from tests.factories import MODELS, calibration_of, float_model, images_for
from tests.factories import one_thread as one_thread


@pytest.mark.parametrize("kind", MODELS)
def test_simulation_at_8_bits_correlates_with_the_float_model(kind: str) -> None:
    model = float_model(kind)
    images = images_for(model.preprocess, 12, 9)
    simulated = Simulation(model, calibration_of(model, "fq-vit-8")).run(images).numpy()
    exact = run_float(trace(model.module), normalise(images, model.preprocess)).numpy()
    assert simulated.shape == exact.shape and np.corrcoef(simulated.ravel(), exact.ravel())[0, 1] > 0.98


class TwoOutputs(nn.Module):
    """A classifier that returns its logits first, then its features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = F.gelu(self.patch(x).flatten(2).transpose(1, 2)).mean(1)
        return self.head(features), features


def test_run_returns_the_main_output_of_a_captured_module_with_several_outputs() -> None:
    model = load_model(TwoOutputs().eval(), size=8)
    simulation = Simulation(model, calibration_of(model))
    images = images_for(model.preprocess, 4)
    assert simulation.run(images).shape == run_float(trace(model.module), normalise(images, model.preprocess)).shape == (4, 5)


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


def test_models_with_masks_always_have_a_zero_code() -> None:
    model = float_model("swin")
    recipe = msgspec.structs.replace(RECIPES["fq-vit"], zero_code=False)
    simulation = Simulation(model, calibration_of(model, recipe))
    assert {q.zero_code for q in simulation.sites.values() if q.log2} == {True}
    plain = float_model("vit")
    assert {q.zero_code for q in Simulation(plain, calibration_of(plain, recipe)).sites.values() if q.log2} == {False}


def test_quantized_weights_are_within_half_a_scale_of_the_float_weights() -> None:
    model = float_model("vit")
    simulation = Simulation(model, calibration_of(model))
    for node in simulation.graph.nodes:
        if isinstance(node.leaf, layers.Linear):
            weight, _ = simulation.weights[node.name]
            exact = node.leaf.weight.detach()
            assert ((weight - exact).abs().amax(1) <= exact.abs().amax(1) / 127 / 2 * 1.001).all(), node.name


def test_the_accumulator_unit_of_the_patch_embedding_is_for_integer_pixels() -> None:
    model = float_model("vit")
    simulation = Simulation(model, calibration_of(model))
    leaf = simulation.graph.node("patch_embed.proj").leaf
    assert isinstance(leaf, layers.Patches)
    weight, _, _ = pixel_linear(leaf.weight.detach().double().numpy(), leaf.bias.detach().double().numpy(), model.preprocess)
    np.testing.assert_allclose(simulation.units["patch_embed.proj"].numpy(), np.abs(weight).max(1) / 255 / 127, rtol=1e-9)


def test_the_patch_embedding_of_normalised_images_equals_that_of_integer_pixels() -> None:
    model = float_model("vit")
    simulation = Simulation(model, calibration_of(model))
    node = simulation.graph.node("patch_embed.proj")
    found = simulation.nearest(node)
    images = images_for(model.preprocess, 2)
    patches = images.reshape(2, 3, 4, 3, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(2, 9, 48).astype(np.int64)
    units = (patches - pixel_zero(model.preprocess)) @ found.w.T.astype(np.int64) + found.bias
    got = simulation.call(node, [normalise(images, model.preprocess)])
    np.testing.assert_allclose(got.numpy(), units * found.scale, atol=1e-5)


def test_relative_position_biases_are_multiples_of_the_score_unit() -> None:
    model = float_model("swin")
    simulation = Simulation(model, calibration_of(model))
    node = simulation.graph.node("layers.0.blocks.0.attn.scores")
    leaf, (table,) = node.leaf, node.params
    assert isinstance(leaf, layers.BiasedScores)
    q = simulation.sites["layers.0.blocks.0.attn.qkv"]
    unit = leaf.scale * float(q.group(0).scale[0]) * float(q.group(1).scale[0])
    zeros = torch.zeros(1, 4, 2, 16, 4, dtype=torch.float64)
    found, exact = simulation.call(node, [zeros, zeros]), leaf(zeros, zeros, table.double())
    assert (found - exact).abs().max() <= unit / 2 * (1 + 1e-6) < (found - exact).abs().max() * 2
    torch.testing.assert_close(found / unit, (found / unit).round(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["vit", "maps"])
def test_without_sites_only_weights_are_quantized(kind: str) -> None:
    model = float_model(kind) if kind == "vit" else MAPS
    simulation = Simulation(model, Calibration(Recipe(name="a", weight_bits=4), "logits", 1, {}))
    for node in simulation.graph.nodes:
        if node.name in simulation.weights and not isinstance(node.leaf, layers.Patches):
            assert simulation.input_scales(node) is None
            weight, _ = simulation.weights[node.name]
            scale = weight.abs().amax(1, keepdim=True) / 7
            torch.testing.assert_close(weight / scale, (weight / scale).round(), rtol=0, atol=1e-4)
            assert float(weight.abs().max()) == pytest.approx(float(node.leaf.weight.detach().abs().max()))  # type: ignore[union-attr, operator]


def test_input_scales_are_found_through_data_movement() -> None:
    model = float_model("swin")
    simulation = Simulation(model, calibration_of(model, "fqvit", count=2))
    scales = simulation.input_scales(simulation.graph.node("layers.0.blocks.1.attn.qkv"))
    scale = simulation.sites["layers.0.blocks.1.norm1"].scale
    assert scales is not None and scales.tolist() == scale.tolist() and len(set(scale)) > 1


class Merge(nn.Module):
    """Concatenate rows, then apply a linear layer without a norm in between: [N, 2, 2, 3] -> [N, 2, 5]"""

    def __init__(self) -> None:
        super().__init__()
        self.take, self.last = layers.Take(torch.tensor([[0, 1], [2, 3]]), join=True), layers.Linear(6, 5, "logits")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.take(x))  # type: ignore[no-any-return]


class Maps(nn.Module):
    """The leaves of a detector's mask head: [N, h, w, 3] -> [N, 2h, 2w, 2]"""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.one = maps.Conv2d(3, 6, "inner"), maps.Relu()
        self.deconv, self.two = maps.Deconv(6, 5, "inner"), maps.Relu()
        self.last = layers.Linear(5, 2, "logits")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.two(self.deconv(self.one(self.conv(x)))))  # type: ignore[no-any-return]


def head_model(module: nn.Module, side: int) -> FloatModel:
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    return FloatModel("head", module.eval(), float_model("vit").preprocess, None, "random", (side, side, 3))


MAPS = head_model(Maps(), 4)
ROI = QParams(8, np.array([0.01, 0.02, 0.005]), np.array([128, 100, 140]))


def test_input_scales_are_repeated_for_concatenated_rows() -> None:
    simulation = Simulation(head_model(Merge(), 2), Calibration(Recipe(name="a"), "logits", 1, {}, square=ROI))
    scales = simulation.input_scales(simulation.graph.node("last"))
    assert scales is not None and scales.tolist() == [*ROI.scale, *ROI.scale]


@pytest.mark.parametrize("recipe", [Recipe(name="a", weight_bits=3), Recipe(name="b", mult="short")])
def test_convolutions_match_integer_sums_over_codes(recipe: Recipe) -> None:
    """Convolution and transposed convolution, computed position by position from codes."""
    sites = {"one": affine(0.0, 20.0, 8), "two": affine(0.0, 60.0, 8)}
    simulation = Simulation(MAPS, Calibration(recipe, "logits", 1, sites, square=ROI))
    codes = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3)).astype(np.uint8)
    conv, deconv = (simulation.graph.node(name) for name in ("conv", "deconv"))
    assert simulation.input_scales(conv).tolist() == ROI.scale.tolist() * 9  # type: ignore[union-attr]

    def linear(node: str, rows: Tensor) -> Tensor:
        found = simulation.nearest(simulation.graph.node(node))
        units = rows.double() @ torch.from_numpy(found.w.T.astype(np.float64)) + torch.from_numpy(found.bias)
        return units * torch.from_numpy(found.scale)

    padded = F.pad(torch.from_numpy(codes).double() - torch.from_numpy(ROI.zero), (0, 0, 1, 1, 1, 1))
    rows = torch.stack([padded[:, i : i + 4, j : j + 4] for i in range(3) for j in range(3)], -2).flatten(-2)
    first = linear("conv", rows)
    x = ROI.decode(torch.from_numpy(codes).float())
    torch.testing.assert_close(simulation.call(conv, [x]).double(), first, rtol=1e-4, atol=1e-4)
    one = sites["one"].encode(F.relu(first))
    four = linear("deconv", one).view(2, 4, 4, 2, 2, 5)
    second = torch.stack([four[:, i // 2, j // 2, i % 2, j % 2] for i in range(8) for j in range(8)], 1).view(2, 8, 8, 5)
    got = simulation.call(deconv, [sites["one"].decode(one).float()])
    torch.testing.assert_close(got.double(), second, rtol=1e-4, atol=1e-4)
    two = sites["two"].encode(F.relu(second))
    torch.testing.assert_close(simulation.run(codes).double(), linear("last", two), rtol=1e-2, atol=0.5)


def test_weights_of_the_calibration_replace_rounded_ones() -> None:
    model = float_model("vit")
    w, scale = np.arange(5 * 24).reshape(5, 24).astype(np.int8), np.full(5, 0.5)
    found = QuantizedLinear(w, scale, np.arange(5))
    simulation = Simulation(model, dataclasses.replace(calibration_of(model), weights={"head": found}))
    weight, bias = simulation.weights["head"]
    np.testing.assert_allclose(weight.numpy(), w * 0.5 / simulation.sites["norm"].channel_scales(24), rtol=1e-6)
    assert bias.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("exp", EXP_TABLES)
def test_table_softmax_reads_the_whole_table_for_long_rows(exp: str) -> None:
    """Rows of 2,048 contain codes 0 and 255, and their table has fewer than 20 bits per entry."""
    for limit in (0.5, 6.0):
        q = affine(-limit, limit, 8)
        codes = torch.arange(4096).reshape(1, 1, 2, 2048).float() % 256
        found = table_softmax(layers.Softmax(None), q.decode(codes), q, exp)
        table = EXP_TABLES[exp](float(q.scale[0]), 256, 2048).astype(np.float64)
        entries = table[np.minimum(255 - codes.long().numpy(), len(table) - 1)]
        np.testing.assert_allclose(found.numpy(), entries / entries.sum(-1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("exp", EXP_TABLES)
@pytest.mark.parametrize("masked", [False, True])
def test_table_softmax_looks_up_the_distance_to_the_largest_code(exp: str, masked: bool) -> None:
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
def test_the_simulation_uses_the_exponential_of_the_recipe(exp: str) -> None:
    """The exact table is simulated by the float softmax."""
    model = float_model("vit")
    simulation = Simulation(model, calibration_of(model, msgspec.structs.replace(RECIPES["fq-vit"], exp=exp)))
    node = simulation.graph.node("blocks.0.attn.softmax")
    q = simulation.sites["blocks.0.attn.scores"]
    scores = q.decode(torch.randint(0, 256, (1, 2, 3, 7), generator=torch.Generator().manual_seed(0)).float())
    assert isinstance(node.leaf, layers.Softmax)
    expected = scores.softmax(-1) if exp == "table" else table_softmax(node.leaf, scores, q, exp)
    torch.testing.assert_close(simulation.call(node, [scores]), expected)


def test_simulation_does_not_modify_the_model() -> None:
    model = float_model("vit")
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    Simulation(model, calibration_of(model)).run(images_for(model.preprocess, 2))
    assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())
