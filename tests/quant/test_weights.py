from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fqvit.models.pixels import normalise
from fqvit.preprocess import Preprocess
from fqvit.quant.weights import pixel_linear, quantize_linear, quantize_positions
from tests.factories import few, images_for


@few
@given(st.integers(0, 2**32 - 1), st.integers(2, 8))
def test_weights_are_symmetric_codes_with_a_scale_for_each_output(seed: int, bits: int) -> None:
    rng = np.random.default_rng(seed)
    weight, bias = rng.normal(size=(5, 9)), rng.normal(size=5)
    steps = rng.uniform(0.01, 2, 9)
    q = quantize_linear(weight, bias, steps, bits)
    largest = 2 ** (bits - 1) - 1
    assert q.w.dtype == np.int8 and np.abs(q.w.astype(int)).max(1).tolist() == [largest] * 5
    np.testing.assert_allclose(q.scale, np.abs(weight * steps).max(1) / largest)
    assert np.abs(q.w * q.scale[:, None] - weight * steps).max() <= q.scale.max() / 2 * (1 + 1e-9)
    assert np.abs(q.bias * q.scale - bias).max() <= q.scale.max() / 2 * (1 + 1e-9)


@pytest.mark.parametrize("weight", [0.0, 1e-30, 1e-310, 5e-324])
@pytest.mark.parametrize("bias", [0.0, 1.0, -3e5])
def test_the_bias_of_a_dead_channel_fits(weight: float, bias: float) -> None:
    q = quantize_linear(np.full((1, 4), weight), np.array([bias]), np.ones(1), 8)
    assert np.isfinite(q.scale).all() and (q.scale > 0).all() and abs(int(q.bias[0])) <= 2**30
    assert q.bias[0] * q.scale[0] == pytest.approx(bias, rel=1e-8)


def test_a_missing_bias_is_0() -> None:
    assert quantize_linear(np.ones((3, 2)), None, np.ones(1), 8).bias.tolist() == [0, 0, 0]


@pytest.mark.parametrize("bits", [8, 16])
def test_positions_share_one_scale(bits: int) -> None:
    positions = np.random.default_rng(0).normal(size=(1, 7, 5))
    codes, unit = quantize_positions(positions, bits)
    assert codes.dtype == np.int16 and np.abs(codes.astype(int)).max() == 2 ** (bits - 1) - 1
    assert np.abs(codes * unit - positions).max() <= unit / 2 * (1 + 1e-9)
    assert quantize_positions(np.zeros((1, 2, 3)), bits)[0].tolist() == [[[0] * 3] * 2]


@pytest.mark.parametrize("channels", [1, 3])
def test_the_patch_embedding_of_raw_pixels_is_that_of_normalised_ones(channels: int) -> None:
    mean, std = (0.485, 0.456, 0.406)[:channels], (0.229, 0.224, 0.225)[:channels]
    preprocess = Preprocess(8, 8, channels, 8, "bicubic", mean, std)  # type: ignore[arg-type]
    rng = np.random.default_rng(1)
    weight, bias = rng.normal(size=(6, channels, 4, 4)), rng.normal(size=6)
    images = images_for(preprocess, 3)
    flat, offset, zero = pixel_linear(weight, bias, preprocess)
    assert 0 <= zero <= 255
    squares = images.reshape(3, 2, 4, 2, 4, channels).transpose(0, 1, 3, 2, 4, 5).reshape(3, 4, -1).astype(np.float64)
    got = (squares - zero) / 255 @ flat.T + offset
    x = normalise(images, preprocess).double()
    exact = torch.nn.functional.conv2d(x, torch.from_numpy(weight), torch.from_numpy(bias), 4).flatten(2).transpose(1, 2)
    np.testing.assert_allclose(got, exact.numpy(), atol=1e-5)
