"""Quantized weights, biases and position embeddings: scales, groups, and 16-bit multipliers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fqvit.data.preprocess import Preprocess
from fqvit.lowering.emit import Emitter
from fqvit.models import layers, maps
from fqvit.models.graph import trace
from fqvit.models.pixels import normalise
from fqvit.quant.codebooks import Groups
from fqvit.quant.qparams import affine
from fqvit.quant.recipe import Recipe
from fqvit.quant.weights import (
    QuantizedLinear,
    bits_and_group,
    fits_groups,
    pixel_linear,
    pixel_zero,
    quantize_linear,
    quantize_positions,
    short_output_scales,
)
from tests.factories import few, float_model, images_for


@few
@given(st.integers(0, 2**32 - 1), st.integers(2, 8))
def test_weights_are_symmetric_codes_with_one_scale_per_output(seed: int, bits: int) -> None:
    rng = np.random.default_rng(seed)
    weight, bias = rng.normal(size=(5, 9)), rng.normal(size=5)
    scales = rng.uniform(0.01, 2, 9)
    q = quantize_linear(weight, bias, scales, bits)
    largest = 2 ** (bits - 1) - 1
    assert q.w.dtype == np.int8 and np.abs(q.w.astype(int)).max(1).tolist() == [largest] * 5
    np.testing.assert_allclose(q.scale, np.abs(weight * scales).max(1) / largest)
    assert np.abs(q.w * q.scale[:, None] - weight * scales).max() <= q.scale.max() / 2 * (1 + 1e-9)
    assert np.abs(q.bias * q.scale - bias).max() <= q.scale.max() / 2 * (1 + 1e-9)


@few
@given(st.integers(0, 2**32 - 1), st.integers(2, 8))
def test_with_halves_the_largest_weight_maps_to_half_a_code_beyond_the_last(seed: int, bits: int) -> None:
    weight = np.random.default_rng(seed).normal(size=(5, 9))
    q = quantize_linear(weight, None, np.ones(1), bits, halves=True)
    np.testing.assert_allclose(q.scale, np.abs(weight).max(1) / (2 ** (bits - 1) - 0.5))
    assert np.abs(q.w.astype(int)).max(1).tolist() == [2 ** (bits - 1) - 1] * 5
    assert (np.abs(q.w * q.scale[:, None] - weight).max(1) <= q.scale / 2 * (1 + 1e-9)).all()
    groups = [quantize_linear(weight, None, np.ones(1), 4, group=8, halves=halves) for halves in (False, True)]
    assert (groups[0].w == groups[1].w).all() and (groups[0].scale == groups[1].scale).all()


@pytest.mark.parametrize("weight", [0.0, 1e-30, 1e-310, 5e-324])
@pytest.mark.parametrize("bias", [0.0, 1.0, -3e5])
def test_the_bias_of_a_row_of_zero_weights_is_at_most_2_to_the_30(weight: float, bias: float) -> None:
    q = quantize_linear(np.full((1, 4), weight), np.array([bias]), np.ones(1), 8)
    assert np.isfinite(q.scale).all() and (q.scale > 0).all() and abs(int(q.bias[0])) <= 2**30
    assert q.bias[0] * q.scale[0] == pytest.approx(bias, rel=1e-8)


@few
@given(st.integers(0, 2**32 - 1), st.integers(2, 4), st.integers(8, 20), st.integers(1, 50))
def test_weights_with_groups_are_the_nearest_levels(seed: int, bits: int, group: int, inputs: int) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(5, inputs)) * np.exp2(rng.uniform(-8, 0, (5, inputs)))
    bias, scales, importance = rng.normal(size=5), rng.uniform(0.01, 2, inputs), rng.uniform(0.1, 10, inputs)
    q = quantize_linear(weight, bias, scales, bits, group=group, importance=importance)
    assert q.w.dtype == np.int8 and q.groups is not None and fits_groups(q, bits, group)
    np.testing.assert_allclose(q.scale, np.maximum(np.abs(weight * scales).max(1) / 127, np.abs(bias) / 2**30))
    units = weight * scales / q.scale[:, None]
    levels = q.groups.codebooks[q.groups.of_weights(inputs)].astype(float)  # [O, K, L]
    np.testing.assert_allclose(np.abs(q.w - units), np.abs(levels - units[..., None]).min(-1), atol=1e-9)
    assert np.abs(q.bias * q.scale - bias).max() <= q.scale.max() / 2 * (1 + 1e-9)


@pytest.mark.parametrize("weight", [0.0, 1e-30, 5e-324])
def test_the_bias_of_a_row_of_zero_weights_is_at_most_2_to_the_30_with_groups(weight: float) -> None:
    q = quantize_linear(np.full((2, 20), weight), np.array([0.0, -3e5]), np.ones(1), 4, group=8)
    assert np.isfinite(q.scale).all() and np.abs(q.bias).max() <= 2**30 and q.groups is not None
    assert q.bias[1] * q.scale[1] == pytest.approx(-3e5, rel=1e-8) and not q.w[1].any()


def test_groups_reduce_the_error_of_small_weights_next_to_large_ones() -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(64, 64)) * np.repeat([1, 0.25, 0.1, 0.05], 16)
    errors = []
    for group in (0, 16):
        q = quantize_linear(weight, None, np.ones(1), 4, group=group)
        errors.append(np.square(q.w * q.scale[:, None] - weight).sum())
    assert errors[1] < errors[0] / 4
    assert quantize_linear(weight, None, np.ones(1), 4).groups is None


@pytest.mark.parametrize(
    "bits, group, blocks, edges",
    [
        (8, 0, (8, 0), (8, 0)),
        (4, 0, (4, 0), (4, 0)),
        (4, 32, (4, 32), (8, 0)),
        (3, 16, (3, 16), (8, 0)),
        (5, 32, (5, 0), (5, 0)),
    ],
)
def test_groups_need_at_most_4_bits_and_exclude_the_first_and_last_layer(
    bits: int, group: int, blocks: object, edges: object
) -> None:
    recipe = Recipe(name="mine", weight_bits=bits, weight_group=group)
    for kind in ("vit", "swin"):
        nodes = trace(float_model(kind).module).nodes
        for node in (node for node in nodes if isinstance(node.leaf, layers.Linear | layers.Patches)):
            edge = isinstance(node.leaf, layers.Patches) or node.leaf.role == "logits"
            assert bits_and_group(recipe, node) == (edges if edge else blocks), node.name


def test_fits_groups_checks_bits_and_groups() -> None:
    def fits(w: list[list[int]], bits: int, group: int = 0, groups: Groups | None = None) -> bool:
        return fits_groups(QuantizedLinear(np.array(w, np.int8), np.ones(2), np.zeros(2, np.int64), groups), bits, group)

    assert fits([[7, 0, 1], [-7, 3, 2]], 4) and fits([[127, 0], [-127, 1]], 8)
    assert not fits([[8, 0, 1], [0, 0, 0]], 4) and not fits([[0, 0, 1], [0, -8, 0]], 4) and not fits([[9, 0, 0]] * 2, 4)
    groups = Groups(np.array([[0, 1], [1, 1]], np.uint8), np.array([[-5, 0, 3, 7], [-1, 0, 0, 100]], np.int8), 2)
    zeros = [[0, 0, 0]] * 2
    assert fits([[7, -5, 100], [0, -1, 0]], 2, 2, groups) and fits(zeros, 2, 2, groups)
    assert not fits(zeros, 2, 2) and not fits(zeros, 2, 0, groups)
    assert not fits(zeros, 3, 2, groups) and not fits(zeros, 2, 3, groups)
    assert not fits([[7, 100, 0], [0, 0, 0]], 2, 2, groups)  # a level of the other codebook
    assert not fits(zeros, 2, 2, replace(groups, choice=groups.choice + 1))  # a codebook that does not exist
    assert not fits(zeros, 2, 2, replace(groups, choice=groups.choice[:, :1]))


def test_with_groups_a_row_of_zeros_has_the_same_scale_as_the_other_rows() -> None:
    found = quantize_linear(np.array([[0.0] * 8, [1.0] * 8]), None, np.ones(1), 4, group=4)
    assert found.scale[0] == pytest.approx(1 / 127) and not found.w[0].any() and (found.w[1] == 127).all()


def test_a_missing_bias_is_0() -> None:
    assert quantize_linear(np.ones((3, 2)), None, np.ones(1), 8).bias.tolist() == [0, 0, 0]


@pytest.mark.parametrize("bits", [8, 16])
def test_position_embeddings_share_one_scale(bits: int) -> None:
    positions = np.random.default_rng(0).normal(size=(1, 7, 5))
    codes, unit = quantize_positions(positions, bits)
    assert codes.dtype == np.int16
    if bits == 16:
        assert np.abs(codes.astype(int)).max() == 2**15 - 1
    else:  # all 256 codes, minus the zero point
        assert int(codes.max()) - int(codes.min()) == 255 and codes.min() < 0 < codes.max()
    assert np.abs(codes * unit - positions).max() <= unit / 2 * (1 + 1e-9)
    assert quantize_positions(np.zeros((1, 2, 3)), bits)[0].tolist() == [[[0] * 3] * 2]


@pytest.mark.parametrize("channels", [1, 3])
def test_folding_the_normalisation_into_the_patch_embedding_is_exact(channels: int) -> None:
    mean, std = (0.485, 0.456, 0.406)[:channels], (0.229, 0.224, 0.225)[:channels]
    preprocess = Preprocess(8, 8, channels, 8, "bicubic", mean, std)  # type: ignore[arg-type]
    rng = np.random.default_rng(1)
    weight, bias = rng.normal(size=(6, channels, 4, 4)), rng.normal(size=6)
    images = images_for(preprocess, 3)
    flat, offset, zero = pixel_linear(weight, bias, preprocess)
    assert 0 <= zero <= 255
    patches = images.reshape(3, 2, 4, 2, 4, channels).transpose(0, 1, 3, 2, 4, 5).reshape(3, 4, -1).astype(np.float64)
    got = (patches - zero) / 255 @ flat.T + offset
    x = normalise(images, preprocess).double()
    exact = torch.nn.functional.conv2d(x, torch.from_numpy(weight), torch.from_numpy(bias), 4).flatten(2).transpose(1, 2)
    np.testing.assert_allclose(got, exact.numpy(), atol=1e-5)


@few
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 8]))
def test_scales_are_rounded_so_that_16_bit_multipliers_are_exact(seed: int, group: int) -> None:
    rng = np.random.default_rng(seed)
    weight, scales = rng.normal(size=(6, 12)), rng.uniform(0.01, 2, 12)
    outputs = np.exp2(rng.uniform(-12, 2, 6))
    q = quantize_linear(weight, None, scales, 4, group=group, output_scales=outputs)
    plain = quantize_linear(weight, None, scales, 4, group=group)
    assert (q.scale >= plain.scale * (1 - 1e-9)).all() and (q.scale <= plain.scale * (1 + 2.0**-15)).all()
    emitter = Emitter()
    emitter.requantizer("y", q.scale / outputs, short=True)
    mult, shift = emitter.constants["y.mult"], emitter.constants["y.shift"]
    assert mult.dtype == np.uint16 and mult.min() >= 2**15
    np.testing.assert_allclose(mult / np.exp2(shift.astype(float)), q.scale / outputs, rtol=1e-12)


def test_a_scale_with_an_exact_16_bit_multiplier_is_kept() -> None:
    """The ratios are 3, 1/4 and 65535; the first one is 2.9999999999999996 in float64."""
    scale, outputs = np.array([0.3, 1.0, 65535.0]), np.array([0.1, 4.0, 1.0])
    found = quantize_linear(127 * scale[:, None], None, np.ones(1), 8, output_scales=outputs)
    np.testing.assert_allclose(found.scale, scale, rtol=1e-12)


def test_multipliers_are_short_with_mult_short_or_per_channel_scales() -> None:
    linear, ten, eleven = layers.Linear(4, 6, "hidden"), affine(-1.0, 1.0, 10), affine(-1.0, 1.0, 11)
    plain, short, channels = Recipe(name="a"), Recipe(name="b", mult="short"), Recipe(name="c", channels=True)
    assert short_output_scales(plain, linear, ten, 6) is None
    for recipe in (short, channels):
        assert short_output_scales(recipe, linear, ten, 6).tolist() == [ten.scale[0]] * 6  # type: ignore[union-attr]
        assert short_output_scales(recipe, linear, eleven, 6) is None and short_output_scales(recipe, linear, None, 6) is None
        assert short_output_scales(recipe, maps.Conv2d(4, 6, "pyramid"), ten, 6) is None
        assert short_output_scales(recipe, maps.Deconv(4, 6, "pyramid"), ten, 24) is not None


@pytest.mark.parametrize("mean, zero", [((0.485, 0.456, 0.406), 114), ((0.45,), 115)])
def test_the_zero_point_of_pixels_is_the_one_nearest_to_the_mean(mean: tuple[float, ...], zero: int) -> None:
    preprocess = Preprocess(8, 8, len(mean), 8, "bicubic", mean, mean)  # type: ignore[arg-type]
    assert pixel_zero(preprocess) == zero


def test_multipliers_are_stored_in_32_bits_if_16_bits_would_need_a_shift_below_1() -> None:
    emitter = Emitter()
    emitter.requantizer("y", np.array([0.3, 2.0**17]), short=True)
    assert emitter.constants["y.mult"].dtype == np.int32
