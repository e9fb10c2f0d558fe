"""Make small random float models and random images for tests, and compare arrays, reporting the first difference.

Models and images are made from a seed. Only `embedded_program` reads files: the model and the images in the package.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from numpy.typing import NDArray

from fqvit.data.preprocess import Preprocess
from fqvit.ir.program import Program
from fqvit.lowering.lower import lower
from fqvit.models.config import SwinConfig, ViTConfig
from fqvit.models.embedded import calibration_images
from fqvit.models.load import FloatModel, load_model
from fqvit.models.swin import Swin
from fqvit.models.vit import ViT
from fqvit.quant.calibrate import calibrate
from fqvit.quant.calibration import Calibration
from fqvit.quant.methods import reconstruct
from fqvit.quant.recipe import Recipe, load_recipe
from fqvit.runtime.reference import Reference

# If the environment variable CI is set, Hypothesis draws the same examples in every run.
few = settings(max_examples=25, deadline=None)
many = settings(max_examples=100, deadline=None)

VITS: dict[str, ViTConfig] = {
    "vit": ViTConfig((12, 12), 4, 3, 5, 24, 2, 3, 40),
    "distilled": ViTConfig((8, 12), 4, 3, 5, 16, 1, 2, 24, prefix=2),
    "mean": ViTConfig((12, 12), 4, 1, 4, 16, 1, 2, 32, pool="mean", norm_first=False, norm_last=True),
    "no class token": ViTConfig((9, 9), 3, 3, 7, 16, 1, 4, 16, prefix=0, pool="mean"),
}
SWINS: dict[str, SwinConfig] = {
    "swin": SwinConfig((16, 16), 2, 3, 5, 8, (2, 1), (2, 4), 4, hidden_ratio=2),
    # 5 x 7 tokens, then 3 x 4 tokens after patch merging, in windows of 3 x 3. Windows and merging need padding (index -1).
    "padded swin": SwinConfig((10, 14), 2, 1, 4, 8, (2, 2), (1, 2), 3, hidden_ratio=2),
}
MODELS = (*VITS, *SWINS)
# 4-bit weights in groups of 16: the last group is shorter if the width is 24, 40 or 8.
GROUPED = Recipe(name="grouped", weight_bits=4, weight_group=16)


def float_model(kind: str, seed: int = 0, classes: tuple[str, ...] | None = None) -> FloatModel:
    """Make a model of a kind in MODELS with random weights that are large enough for every site to use many codes."""
    config = VITS.get(kind) or SWINS[kind]
    return model_of(config, kind, seed, classes)


def model_of(
    config: ViTConfig | SwinConfig, name: str, seed: int = 0, classes: tuple[str, ...] | None = None, gain: float = 1.0
) -> FloatModel:
    """Make a model of the given sizes with random weights; `gain` scales its matrices."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = Swin(config) if isinstance(config, SwinConfig) else ViT(config)
    with torch.no_grad():
        for key, p in module.named_parameters():
            if p.ndim > 1:
                fan_in = p[0].numel() if p.ndim in (2, 4) and "position" not in key else 1
                p.copy_(torch.randn(p.shape, generator=generator) * gain * fan_in**-0.5)
            elif "norm" in key and key.endswith("weight"):
                p.copy_(0.5 + torch.rand(p.shape, generator=generator))
            else:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
    channels = config.channels
    mean, std = (0.4, 0.5, 0.45)[:channels], (0.3, 0.25, 0.2)[:channels]
    height, width = config.image
    preprocess = Preprocess(height, width, channels, min(height, width), "bicubic", mean, std)  # type: ignore[arg-type]
    return FloatModel(name, module.eval(), preprocess, classes, f"random weights of seed {seed}")


def images_for(preprocess: Preprocess, count: int, seed: int = 0) -> NDArray[np.uint8]:
    """Make images u8 [count, H, W, C]: smooth random ones and, if count > 3, one of noise, one white and one black."""
    rng = np.random.default_rng(seed)
    shape = (count, preprocess.height, preprocess.width, preprocess.channels)
    y, x = np.mgrid[0 : shape[1], 0 : shape[2]]
    waves = rng.normal(size=(count, 3, 1, 1, shape[3])) / 6
    smooth = 128 + 120 * np.sin(waves[:, 0] * y[..., None] + waves[:, 1] * x[..., None] + 9 * waves[:, 2])
    pictures = np.clip(smooth + rng.normal(0, 12, shape), 0, 255).astype(np.uint8)
    if count > 3:
        pictures[-1], pictures[-2] = 0, 255
        pictures[-3] = rng.integers(0, 256, shape[1:])
    return pictures


def calibration_of(model: FloatModel, recipe: str | Recipe = "fq-vit", count: int = 12, **options: Any) -> Calibration:
    """Calibrate a model on `count` random images."""
    plan = load_recipe(recipe) if isinstance(recipe, str) else recipe
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from the deprecated argument `features`
        return calibrate(model, [images_for(model.preprocess, count, 7)], plan, **options)


@cache
def embedded_program(name: str) -> Program:
    """Quantize an embedded model with the default recipe on a few images."""
    model = load_model(name)
    return lower(model, calibrate(model, [calibration_images()[:64]], load_recipe("fqvit")))


def buffers_of(program: Program, images: NDArray[np.uint8], library: Any = "numpy") -> dict[str, np.ndarray[Any, Any]]:
    """Run the reference and return {name: copy of the buffer} for every buffer."""
    seen: dict[str, np.ndarray[Any, Any]] = {}
    Reference(program, library).run(images, lambda name, x: seen.__setitem__(name, x.copy()))
    return seen


def assert_same(a: Any, b: Any, name: str) -> None:
    """Assert equal integers; the message has the first differing buffer, its index, both values and the count."""
    if isinstance(a, Mapping):
        assert list(a) == list(b), f"{name}: buffers {sorted(set(a) ^ set(b))} exist on one side only"
        for key in a:
            assert_same(a[key], b[key], f"{name} {key}")
        return
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape, f"{name}: shapes {a.shape} and {b.shape}"
    wrong = np.argwhere(a != b)
    if len(wrong):
        first = tuple(int(i) for i in wrong[0])
        raise AssertionError(
            f"{name}: first difference at {list(first)}: {a[first]} and {b[first]}; {len(wrong)} of {a.size} differ"
        )


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Run torch on one thread. Import this fixture in modules with small arrays, where threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def few_steps() -> Iterator[None]:
    """Learn weights in a few steps, to save time. Not for tests of what learning gains."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("STEPS", "WEIGHT_STEPS"):
            patch.setattr(reconstruct, name, 3)
        yield
