"""Tests of small whole networks: numpy and torch, batch sizes, features, and the float simulation site by site."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from fqvit.errors import FqvitError
from fqvit.ir.program import Program
from fqvit.lowering.emit import LoweredValue
from fqvit.lowering.lower import lower, lower_with_values
from fqvit.models.graph import IMAGES, run_float, trace
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.quant.calibration import Calibration
from fqvit.quant.recipe import RECIPES as ALL
from fqvit.quant.recipe import load_recipe, with_bits
from fqvit.quant.simulate import Simulation
from fqvit.runtime.reference import Reference, run
from tests.factories import GROUPED, MODELS, assert_same, buffers_of, calibration_of, float_model, images_for

NAMED = {
    "grouped": GROUPED,
    "fqvit 8/8/8": with_bits(load_recipe("fqvit"), "8/8/8"),
    "fqvit 6/6/4": with_bits(load_recipe("fqvit"), "6/6/4"),
    # With a maximum loss of 0, auto raises the bits of every site that it can.
    "auto": msgspec.structs.replace(load_recipe("auto"), max_loss=0.0),
}
RECIPES = ("fq-vit", "fq-vit-8", "fq-vit-original", "minmax", "fqvit", "w4", *NAMED)


@cache
def lowered(
    kind: str, recipe: str, features: Any = "logits"
) -> tuple[FloatModel, Calibration, Program, dict[str, LoweredValue]]:
    model = float_model(kind)
    calibration = calibration_of(model, NAMED.get(recipe, recipe), features=features)
    return model, calibration, *lower_with_values(model, calibration)


every_model = pytest.mark.parametrize("kind", MODELS)
# All models with the recipes fq-vit and fqvit; one ViT and one Swin with all recipes.
every_pair = pytest.mark.parametrize(
    "kind, recipe",
    [
        (kind, recipe)
        for kind in MODELS
        for recipe in RECIPES
        if recipe in ("fq-vit", "fqvit") or kind in ("vit", "padded swin")
    ],
)


@every_pair
def test_numpy_and_torch_give_the_same_bits_in_every_buffer(kind: str, recipe: str) -> None:
    model, _, program, _ = lowered(kind, recipe)
    images = images_for(model.preprocess, 4, 1)
    assert_same(buffers_of(program, images, "torch"), buffers_of(program, images), f"{kind}, {recipe}: torch and numpy,")


@every_pair
def test_an_image_gives_the_same_bits_alone_and_in_a_batch(kind: str, recipe: str) -> None:
    model, _, program, _ = lowered(kind, recipe)
    images = images_for(model.preprocess, 3, 2)
    together = buffers_of(program, images)
    for i in range(3):
        alone = buffers_of(program, images[i : i + 1])
        assert_same({name: x[0] for name, x in alone.items()}, {name: x[i] for name, x in together.items()}, f"image {i},")


@every_pair
def test_buffers_have_the_dtypes_shapes_and_bounds_that_verify_infers(kind: str, recipe: str) -> None:
    model, _, program, _ = lowered(kind, recipe)
    known = program.verify().buffers
    for name, x in buffers_of(program, images_for(model.preprocess, 4, 3)).items():
        value = known[name]
        assert x.shape[1:] == value.shape and x.dtype == np.dtype(value.dtype.replace("u", "uint").replace("i3", "int3"))
        assert value.lo <= x.min() and x.max() <= value.hi, name


def decoded(value: LoweredValue, codes: np.ndarray[Any, Any]) -> Tensor:
    x = torch.from_numpy(codes.astype(np.float64))
    if value.q is None:
        return x * torch.from_numpy(value.unit)
    if len(value.q.scale) > x.shape[-1]:  # V split into heads, [..., H, T, D], with one scale for each of the H * D channels
        return value.q.decode(x.transpose(-2, -3).flatten(-2)).unflatten(-1, (x.shape[-3], -1)).transpose(-2, -3)
    return value.q.decode(x)


@every_pair
def test_simulation_gives_the_same_codes_as_the_program_at_every_site(kind: str, recipe: str) -> None:
    model, calibration, program, values = lowered(kind, recipe)
    images = images_for(model.preprocess, 14, 5)[:12]  # without the black and the white image, whose tokens are all equal
    buffers = buffers_of(program, images)
    simulation = Simulation(model, calibration)

    def value(name: str) -> Tensor:
        """Decode the program's buffer of a site. Moves are recomputed in float, since a head has only some of V's channels."""
        if name == IMAGES:
            return normalise(images, model.preprocess)
        node = simulation.graph.node(name)
        if node.leaf.role == "route":
            return node.leaf(*map(value, node.inputs))  # type: ignore[no-any-return]
        return decoded(values[name], buffers[values[name].buffer]).float()

    faults = []
    for node in simulation.graph.nodes:
        q = simulation.sites.get(node.name)
        if q is None:
            continue
        with torch.no_grad():
            codes = q.encode(simulation.call(node, [value(name) for name in node.inputs])).numpy()
        found = buffers[values[node.name].buffer]
        if node.leaf.role == "logits":  # logits are in units of the site's scale, without its zero point and clamp
            found = (found + q.zero).clip(0, q.last)
        wrong = codes != found
        # One code of a small site may differ, and float32 rounds some ties of 16-bit codes differently.
        if wrong.sum() > max(1, 0.001 * max(1, 2 ** (q.bits - 13)) * wrong.size):
            faults.append(f"{node.name}: {wrong.sum()} of {wrong.size} codes differ")
        assert np.abs(codes - found).max() <= 1, node.name
    assert not faults, f"{kind}, {recipe}: " + "; ".join(faults)


@pytest.mark.parametrize("bits", ["8/8/8", "4/8/4", "8/6/3"])
@pytest.mark.parametrize("recipe", [name for name, found in ALL.items() if found.integer])
@pytest.mark.parametrize("kind", ["vit", "padded swin"])
def test_every_integer_recipe_runs_at_other_bit_widths(kind: str, recipe: str, bits: str) -> None:
    model = float_model(kind)
    program = lower(model, calibration_of(model, with_bits(ALL[recipe], bits), count=4))
    logits = run(program, images_for(model.preprocess, 2))
    assert logits.dtype == np.int32 and len(np.unique(logits)) > 2


@pytest.mark.parametrize("recipe", ["fqvit", "w4"])
@pytest.mark.parametrize("features", ["tokens", "pooled"])
@every_model
def test_features_are_close_to_those_of_the_float_model(kind: str, features: Any, recipe: str) -> None:
    model, _, program, _ = lowered(kind, recipe, features)
    images = images_for(model.preprocess, 8, 8)
    output = program.header.output
    real = (run(program, images).astype(np.float64) - output.zero) * output.scale
    exact = run_float(trace(model.module, features), normalise(images, model.preprocess)).numpy()
    assert real.shape == exact.shape and np.corrcoef(real.ravel(), exact.ravel())[0, 1] > (0.97 if recipe == "fqvit" else 0.9)


@every_model
def test_the_simulated_network_stays_close_to_the_program(kind: str) -> None:
    model, calibration, program, _ = lowered(kind, "fq-vit-8")
    images = images_for(model.preprocess, 16, 6)
    integer = run(program, images) * program.header.output.scale
    simulated = Simulation(model, calibration).run(images).numpy()
    spread = simulated.std()
    assert np.abs(integer - simulated).mean() < 0.1 * spread


@every_model
def test_logits_are_close_to_those_of_the_float_model(kind: str) -> None:
    model, _, program, _ = lowered(kind, "fq-vit-8")
    images = images_for(model.preprocess, 16, 7)
    integer = run(program, images) * program.header.output.scale
    exact = run_float(trace(model.module), normalise(images, model.preprocess)).numpy()
    assert np.corrcoef(integer.ravel(), exact.ravel())[0, 1] > 0.98
    assert run(program, images).dtype == np.int32


@pytest.mark.parametrize("features", ["tokens", "pooled"])
@every_model
def test_features_are_codes_with_a_scale(kind: str, features: Any) -> None:
    model, _, program, _ = lowered(kind, "fq-vit-8", features)
    images = images_for(model.preprocess, 4, 8)
    output = program.header.output
    codes = run(program, images)
    assert output.kind == features and codes.dtype == np.uint8 and program.classes is None
    exact = run_float(trace(model.module, features), normalise(images, model.preprocess)).numpy()
    assert codes.shape == exact.shape
    if program.header.sites.get(output.buffer) and program.header.sites[output.buffer].alpha is None:
        real = (codes.astype(np.float64) - output.zero) * output.scale
        assert np.corrcoef(real.ravel(), exact.ravel())[0, 1] > 0.97


@pytest.mark.parametrize("features", ["tokens", "pooled"])
@every_model
def test_the_output_names_the_alpha_of_its_channels(kind: str, features: Any) -> None:
    _, _, program, values = lowered(kind, "fq-vit", features)
    output = program.header.output
    alpha = next(w for w in values.values() if w.buffer == output.buffer).codes().alpha
    if alpha is not None and alpha.any():
        assert_same(program.constants[output.alpha], alpha, "alpha of the output")  # type: ignore[attr-defined]


def test_the_padded_swin_uses_padding_and_masks() -> None:
    _, _, program, _ = lowered("padded swin", "fq-vit")
    rows = [array for name, array in program.constants.items() if name.startswith("rows.")]
    assert any((array == -1).any() for array in rows) and any(name.startswith("region.") for name in program.constants)


@pytest.mark.parametrize(
    "images, found",
    [
        (np.zeros((1, 12, 12, 3), np.float32), "float32"),
        (np.zeros((12, 12, 3), np.uint8), r"\[12, 12, 3\]"),
        (np.zeros((1, 3, 12, 12), np.uint8), r"\[1, 3, 12, 12\]"),
    ],
)
def test_images_of_the_wrong_dtype_or_shape_are_rejected(images: Any, found: str) -> None:
    with pytest.raises(FqvitError, match=found + r".*expected uint8 \[N, 12, 12, 3\]"):
        run(lowered("vit", "fq-vit")[2], images)


@every_model
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_an_empty_batch_gives_empty_logits(kind: str, library: Any) -> None:
    model, _, program, _ = lowered(kind, "fq-vit")
    empty = images_for(model.preprocess, 1)[:0]
    assert run(program, empty, library).shape == (0, *run(program, images_for(model.preprocess, 1)).shape[1:])


def test_running_does_not_change_the_images_or_the_program() -> None:
    model, _, program, _ = lowered("swin", "fq-vit")
    images = images_for(model.preprocess, 2)
    before, fingerprint = images.copy(), program.fingerprint()
    reference = Reference(program)
    assert_same(reference.run(images), reference.run(images), "second run")
    assert_same(images, before, "images")
    assert program.fingerprint() == fingerprint


def test_lowering_does_not_change_the_float_model() -> None:
    model = float_model("vit")
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    lower(model, calibration_of(model))
    assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())
