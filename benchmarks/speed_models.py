"""Prepare the models of speed.py and their programs: models of the zoo, and modules of timm with random weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

import fqvit
from fqvit.bench.measure import smooth_images
from fqvit.bench.prepare import export
from fqvit.models import zoo
from fqvit.models.load import build

IMAGES = 16  # calibration images; few are enough because times do not depend on the scales

# Families that are measured with random weights: timm's name and arguments.
TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "dinov2_small_224": ("vit_small_patch14_dinov2", {"img_size": 224}),
    "dinov2_small_518": ("vit_small_patch14_dinov2", {"img_size": 518}),
    "clip_base_32": ("vit_base_patch32_clip_224", {}),
    "swinv2_tiny": ("swinv2_tiny_window8_256", {}),
    "eva02_tiny": ("eva02_tiny_patch14_224", {}),
    "tinyvit_5m": ("tiny_vit_5m_224", {}),
}


@dataclass(frozen=True)
class SpeedModel:
    """A model to measure.

    weights: checkpoint or ONNX file for the peers (the other runtimes)   programs: one per recipe
    kind: how the weights were made, "real" or "normal, 3 sigma"
    """

    name: str
    weights: Path
    kind: str
    programs: dict[str, Path]


def prepare(name: str, recipes: tuple[str, ...], data: Path, folder: Path) -> SpeedModel:
    """Return the files of a model, and create those that are not in `folder` yet."""
    return _timm(name, recipes, folder) if name in TIMM else _zoo(name, recipes, data, folder)


@torch.no_grad()
def clipped_weights(values: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Return random values of these shapes: variance 1 / fan-in, clipped at 3 sigma; norm gains near 1; small biases."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: torch.Size, sigma: float) -> Tensor:
        return torch.randn(shape, generator=generator).clamp(-3, 3) * sigma

    state = {}
    for key, value in values.items():
        if "bias_table" in key or key in ("cls_token", "pos_embed"):
            state[key] = normal(value.shape, 0.2)
        elif value.ndim > 1:
            state[key] = normal(value.shape, value[0].numel() ** -0.5)
        elif ("norm" in key or ".bn." in key) and key.endswith("weight"):
            state[key] = 1 + normal(value.shape, 0.1)
        else:
            state[key] = normal(value.shape, 0.02)
    return state


def _zoo(name: str, recipes: tuple[str, ...], data: Path, folder: Path) -> SpeedModel:
    """Prepare a model of the zoo, with its real weights if they are in `data`."""
    row = zoo.find(name)
    weights, kind = data / "weights" / f"{row.name}.safetensors", "real"
    if not weights.is_file():
        weights, kind = folder / f"{name}.safetensors", "normal, 3 sigma"
        if not weights.is_file():
            save_file(clipped_weights(build(row.config).state_dict()), weights)
    paths = {recipe: folder / f"{name}.{recipe}.fqvit" for recipe in recipes}
    if not all(path.is_file() for path in paths.values()):
        _quantize(fqvit.load_model(name, weights), paths, data if kind == "real" else None)
    return SpeedModel(row.name, weights, kind, paths)


def _timm(name: str, recipes: tuple[str, ...], folder: Path) -> SpeedModel:
    """Prepare a module of timm: its programs, and one ONNX file for the peers."""
    architecture, arguments = TIMM[name]
    onnx = folder / f"{name}.onnx"
    paths = {recipe: folder / f"{name}.{recipe}.fqvit" for recipe in recipes}
    if not (onnx.is_file() and all(path.is_file() for path in paths.values())):
        import timm

        # Compute attention as separate matrix products: ONNX Runtime and NNCF quantize those, but not fused attention.
        timm.layers.set_fused_attn(False)
        torch.manual_seed(0)
        module = timm.create_model(architecture, **arguments).eval()
        parameters = {key: value for key, value in module.named_parameters() if "logit_scale" not in key}
        module.load_state_dict(clipped_weights(parameters), strict=False)
        model = fqvit.load_model(module)
        _quantize(model, paths, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            original = fqvit.FloatModel(model.name, module, model.preprocess, None, "random weights")
            export(original, folder).rename(onnx)
    return SpeedModel(f"{architecture} {arguments['img_size']}" if arguments else architecture, onnx, "normal, 3 sigma", paths)


def _quantize(model: fqvit.FloatModel, paths: Mapping[str, Path], data: Path | None) -> None:
    """Write the programs that do not exist yet. data: folder with photographs for calibration; None: use random images"""
    for recipe, path in paths.items():
        if not path.is_file():
            print(f"{model.name}: quantizing, recipe {recipe}", flush=True)
            calibration = fqvit.calibrate(model, _pixels(model, data), fqvit.load_recipe(recipe))
            fqvit.lower(model, calibration).save(path)


def _pixels(model: fqvit.FloatModel, data: Path | None) -> Iterator[NDArray[np.uint8]]:
    """Yield calibration images: photographs if there are any, else random images."""
    if data is not None and (data / "imagenet" / "calib").is_dir():
        photos = fqvit.ImageFolder.unlabelled(data / "imagenet" / "calib", model.preprocess).limit(IMAGES)
        yield from (batch.images for batch in photos.batches())
        return
    p = model.preprocess
    yield smooth_images((IMAGES, p.height, p.width, p.channels), 2)
