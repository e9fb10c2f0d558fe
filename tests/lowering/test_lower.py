"""Tests of lowering with unusual input: few bits, extreme Power-of-Two Factors, dead channels, huge weights.

Each case gives a verified program or a one-line error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch

from fqvit.errors import FqvitError
from fqvit.ir.ops import LayerNorm, Linear
from fqvit.lowering.lower import lower
from fqvit.models.graph import run_float, trace
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.models.vit import ViT
from fqvit.quant.calibrate import calibrate
from fqvit.quant.recipe import RECIPES, Recipe, SiteRule, with_bits
from fqvit.quant.simulate import Simulation
from fqvit.runtime.reference import run
from tests.factories import MODELS, assert_same, calibration_of, float_model, images_for


def agreement(model: FloatModel, recipe: Recipe) -> float:
    """Return the correlation of integer and simulated logits on held-out images; check that numpy and torch agree."""
    calibration = calibrate(model, [images_for(model.preprocess, 12, 7)], recipe)
    program = lower(model, calibration)
    images = images_for(model.preprocess, 8, 3)
    logits = run(program, images)
    assert_same(run(program, images, "torch"), logits, "torch and numpy")
    simulated = Simulation(model, calibration).run(images).numpy()
    if np.ptp(logits) == 0 or np.ptp(simulated) == 0:
        return float(np.ptp(logits) * program.header.output.scale < 1e-3 + 0.1 * np.ptp(simulated))
    return float(np.corrcoef(logits.ravel(), simulated.ravel())[0, 1])


@pytest.mark.parametrize("kind", ["vit", "padded swin"])
@pytest.mark.parametrize(
    "recipe, bits",
    [
        *(("fq-vit", bits) for bits in ("8/8/2", "8/8/3", "4/8/4", "8/6/4", "6/6/8", "2/8/8", "8/2/2")),
        ("fq-vit-original", "4/6/2"),
        ("minmax", "7/7/4"),
    ],
)
def test_programs_of_every_bit_width_agree_with_their_simulation(kind: str, bits: str, recipe: str) -> None:
    model = float_model(kind)
    # A value between two codes may round either way, and with few bits one code is a large part of the range.
    threshold = 0.6 if "2/2" in bits else 0.95
    assert agreement(model, with_bits(RECIPES[recipe], bits)) > threshold


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("recipe", ["ema", "percentile", "omse"])
def test_models_can_be_lowered_with_every_observer(kind: str, recipe: str) -> None:
    assert agreement(float_model(kind), RECIPES[recipe]) > 0.98


@pytest.mark.parametrize("k", [0, 1, 8])
@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_models_can_be_lowered_with_small_and_large_power_of_two_factors(kind: str, k: int) -> None:
    assert agreement(float_model(kind), msgspec.structs.replace(RECIPES["fq-vit-8"], k=k)) > 0.95


def test_site_rules_of_a_recipe_reach_the_program() -> None:
    model = float_model("vit")
    rules = {"blocks.1.mlp.fc1": SiteRule(bits=4), "attention": SiteRule(bits=3), "blocks.0.norm1": SiteRule(range=(-9.0, 9.0))}
    calibration = calibrate(model, [images_for(model.preprocess, 6)], msgspec.structs.replace(RECIPES["fq-vit"], sites=rules))
    program = lower(model, calibration)
    ops = {op.y: op for op in program.ops}
    assert ops["blocks.1.mlp.fc1"].bits == 4 and ops["blocks.0.mlp.fc1"].bits == 8  # type: ignore[union-attr]
    assert ops["blocks.0.attn.softmax"].bits == 3  # type: ignore[union-attr]
    assert program.header.sites["blocks.0.norm1"].scale == (float(f"{18 / 255:.9g}"),)
    assert program.constants["blocks.1.mlp.act.table"].shape == (16,)


def zero_everything(module: ViT) -> None:
    for p in module.parameters():
        p.zero_()


def dead_channels(module: ViT) -> None:
    module.blocks[0].mlp.fc1.weight[3] = 0  # type: ignore[index, union-attr, operator]
    module.blocks[0].attn.qkv.weight[::5] = 1e-30  # type: ignore[index, union-attr, operator]
    module.blocks[1].norm2.weight[2:7] = 0  # type: ignore[index, union-attr, operator]
    module.head.weight[1] = 0
    module.head.bias[1] = 3


def large_biases(module: ViT) -> None:
    module.blocks[0].mlp.fc1.bias += 50  # type: ignore[union-attr, operator]
    module.blocks[0].norm1.bias += 30  # type: ignore[union-attr, operator]
    module.head.bias += 1000


def tiny_values(module: ViT) -> None:
    module.blocks[0].norm1.weight *= 1e-6  # type: ignore[union-attr, operator]
    module.blocks[0].attn.proj.weight *= 1e-8  # type: ignore[union-attr, operator]
    module.pos_embed *= 0
    module.cls_token *= 0


def outlier_channel(module: ViT) -> None:
    module.patch_embed.proj.weight[5] *= 200
    module.patch_embed.proj.bias[5] += 100


def one_huge_logit(module: ViT) -> None:
    module.head.weight[2] *= 1e7


STRANGE: dict[str, Callable[[ViT], None]] = {
    f.__name__: f for f in (zero_everything, dead_channels, large_biases, tiny_values, outlier_channel, one_huge_logit)
}


@pytest.mark.parametrize("recipe", ["fq-vit", "fq-vit-original", "minmax"])
@pytest.mark.parametrize("change", STRANGE)
def test_programs_with_strange_weights_agree_with_their_simulation(change: str, recipe: str) -> None:
    model = float_model("vit")
    assert isinstance(model.module, ViT)
    with torch.no_grad():
        STRANGE[change](model.module)
    assert agreement(model, RECIPES[recipe]) > 0.9


@pytest.mark.parametrize("factor", [1e9, 1e15, 1e25])
def test_models_with_huge_weights_are_lowered_or_rejected_with_a_one_line_error(factor: float) -> None:
    for name in ("blocks.0.mlp.fc2.weight", "blocks.0.norm1.weight", "patch_embed.proj.weight", "blocks.0.attn.qkv.bias"):
        model = float_model("vit")
        with torch.no_grad():
            dict(model.module.named_parameters())[name].mul_(factor)
        try:
            program = lower(model, calibration_of(model))
        except FqvitError as error:
            assert "\n" not in str(error)
        else:
            run(program, images_for(model.preprocess, 2))


@pytest.mark.parametrize("kind", MODELS)
def test_one_black_image_is_enough_to_calibrate(kind: str) -> None:
    model = float_model(kind)
    black = np.zeros((1, model.preprocess.height, model.preprocess.width, model.preprocess.channels), np.uint8)
    for recipe in ("fq-vit", "minmax"):
        program = lower(model, calibrate(model, [black], RECIPES[recipe]))
        run(program, images_for(model.preprocess, 4))


def test_branches_stay_in_the_accumulator_unless_the_recipe_asks_for_codes() -> None:
    model = float_model("vit")
    outs = {}
    for recipe in ("fq-vit", "fq-vit-original"):
        program = lower(model, calibration_of(model, recipe))
        outs[recipe] = {op.y: op.out for op in program.ops if isinstance(op, Linear)}
    assert (
        outs["fq-vit"]["blocks.0.attn.proj"]
        == outs["fq-vit"]["blocks.1.mlp.fc2"]
        == outs["fq-vit"]["patch_embed.proj"]
        == "acc"
    )
    assert outs["fq-vit-original"]["blocks.0.attn.proj"] == "codes" and outs["fq-vit-original"]["head"] == "i32"


def test_logits_quantized_to_codes_have_the_scale_of_their_site() -> None:
    model = float_model("vit")
    images = images_for(model.preprocess, 16)
    fine, coarse = (
        lower(model, calibrate(model, [images], msgspec.structs.replace(RECIPES["fq-vit"], logits=logits)))
        for logits in ("accumulator", "codes")
    )
    a, b = (run(program, images) * program.header.output.scale for program in (fine, coarse))
    scale = coarse.header.output.scale
    with torch.no_grad():
        exact = run_float(trace(model.module), normalise(images, model.preprocess))
    assert scale == pytest.approx((max(float(exact.max()), 0) - min(float(exact.min()), 0)) / 255, rel=1e-6)
    assert np.abs(a - b).max() <= scale / 2 + 2 * fine.header.output.scale
    assert run(coarse, images).dtype == np.int32 and "head" not in coarse.header.sites


@pytest.mark.parametrize("bits", [26, 28, 29, 31])
def test_attention_times_v_with_a_much_too_fine_scale_is_lowered_or_rejected(bits: int) -> None:
    model = float_model("vit")
    calibration = calibration_of(model, "fqvit")
    name = "blocks.0.attn.context"
    v, q = calibration.sites["blocks.0.attn.qkv"].group(2), calibration.sites[name]
    # The ratio of V's scale to the scale of this site, divided by the largest level, is 2^bits.
    calibration.sites[name] = dataclasses.replace(q, scale=v.scale / 2.0 ** (bits + 15))
    if bits < 28:
        lower(model, calibration)
        return
    with pytest.raises(FqvitError, match=f"^{name}: the ratio of its scales is .* no multiplier can represent"):
        lower(model, calibration)


def test_epsilon_of_layernorm_is_in_units_of_its_input() -> None:
    model = float_model("vit")
    calibration = calibration_of(model)
    program = lower(model, calibration)
    for op in program.ops:
        if isinstance(op, LayerNorm):
            scale = float(calibration.sites[op.x].scale[0])
            channels = program.verify().buffers[op.x].channels
            assert op.epsilon == max(1, round(1e-6 * channels**2 / scale**2))
