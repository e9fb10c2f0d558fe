"""Recipes that keep LayerNorm and Softmax in float: their sites, their outputs, and that they cannot be lowered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fqvit.errors import FqvitError
from fqvit.lowering.lower import lower, recorded
from fqvit.models import embedded, layers
from fqvit.models.graph import IMAGES, Node, run_float, trace
from fqvit.models.load import FloatModel, load_model
from fqvit.models.pixels import normalise
from fqvit.quant.calibrate import calibrate
from fqvit.quant.calibration import Calibration
from fqvit.quant.fit import check_fit
from fqvit.quant.methods import hessian, similarity
from fqvit.quant.plan import plan
from fqvit.quant.recipe import RECIPES, Recipe, with_bits
from fqvit.quant.simulate import Simulation
from tests.cli.command_line import assert_rejected, fqvit
from tests.factories import MODELS, calibration_of, float_model, images_for
from tests.factories import one_thread as one_thread

FLOATING = ("partial", "bit-split", "ptq-vit", "ptq4vit", "repq-vit")
SIMULATED_CODES = ("ptq4vit", "repq-vit")  # their codes and weights cannot occur in an integer program
PRODUCTS = (layers.Linear, layers.Scores, layers.BiasedScores, layers.Context)


@pytest.fixture(autouse=True)
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the searches of ptq-vit and ptq4vit: no test here depends on their quality."""
    monkeypatch.setattr(similarity, "FACTORS", np.linspace(0.5, 1.2, 15))
    monkeypatch.setattr(similarity, "IMAGES", 8)
    monkeypatch.setattr(hessian, "FACTORS", np.linspace(0.3, 1.2, 10))
    monkeypatch.setattr(hessian, "START", 8)
    monkeypatch.setattr(hessian, "IMAGES", 8)


def minmax(x: Tensor, seen: Tensor, bits: int = 8) -> tuple[Tensor, float]:
    """Return x quantized and dequantized with affine codes for the range of `seen`, extended to include 0; and the scale."""
    low, high = min(float(seen.min()), 0.0), max(float(seen.max()), 0.0)
    scale = (high - low) / (2**bits - 1) or 1.0
    zero = round(-low / scale)
    return (torch.floor(x / scale + 0.5) + zero).clamp(0, 2**bits - 1).sub(zero) * scale, scale


def directly(model: FloatModel, images: np.ndarray, patches: Callable[[Node, list[Tensor]], Tensor]) -> Tensor:  # type: ignore[type-arg]
    """Compute the outputs of recipe `partial` by its definition.

    Each operand of a matrix product is quantized just before the product, with its range in the float model; biases are rounded
    to accumulator units; everything else is float. patches(node, inputs): computes the patch embedding.
    """
    graph = trace(model.module)
    exact: dict[str, Tensor] = {IMAGES: normalise(images, model.preprocess)}
    found = dict(exact)
    for node in graph.nodes:
        exact[node.name] = node.leaf(*(exact[name] for name in node.inputs), *node.params)
        inputs = [found[name] for name in node.inputs]
        leaf = node.leaf
        if isinstance(leaf, PRODUCTS):
            inputs, scales = zip(*(minmax(x, exact[name]) for x, name in zip(inputs, node.inputs, strict=True)), strict=True)
        if isinstance(leaf, layers.Linear):
            scale = leaf.weight.double().abs().amax(1) / 127
            weight = torch.floor(leaf.weight.double() / scale[:, None] + 0.5) * scale[:, None]
            bias = torch.zeros_like(scale) if leaf.bias is None else leaf.bias.double()
            bias = torch.floor(bias / (scale * scales[0]) + 0.5) * scale * scales[0]
            found[node.name] = F.linear(inputs[0], weight.float(), bias.float())
        elif isinstance(leaf, layers.Patches):
            found[node.name] = patches(node, inputs)
        else:
            found[node.name] = leaf(*inputs, *node.params)
    return found[graph.output]


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_partial_quantizes_operands_of_products_by_minmax_and_nothing_else(kind: str) -> None:
    model = float_model(kind)
    images = images_for(model.preprocess, 12, 7)
    exact = run_float(trace(model.module), normalise(images, model.preprocess))
    simulation = Simulation(model, calibration_of(model, "partial"))
    ours, expected = simulation.run(images), directly(model, images, simulation.call)
    wrong, quantization = (ours - expected).square().mean().sqrt(), (expected - exact).square().mean().sqrt()
    # Not exactly equal: a value halfway between two codes may be rounded to either.
    assert wrong < 0.2 * quantization and quantization < 0.1 * exact.std()


@pytest.mark.parametrize("recipe", FLOATING)
@pytest.mark.parametrize(
    ("kind", "roles"),
    [
        ("vit", {"norm", "qkv", "attention", "context", "gelu"}),
        ("distilled", {"norm", "qkv", "attention", "context", "gelu"}),
        ("no class token", {"norm", "qkv", "attention", "context", "gelu", "pooled"}),
        ("padded swin", {"norm", "qkv", "attention", "context", "gelu", "pooled"}),
    ],
)
def test_only_inputs_of_matrix_products_are_quantized(recipe: str, kind: str, roles: set[str]) -> None:
    graph = trace(float_model(kind).module)
    sites = plan(graph, RECIPES[recipe])
    assert {site.role for site in sites.values()} == roles
    operands = {name for node in graph.nodes if isinstance(node.leaf, PRODUCTS) for name in node.inputs}
    assert all(name in sites or graph.node(name).leaf.role == "route" for name in operands)
    # In the other models the head reads the mean over tokens of the last norm, and the norm itself stays float.
    assert ("norm" in sites) == (kind in ("vit", "distilled"))


def test_everything_between_matrix_products_is_float() -> None:
    """Before the first norm only the weights of the patch embedding are quantized."""
    model = float_model("vit")
    simulation = Simulation(model, calibration_of(model, "partial"))
    seen: dict[str, Tensor] = {}

    def visit(node: Node, y: Tensor) -> Tensor:
        seen[node.name] = simulation.visit(node, y)
        return seen[node.name]

    simulation.graph.run(normalise(images_for(model.preprocess, 4), model.preprocess), visit, simulation.call)
    embed = simulation.graph.node("embed")
    torch.testing.assert_close(seen["embed"], embed.leaf(seen["patch_embed.proj"], *embed.params), rtol=0, atol=0)
    assert len(torch.unique(seen["blocks.0.norm1"])) <= 256 < len(torch.unique(seen["blocks.0.add1"]))
    assert len(torch.unique(seen["blocks.0.attn.scores"])) > 256


@pytest.mark.parametrize("recipe", FLOATING)
@pytest.mark.parametrize("features", ["tokens", "pooled"])
@pytest.mark.parametrize("kind", ["distilled", "swin"])
def test_features_stay_float(recipe: str, features: str, kind: str) -> None:
    model = float_model(kind)
    calibration = calibration_of(model, recipe, features=features)
    images = images_for(model.preprocess, 5)
    exact = run_float(trace(model.module, features), normalise(images, model.preprocess))  # type: ignore[arg-type]
    ours = Simulation(model, calibration).run(images)
    assert ours.shape == exact.shape and trace(model.module, features).output not in calibration.sites  # type: ignore[arg-type]
    assert (ours - exact).square().mean() < 0.05 * exact.var()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FLOATING)
@pytest.mark.parametrize("name", embedded.MODELS)
def test_embedded_models_stay_close_to_float_at_8_bits(recipe: str, name: str) -> None:
    model = load_model(name)
    images, labels = embedded.test_images()
    images, labels = images[::5], labels[::5]
    calibration = calibrate(model, [embedded.calibration_images()[:48]], RECIPES[recipe])
    if recipe not in SIMULATED_CODES:
        check_fit(trace(model.module), calibration, model.preprocess, model.name)
    exact = run_float(trace(model.module), normalise(images, model.preprocess)).argmax(1).numpy()
    found = Simulation(model, calibration).run(images).argmax(1).numpy()
    assert np.mean(found == exact) > 0.97 and abs(np.mean(found == labels) - np.mean(exact == labels)) < 0.02


@pytest.mark.parametrize("recipe", FLOATING)
def test_sites_and_weights_have_the_bits_of_the_recipe(recipe: str) -> None:
    model = float_model("swin")
    calibration = calibration_of(model, with_bits(RECIPES[recipe], "3/6/4"))
    if recipe not in SIMULATED_CODES:
        check_fit(trace(model.module), calibration, model.preprocess, model.name)
    bits = {name: q.width for name, q in calibration.sites.items()}
    assert set(bits.values()) == {6, 4} and all((n == 4) == name.endswith("softmax") for name, n in bits.items())
    if recipe == "repq-vit":  # its weights contain the scales of their inputs and have zero points
        assert all((np.ptp(found.w.astype(int), 1) <= 7).all() for found in calibration.weights.values())
        return
    simulation = Simulation(model, calibration)
    for weight, _ in simulation.weights.values():
        assert max(len(torch.unique(row)) for row in weight.flatten(1)) <= 7 * model.preprocess.channels


@pytest.mark.parametrize("recipe", FLOATING)
def test_lowering_rejects_recipes_without_an_integer_program(recipe: str, tmp_path: Path) -> None:
    model = float_model("vit")
    calibration = calibration_of(model, recipe, count=2)
    assert not calibration.recipe.integer
    with pytest.raises(FqvitError, match=f"recipe {recipe}: LayerNorm and Softmax stay float.* `fqvit table` measures it"):
        lower(model, calibration)
    out = tmp_path / "x.fqvit"
    # The recipe is rejected before any file is read: the folder does not exist.
    words = ("quantize", "deit_tiny", "--recipe", recipe, "--calib", tmp_path / "none", "-o", out)
    assert_rejected(fqvit(*words), f"recipe {recipe}", "no integer program", "fqvit table")
    saved = tmp_path / "saved.json"
    saved.write_text(calibration.to_json(), encoding="utf-8")
    assert_rejected(
        fqvit("quantize", "fmnist_vit", "--calibration", saved, "-o", out), f"recipe {recipe}", "no integer program"
    )
    assert not out.exists()


@pytest.mark.parametrize("recipe", FLOATING)
def test_json_round_trip_keeps_the_weights(recipe: str) -> None:
    model = float_model("padded swin")
    images = images_for(model.preprocess, 4)
    before = calibration_of(model, with_bits(RECIPES[recipe], "4/8/8"))
    after = Calibration.from_json(before.to_json())
    assert after.recipe == before.recipe and after.to_json() == before.to_json() and set(after.weights) == set(before.weights)
    assert torch.equal(Simulation(model, after).run(images), Simulation(model, before).run(images))


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.integer])
def test_integer_recipes_do_not_record_newer_fields_at_their_defaults(name: str) -> None:
    """Recording them would change the fingerprints of existing programs."""
    new = {"nonlinear", "intervals"}
    assert new.isdisjoint(recorded(RECIPES[name])) and new.isdisjoint(msgspec.to_builtins(RECIPES[name]))


@pytest.mark.parametrize(
    "fields",
    [
        {"rounding": "bit-split"},
        {"nonlinear": "float", "rounding": "bit-split", "weight_group": 16},
        {"nonlinear": "float", "max_loss": 1.0},
        {"intervals": "similarity", "attention": "uniform", "symmetric": True},
        {"nonlinear": "float", "intervals": "similarity", "attention": "uniform"},
        {"nonlinear": "float", "intervals": "similarity", "symmetric": True},
        {"nonlinear": "float", "intervals": "similarity", "attention": "uniform", "symmetric": True, "channels": True},
        {"nonlinear": "float", "intervals": "hessian", "attention": "uniform", "symmetric": True},
        {"nonlinear": "float", "intervals": "hessian", "attention": "log2"},
        {"intervals": "reparameterized", "attention": "uniform"},
    ],
)
def test_incompatible_fields_are_rejected(fields: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": "mine", **fields}, Recipe)


def test_recipe_fq_vit_original_can_keep_softmax_in_float() -> None:
    """Its log2 codes are then computed from float softmax: the scores have no codes."""
    model = float_model("vit")
    recipe = msgspec.structs.replace(RECIPES["fq-vit-original"], nonlinear="float")
    calibration = calibration_of(model, recipe)
    assert calibration.sites["blocks.0.attn.softmax"].log2
    assert torch.isfinite(Simulation(model, calibration).run(images_for(model.preprocess, 2))).all()
