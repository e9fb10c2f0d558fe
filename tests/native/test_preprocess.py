"""Compare fqvit._native.preprocess with Preprocess.apply bit for bit, and run native/test/preprocess_test.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from fqvit import _native
from fqvit.data.preprocess import FULL_RESIZE_LIMIT, Preprocess, resized, resized_size
from tests.native.compilers import Compiler, run, tool

PASSED = "816 passed, 0 failed\n"

Filter = Literal["bicubic", "bilinear"]
FILTERS: tuple[Filter, ...] = ("bicubic", "bilinear")


def noise(height: int, width: int, channels: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return random pixels. Every third seed gives only 0 and 255, whose sums overshoot most with bicubic weights."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return np.where(pixels > 127, 255, 0).astype(np.uint8) if seed % 3 == 2 else pixels


def compare(pixels: NDArray[np.uint8], p: Preprocess) -> None:
    want = p.apply(Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels))
    got = _native.preprocess(pixels, p.height, p.width, p.channels, p.resize, p.interpolation, p.squash)
    assert got.shape == want.shape
    wrong = np.argwhere(got != want)
    first = tuple(wrong[0]) if len(wrong) else None
    assert first is None, f"{pixels.shape} {p}: {len(wrong)} differ, first {first}: {got[first]}, expected {want[first]}"


def preprocess(height: int, width: int, channels: int, resize: int, interpolation: Filter, squash: bool = False) -> Preprocess:
    assert channels in (1, 3)
    one_or_three: Any = channels
    return Preprocess(height, width, one_or_three, resize, interpolation, (0.5,) * channels, (0.5,) * channels, squash)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("interpolation", FILTERS)
def test_results_for_random_sizes_equal_pillow(channels: int, interpolation: Filter) -> None:
    rng = np.random.default_rng(channels)
    for seed in range(200):
        height, width = (int(2 ** rng.uniform(0, 9)) for _ in range(2))
        resize, crop_height, crop_width = (int(n) for n in rng.integers(1, 100, 3))
        pixels = noise(height, width, (1, 3, 4)[seed % 3], seed // 3)
        compare(pixels, preprocess(crop_height, crop_width, channels, resize, interpolation, squash=seed % 4 == 0))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 300), st.integers(1, 300), st.sampled_from([1, 3, 4]), st.integers(0, 99),
    st.integers(1, 80), st.integers(1, 80), st.sampled_from([1, 3]), st.integers(1, 80), st.sampled_from(FILTERS),
)  # fmt: skip
def test_results_for_any_size_equal_pillow(
    height: int, width: int, image_channels: int, seed: int, h: int, w: int, channels: int, resize: int, name: Filter
) -> None:
    compare(noise(height, width, image_channels, seed), preprocess(h, w, channels, resize, name))


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize(
    "height, width, resize, crop",
    [
        (375, 500, 256, 224),
        (500, 375, 248, 224),
        (1000, 249, 248, 224),  # tall enough for the vertical pass to be first in Pillow 13
        (224, 224, 224, 224),  # unchanged
        (224, 300, 224, 224),  # cropped only
        (1, 1, 256, 224),
        (1, 700, 32, 32),
        (700, 1, 32, 32),
        (30, 41, 20, 64),  # padded on all sides
        (31, 100, 20, 63),  # padded above and below, cropped left and right
        (90, 31, 500, 384),
        (3000, 2000, 5, 3),
    ],
)
def test_results_for_typical_and_extreme_sizes_equal_pillow(
    height: int, width: int, resize: int, crop: int, interpolation: Filter
) -> None:
    for image_channels in (1, 3, 4):
        for channels in (1, 3):
            for seed in (1, 2):
                compare(noise(height, width, image_channels, seed), preprocess(crop, crop, channels, resize, interpolation))


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize(
    "height, width, resize, crop",
    [
        (1, 100_000, 224, (224, 200)),
        (100_000, 1, 224, (200, 224)),
        (3, 60_001, 300, (64, 400)),
        (70_001, 7, 256, (224, 224)),
        (1, 1 << 22, 31, (224, 100)),  # padded above and below
        (500, 600, 4500, (100, 5400)),  # vertical pass first, although the image is not tall
        (4100, 4200, 4100, (100, 8000)),  # unchanged, but above the limit
    ],
)
def test_results_for_images_above_the_limit_equal_pillow(
    height: int, width: int, resize: int, crop: tuple[int, int], interpolation: Filter
) -> None:
    resized = resized_size(width, height, resize)
    assert resized[0] * resized[1] > FULL_RESIZE_LIMIT
    compare(noise(height, width, 3, 1), preprocess(*crop, 3, resize, interpolation))


@pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 13, reason="needs Pillow 13, whose order of passes fqvit uses")
@pytest.mark.parametrize("size", [(945, 129), (129, 945), (800, 390), (3, 2000)])
def test_resizing_one_pass_at_a_time_equals_pillow_13(size: tuple[int, int]) -> None:
    image, resample = Image.fromarray(noise(*size, 3)), Image.Resampling.BICUBIC
    new = resized_size(*image.size, 64)
    assert np.array_equal(resized(image, new, resample, (0, 0, *image.size)), image.resize(new, resample))


@pytest.mark.parametrize("side", [4095, 4096, 4097])
def test_the_pixel_limit_is_the_same_as_in_python(side: int) -> None:
    compare(noise(50, 50, 1), preprocess(40, 40, 1, side, "bicubic"))


def test_gray_is_computed_from_every_color_as_in_pillow() -> None:
    levels = np.arange(0, 256, 5, dtype=np.uint8)
    colors = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(52, 52 * 52, 3)
    compare(colors, preprocess(52, 52 * 52, 1, 52, "bilinear"))


def test_bad_arguments_are_rejected_with_the_reason() -> None:
    good = noise(4, 4, 3)
    for pixels, arguments, message in [
        (good, (0, 4, 3, 4, "bicubic"), r"shape: \[0, 4, 3\], expected positive sizes"),
        (good, (4, 9000, 3, 4, "bicubic"), "preprocess: width is 9000, expected 1 to 8192"),
        (good, (4, 4, 2, 4, "bicubic"), "preprocess: channels is 2, expected 1 or 3"),
        (good, (4, 4, 3, 0, "bicubic"), "preprocess: resize is 0, expected 1 to 8192"),
        (good, (4, 4, 3, 4, "nearest"), "preprocess: interpolation is nearest, expected bilinear or bicubic"),
        (noise(4, 4, 2), (4, 4, 3, 4, "bicubic"), "preprocess: the image has 2 channels, expected 1, 3 or 4"),
        (noise(0, 4, 3), (4, 4, 3, 4, "bicubic"), "preprocess: height of the image is 0, expected 1 to 4194304"),
        (noise(1, (1 << 22) + 1, 1), (4, 4, 1, 4, "bicubic"), "preprocess: width of the image is 4194305"),
    ]:
        with pytest.raises(_native.BadProgram, match=message):
            _native.preprocess(pixels, *arguments)


def preprocess_test(compiler: Compiler, *flags: str) -> Path:
    sources = ("core/value.cpp", "image/preprocess.cpp", "image/resample.cpp", "image/weights.cpp")
    flags = flags or ("-O1",)
    return compiler.program(compiler.object("test/preprocess_test.cpp", *flags), *(compiler.object(s, *flags) for s in sources))


def test_strides_and_bad_arguments_are_handled_without_python(compiler: Compiler) -> None:
    assert run(preprocess_test(compiler)) == PASSED


def test_code_compiled_with_fused_multiply_add_gives_the_same_bits(x86_compiler: Compiler) -> None:
    if not _native.cpu_features()["avx2"]:  # every CPU with AVX2 has FMA
        pytest.skip("needs AVX2")
    assert run(preprocess_test(x86_compiler, "-O3", "-mavx2", "-mfma")) == PASSED


@pytest.mark.nightly
@pytest.mark.parametrize("machine", ["aarch64", "s390x"])
def test_other_machines_give_the_same_bits(machine: str, request: pytest.FixtureRequest) -> None:
    compiler = request.getfixturevalue(f"{machine}_compiler")
    assert run(tool(f"qemu-{machine}"), "-L", f"/usr/{machine}-linux-gnu", preprocess_test(compiler)) == PASSED
