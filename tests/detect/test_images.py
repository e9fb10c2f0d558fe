"""Preparing images for a detector: sizes, interpolation and padding."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from fqvit.detect.images import Input, normalise_and_pad, prepare, resize, resized_size
from fqvit.detect.settings import DetectSettings
from fqvit.errors import FqvitError

S = DetectSettings()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((480, 640), (800, 1067)),
        ((640, 480), (1067, 800)),
        ((300, 1000), (400, 1333)),
        ((800, 1333), (800, 1333)),
        ((4000, 6000), (800, 1200)),
        ((1, 4000), (1, 1333)),
        ((1, 1), (800, 800)),
    ],
)
def test_one_side_reaches_its_limit_and_no_side_becomes_0(old: tuple[int, int], new: tuple[int, int]) -> None:
    assert resized_size(*old, S.short, S.long) == new


@pytest.mark.parametrize("new", [(30, 45), (7, 5), (20, 31), (1, 1), (200, 3)])
def test_resizing_is_bilinear_between_pixel_centres(new: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    pixels = np.random.default_rng(0).integers(0, 256, (20, 31, 3), np.uint8)
    x = torch.tensor(pixels).permute(2, 0, 1)[None].double()
    expected = torch.nn.functional.interpolate(x, new, mode="bilinear")[0].permute(1, 2, 0).numpy()
    found = resize(pixels, *new)
    assert found.shape == (*new, 3)
    # Rounding the result adds an error of at most 1/2. Per axis, rounding the weights to multiples of 2^-11 adds at most 2^-12
    # times the difference of two pixels, which is at most 255.
    assert abs(found - expected).max() <= 0.5 + 2 * 255 / 2**12


def test_padding_is_zero_after_normalising() -> None:
    pixels = np.full((33, 40, 3), 255, np.uint8)
    x = normalise_and_pad(pixels, S)
    assert x.shape == (3, 64, 64)
    assert x[:, 0, 0] == pytest.approx([(1 - m) / s for m, s in zip(S.mean, S.std, strict=True)])
    assert not x[:, 33:].any()
    assert not x[:, :, 40:].any()


def test_boxes_are_mapped_back_to_the_image() -> None:
    made = prepare(Image.new("L", (300, 200)), S)
    assert (made.height, made.width, made.size, made.padded) == (200, 300, (800, 1200), (800, 1216))
    assert made.to_original(np.array([[0.0, 0, 1200, 800], [4, 8, 12, 16]])).tolist() == [[0, 0, 300, 200], [1, 2, 3, 4]]


def test_images_of_extreme_sizes_are_prepared_and_empty_images_are_rejected() -> None:
    assert prepare(Image.new("RGB", (5000, 1)), S).padded == (32, 1344)
    assert Input(np.zeros((1, 1, 3), np.uint8), 1, 1).padded == (32, 32)
    with pytest.raises(FqvitError, match="no pixels"):
        prepare(Image.new("RGB", (0, 5)), S)


def test_resizing_keeps_constant_images_constant() -> None:
    for value in (0, 255):
        assert (resize(np.full((5, 7, 3), value, np.uint8), 33, 2) == value).all()
    assert resize(np.full((1, 1, 3), 9, np.uint8), 4, 900).tolist() == [[[9] * 3] * 900] * 4


def test_resized_sizes_equal_real_arithmetic() -> None:
    for height, width in np.random.default_rng(0).integers(1, 9000, (300, 2)).tolist():
        scale = min(S.long / max(height, width), S.short / min(height, width))
        for found, side in zip(resized_size(height, width, S.short, S.long), (height, width), strict=True):
            assert found == max(round(side * scale), 1) or abs(side * scale % 1 - 0.5) < 1e-6
