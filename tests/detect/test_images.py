"""Images on their way to a detector: sizes, interpolation, padding."""

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
def test_one_side_meets_its_limit_and_none_vanishes(old: tuple[int, int], new: tuple[int, int]) -> None:
    assert resized_size(*old, S.short, S.long) == new


@pytest.mark.parametrize("new", [(30, 45), (7, 5), (20, 31), (1, 1), (200, 3)])
def test_resizing_is_bilinear_between_pixel_centres(new: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    pixels = np.random.default_rng(0).integers(0, 256, (20, 31, 3), np.uint8)
    x = torch.tensor(pixels).permute(2, 0, 1)[None].double()
    expected = torch.nn.functional.interpolate(x, new, mode="bilinear")[0].permute(1, 2, 0).numpy()
    found = resize(pixels, *new)
    assert found.shape == (*new, 3)
    assert abs(found - expected).max() <= 0.5 + 1e-3


def test_padding_is_zero_after_normalising() -> None:
    pixels = np.full((33, 40, 3), 255, np.uint8)
    x = normalise_and_pad(pixels, S)
    assert x.shape == (3, 64, 64)
    assert x[:, 0, 0] == pytest.approx([(1 - m) / s for m, s in zip(S.mean, S.std, strict=True)])
    assert not x[:, 33:].any()
    assert not x[:, :, 40:].any()


def test_boxes_go_back_to_the_image() -> None:
    made = prepare(Image.new("L", (300, 200)), S)
    assert (made.height, made.width, made.size, made.padded) == (200, 300, (800, 1200), (800, 1216))
    assert made.back(np.array([[0.0, 0, 1200, 800], [4, 8, 12, 16]])).tolist() == [[0, 0, 300, 200], [1, 2, 3, 4]]


def test_extreme_images_have_a_size() -> None:
    assert prepare(Image.new("RGB", (5000, 1)), S).padded == (32, 1344)
    assert Input(np.zeros((1, 1, 3), np.uint8), 1, 1).padded == (32, 32)
    with pytest.raises(FqvitError, match="no pixels"):
        prepare(Image.new("RGB", (0, 5)), S)
