"""Quantize a model in one call: load it, calibrate it on images, and lower it to a program.

See also: frontend/load.py, quant/calibrate.py and lower.py (the three steps), data/collect.py (images).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor, nn

from fqvit.data.collect import EXPECTED, open_any
from fqvit.data.images import ImageArray, Source
from fqvit.errors import FqvitError
from fqvit.frontend.load import Size, load_model
from fqvit.ir.file import file_size
from fqvit.ir.program import Program
from fqvit.lowering.lower import lower
from fqvit.models import embedded
from fqvit.models.load import FloatModel
from fqvit.quant.calibrate import calibrate
from fqvit.quant.recipe import DEFAULT_RECIPE, RECIPES, Recipe, check_integer, load_recipe, with_bits, with_methods
from fqvit.system.progress import Progress, busy, track


def quantize(
    model: str | Path | nn.Module | FloatModel | Mapping[str, Tensor],
    images: object = None,
    recipe: Recipe | str | Path = DEFAULT_RECIPE,
    bits: str | None = None,
    *,
    size: Size | None = None,
    classes: Sequence[str] | None = None,
    processor: object = None,
    outputs: str | Sequence[str] = (),
    limit: int | None = None,
    device: str = "cpu",
    progress: Progress | None = track,
    **settings: Any,
) -> Program:
    """Quantize a float model to an integer-only program. Save it with `.save("model.fqvit")`, use it with `fqvit.load`.

    model: a live module of timm, transformers or torch; a checkpoint file or folder; hf:ORG/NAME; the name of an embedded
    model; a state dict; or the result of load_model. The module is not changed.
    images: unlabelled images like those that the model will see: a folder, a tar or Parquet file, a list of paths, PIL images
    or uint8 arrays [N, H, W, C], a DataLoader, or a Dataset of torch or of Hugging Face. They are resized and cropped as the
    model requires, except arrays and tensors that already have its input size. For an embedded model, the package has images.
    recipe: a recipe, its name, or a TOML file   bits: bit widths of weights, activations and attention, "4/8/4"
    size: height and width, if not those of the model   classes: class names, one per logit
    processor: the image processor of a transformers model, whose module does not contain the preprocessing
    outputs: as in calibrate   limit: use at most this many images, evenly spaced; by default recipe.images
    progress: as in calibrate   settings: heads, pool, activation, ... of a checkpoint, as in load_model
    """
    chosen = recipe_of(recipe, bits, limit)
    check_integer(chosen)
    given = {"size": size, "classes": classes, "processor": processor, **settings}
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(model, FloatModel):
        if given:
            raise FqvitError(f"{next(iter(given))}: only valid for models that are not loaded yet. Pass it to load_model.")
        loaded = model
    else:
        _check_model(model)
        with busy("loading the model"):
            loaded = load_model(None, model, **given) if isinstance(model, Mapping) else load_model(model, **given)
    pictures = _pictures(images, loaded, chosen)
    calibration = calibrate(
        loaded,
        pictures,
        chosen,
        device=device,
        outputs=outputs,
        progress=progress,
        size_of=lambda found: file_size(lower(loaded, found)),
    )
    return lower(loaded, calibration)


def recipe_of(recipe: Recipe | str | Path, bits: str | None, limit: int | None) -> Recipe:
    """Load a recipe and apply `bits` and `limit`. A built-in recipe also gets the methods that low bit widths need."""
    found = load_recipe(recipe)
    if bits is not None:
        found = with_bits(found, bits)
        if not isinstance(recipe, Recipe) and str(recipe) in RECIPES:  # a recipe of the caller keeps its own methods
            found = with_methods(found)
    if limit is not None:
        if limit < 1:
            raise FqvitError(f"limit: {limit}, expected at least 1.")
        found = msgspec.structs.replace(found, images=limit)
    return found


def _check_model(model: object) -> None:
    if not isinstance(model, str | Path | nn.Module | Mapping):
        kind = type(model).__name__
        raise FqvitError(
            f"model: {kind}, expected a torch module, a checkpoint file or folder, hf:ORG/NAME, or an embedded model's name."
        )


def _pictures(images: object, model: FloatModel, recipe: Recipe) -> Source:
    if images is not None:
        return open_any(images, model.preprocess, recipe.images)
    p = model.preprocess
    inside = embedded.calibration_images() if model.name in embedded.MODELS else None
    if inside is None or inside.shape[1:] != (p.height, p.width, p.channels):
        raise FqvitError(f"{model.name}: no images given. Pass {EXPECTED}; labels are not needed.")
    return ImageArray(inside, None, p).limit(recipe.images)
