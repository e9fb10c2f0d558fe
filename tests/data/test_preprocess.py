"""Test Preprocess.apply against the rules of torchvision, and with many image modes and file formats."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fqvit.data.preprocess import Preprocess, crop_start, resized, resized_size
from fqvit.errors import FqvitError

RGB = Preprocess(32, 32, 3, 36, "bicubic", (0.5,) * 3, (0.5,) * 3)
GREY = Preprocess(28, 28, 1, 28, "bicubic", (0.3,), (0.35,))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a smooth asymmetric image, in which rotations and shifts are visible."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def reopened(image: Image.Image, kind: str, **options: Any) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return Image.open(io.BytesIO(buffer.getvalue()))


def test_the_long_side_is_rounded_down_and_the_short_side_is_exact() -> None:
    assert resized_size(500, 375, 248) == (330, 248)  # 330.67
    assert resized_size(375, 500, 248) == (248, 330)
    assert resized_size(7, 7, 256) == (256, 256)


def test_the_crop_starts_at_torchvisions_coordinate() -> None:
    assert [crop_start(n, 224) for n in (224, 225, 226, 227, 229, 256)] == [0, 0, 1, 2, 2, 16]  # half to even
    assert [crop_start(n, 224) for n in (223, 222, 221)] == [0, -1, -1]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(20, 48), st.integers(1, 48), st.integers(1, 48))
def test_apply_resizes_then_pads_then_center_crops(width: int, height: int, resize: int, h: int, w: int) -> None:
    image = picture(width, height)
    got = Preprocess(h, w, 3, resize, "bicubic", (0.5,) * 3, (0.5,) * 3).apply(image)
    whole = np.asarray(image.resize(resized_size(width, height, resize), Image.Resampling.BICUBIC))
    over_h, over_w = max(h - whole.shape[0], 0), max(w - whole.shape[1], 0)
    pad = ((over_h // 2, (over_h + 1) // 2), (over_w // 2, (over_w + 1) // 2), (0, 0))
    padded = np.pad(whole, pad)
    top, left = round((padded.shape[0] - h) / 2), round((padded.shape[1] - w) / 2)
    np.testing.assert_array_equal(got, padded[top : top + h, left : left + w])


def test_apply_equals_the_evaluation_transform_of_timm(timm: Any) -> None:
    from timm.data import create_transform

    transform = create_transform((3, 224, 224), crop_pct=0.9, interpolation="bicubic", mean=(0, 0, 0), std=(1, 1, 1))
    ours = Preprocess(224, 224, 3, 248, "bicubic", (0.5,) * 3, (0.5,) * 3)
    for size in ((500, 375), (333, 501), (224, 224), (40, 90), (1, 1), (249, 1000)):
        image = picture(*size)
        theirs = (transform(image).permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
        np.testing.assert_array_equal(ours.apply(image), theirs)


def test_an_image_of_the_right_size_is_unchanged() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (28, 28), dtype=np.uint8)
    np.testing.assert_array_equal(GREY.apply(Image.fromarray(pixels))[:, :, 0], pixels)


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA", "CMYK", "YCbCr", "HSV", "I", "I;16", "I;16B", "PA", "RGBa"])
def test_images_of_many_modes_become_eight_bit_pixels(mode: str) -> None:
    grey = picture(50, 40).convert("L")
    if mode.startswith("I"):
        dtype = {"I": "<i4", "I;16": "<u2", "I;16B": ">u2"}[mode]
        values = (np.asarray(grey).astype(np.int64) * 257).astype(dtype)
        image = Image.frombytes(mode, grey.size, values.tobytes())
    else:
        image = grey.convert({"RGBa": "RGBA"}.get(mode, mode))
        image = image.convert(mode)
    for preprocess in (RGB, GREY):
        got = preprocess.apply(image)
        assert got.dtype == np.uint8
        assert got.shape == (preprocess.height, preprocess.width, preprocess.channels)
        if mode in ("L", "RGBA", "LA", "CMYK", "I", "I;16", "I;16B"):
            np.testing.assert_allclose(got.astype(int), preprocess.apply(grey), atol=1)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bit_images_are_scaled_and_not_clipped(kind: str) -> None:
    pixels = np.arange(28 * 28, dtype=np.uint32).reshape(28, 28) * 83 % 65536
    image = reopened(Image.fromarray(pixels.astype(np.uint16)), kind)
    np.testing.assert_array_equal(GREY.apply(image)[:, :, 0], pixels >> 8)


def test_images_with_an_unknown_value_range_are_rejected() -> None:
    with pytest.raises(FqvitError, match="32-bit image with values 0..70000"):
        RGB.apply(Image.fromarray(np.array([[0, 70000]], np.int32)))
    with pytest.raises(FqvitError, match="float image"):
        RGB.apply(Image.fromarray(np.ones((4, 4), np.float32)))
    with pytest.raises(FqvitError, match="no pixels"):
        RGB.apply(Image.new("RGB", (0, 3)))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(kind: str, orientation: int) -> None:
    stored_from_upright = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    scene = picture(64, 48)
    stored = scene.transpose(stored_from_upright[orientation]) if orientation > 1 else scene
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, Any] = {"WEBP": {"lossless": True}, "JPEG": {"quality": 98, "subsampling": 0}}.get(kind, {})
    got = RGB.apply(reopened(stored, kind, exif=exif, **options))
    np.testing.assert_allclose(got.astype(int), RGB.apply(scene), atol=6 if kind == "JPEG" else 0)


def test_an_image_with_damaged_exif_is_read() -> None:
    image = reopened(picture(64, 48), "PNG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\x7f")
    assert RGB.apply(image).shape == (32, 32, 3)


def test_a_palette_with_transparency_does_not_warn() -> None:
    image = picture(40, 40).quantize(16)
    opened = reopened(image, "PNG", transparency=bytes(range(16)))
    np.testing.assert_array_equal(RGB.apply(opened), RGB.apply(image.convert("RGB")))


def test_an_image_of_one_pixel_fills_the_crop() -> None:
    got = RGB.apply(Image.new("RGB", (1, 1), (10, 20, 30)))
    assert (got == np.array([10, 20, 30], np.uint8)).all()


@pytest.mark.parametrize("size", [(1, 60000), (60000, 1), (3, 60001)])
def test_extreme_aspect_ratios_need_little_memory(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole resized image would take 5 to 16 GB."""
    wide = Preprocess(64, 64, 3, 300, "bicubic", (0.5,) * 3, (0.5,) * 3)
    assert wide.apply(Image.new("RGB", size, (9, 8, 7)))[0, 0].tolist() == [9, 8, 7]


@pytest.mark.parametrize("size", [(30, 900), (901, 31), (77, 64), (5, 5)])
@pytest.mark.parametrize("crop", [32, 50])
def test_resizing_only_the_crop_gives_the_same_pixels_up_to_rounding(
    size: tuple[int, int], crop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocess = Preprocess(crop, crop, 3, 40, "bilinear", (0.5,) * 3, (0.5,) * 3)
    whole = preprocess.apply(picture(*size))
    monkeypatch.setattr("fqvit.data.preprocess.FULL_RESIZE_LIMIT", 0)
    np.testing.assert_allclose(preprocess.apply(picture(*size)).astype(int), whole, atol=1)


def test_json_round_trips_and_invalid_fields_are_named() -> None:
    assert msgspec.json.decode(msgspec.json.encode(RGB), type=Preprocess) == RGB
    bad = msgspec.to_builtins(RGB) | {"std": [0.5, 0.5, 0.0]}
    with pytest.raises(msgspec.ValidationError, match="std positive"):
        msgspec.convert(bad, Preprocess)
    with pytest.raises(msgspec.ValidationError, match="height"):
        msgspec.convert(msgspec.to_builtins(RGB) | {"height": 10**9}, Preprocess)
    with pytest.raises(ValueError, match="mean and std need 1 values"):
        Preprocess(28, 28, 1, 28, "bicubic", (0.5,) * 3, (0.5,) * 3)


def test_squash_resizes_to_the_aspect_ratio_of_the_model_input() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 90, 3), dtype=np.uint8))
    p = Preprocess(24, 24, 3, 24, "bicubic", (0.5,) * 3, (0.5,) * 3, squash=True)
    want = np.asarray(resized(image, (24, 24), Image.Resampling.BICUBIC, (0, 0, 90, 50)))
    assert np.array_equal(p.apply(image), want)
    cropped = Preprocess(24, 24, 3, 28, "bicubic", (0.5,) * 3, (0.5,) * 3, squash=True)
    want = np.asarray(resized(image, (28, 28), Image.Resampling.BICUBIC, (0, 0, 90, 50)))
    assert np.array_equal(cropped.apply(image), want[2:26, 2:26])
    wide = Preprocess(20, 30, 3, 20, "bilinear", (0.5,) * 3, (0.5,) * 3, squash=True)
    want = np.asarray(resized(image, (30, 20), Image.Resampling.BILINEAR, (0, 0, 90, 50)))
    assert np.array_equal(wide.apply(image), want)


def test_squash_is_written_only_if_it_is_true() -> None:
    p = Preprocess(24, 24, 3, 24, "bicubic", (0.5,) * 3, (0.5,) * 3)
    assert b"squash" not in msgspec.json.encode(p)
    squashed = msgspec.structs.replace(p, squash=True)
    assert msgspec.json.decode(msgspec.json.encode(squashed), type=Preprocess) == squashed
