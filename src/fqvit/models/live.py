"""Read the metadata of a live module: timm's `pretrained_cfg`, transformers' `config` and image processor.

Imports neither library. The front end captures the module; this file finds its image size, preprocessing and class names.
See also: transform.py (to_preprocess), checkpoints/timm_config.py and checkpoints/transformers_config.py (config files).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.models import architectures
from fqvit.models.checkpoints.checkpoint import tensors_hash
from fqvit.models.checkpoints.hub import PREPROCESSORS, decode_config
from fqvit.models.checkpoints.preprocessing import read_preprocessor
from fqvit.models.checkpoints.timm_config import read_pretrained
from fqvit.models.checkpoints.transformers_config import labels_of, pair
from fqvit.models.transform import Transform, merged, to_preprocess


@dataclass(frozen=True)
class Live:
    """The metadata of a live module.

    name: timm's architecture, or the name of the class   image: height and width, None if unknown
    labels: class names, for classifiers that have them   source: value for FloatModel.source, with the sha256 of the weights
    projects: the last layer is CLIP's projection to the embedding, not a classifier. Other projections are
    recognized by their missing bias, but timm's has a bias.
    """

    name: str
    image: tuple[int, int] | None
    channels: int
    transform: Transform
    labels: tuple[str, ...] | None
    source: str
    projects: bool = False

    def preprocess(self, size: tuple[int, int] | None = None) -> tuple[Preprocess, tuple[str, ...]]:
        """Return the preprocessing for images of `size` (default: the module's own), and one sentence per assumption."""
        image = size or self.image
        if image is None:
            raise FqvitError(f"{self.name}: the image size of the module is unknown. Pass size=(height, width).")
        transform = self.transform
        preprocess, assumed = to_preprocess(transform, image, self.channels, self.name)
        if transform.source and transform.source != OWN:
            assumed = (f"preprocessing: that of {transform.source}", *assumed)
        return preprocess, assumed


OWN = "the module's pretrained_cfg"


def describe(module: nn.Module, processor: object = None) -> Live:
    """Describe a module of timm or transformers. For other modules, only the class, the channels and the weights are known.

    processor: an image processor of transformers, or the contents of its preprocessor_config.json
    """
    found = _describe(module)
    if processor is None:
        return found
    given: object = getattr(processor, "image_processor", processor)  # a processor of CLIP also has a tokenizer
    settings = given if isinstance(given, Mapping) else given.to_dict() if hasattr(given, "to_dict") else None
    if settings is None:
        raise FqvitError(f"processor: {type(processor).__name__}, expected an image processor of transformers.")
    transform = read_preprocessor(settings, found.name, f"the processor {type(given).__name__}")
    return replace(found, transform=merged(transform, found.transform))


def _describe(module: nn.Module) -> Live:
    source = f"module sha256:{tensors_hash(_tensors(module))}"
    cfg = _as_dict(getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None))
    if cfg is not None:
        return _timm(module, cfg, source)
    config: Any = getattr(module, "config", None)
    if hasattr(config, "to_dict") and hasattr(config, "model_type"):
        return _transformers(module, config, source)
    return Live(type(module).__name__, None, _channels(module), Transform(), None, source)


def _tensors(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.state_dict().items() if value.numel()}


def _timm(module: nn.Module, cfg: Mapping[str, Any], source: str) -> Live:
    name = str(cfg.get("architecture") or type(module).__name__)
    transform = read_pretrained({key: cfg.get(key) for key in KEPT}, name, OWN)
    tag = cfg.get("tag")
    known = architectures.transform(f"{name}.{tag}" if tag else name)
    transform = Transform(**{**vars(merged(transform, known or Transform())), "source": OWN})
    built = getattr(getattr(module, "patch_embed", None), "img_size", None)
    image = pair(list(built), "img_size", name, "the module") if isinstance(built, tuple | list) else transform.image
    labels = cfg.get("label_names")
    names = tuple(map(str, labels)) if labels else None
    # The released image towers of CLIP; fine-tuned ones have another tag or another number of outputs.
    projects = "_clip_" in name and "ft_in" not in str(tag) and getattr(module, "num_classes", None) == cfg.get("num_classes")
    return Live(name, image, _channels(module), transform, names, source, projects)


KEPT = ("mean", "std", "crop_pct", "crop_mode", "interpolation", "input_size")


def _transformers(module: nn.Module, settings: Any, source: str) -> Live:
    """Describe a module of transformers. settings: its config object

    The module has no preprocessing of its own, but it often names the folder or the repository that it was loaded from.
    """
    name = type(module).__name__
    config: Mapping[str, Any] = settings.to_dict()
    vision = config.get("vision_config")
    inner = vision if isinstance(vision, Mapping) else config
    image = pair(inner.get("image_size"), "image_size", name, "the module's config")
    classifies = re.search(r"ForImageClassification", name) is not None
    labels = labels_of(config, name) if classifies else None
    transform = Transform(image=image)
    if (file := _preprocessor_file(settings)) is not None:
        found = decode_config(file, name)
        found = found.get("image_processor", found)
        transform = merged(read_preprocessor(found, name, f"{file.name} of {settings.name_or_path}"), transform)
    return Live(name, image, _channels(module), transform, labels, source)


def _preprocessor_file(settings: Any) -> Path | None:
    """Return preprocessor_config.json of the folder or cached hub repository that a config comes from. Never downloads it."""
    where = str(getattr(settings, "name_or_path", "") or "")
    if not where:
        return None
    for name in PREPROCESSORS:
        if Path(where).is_dir():
            if (Path(where) / name).is_file():
                return Path(where) / name
        elif (hub := sys.modules.get("huggingface_hub")) is not None:  # imported by transformers when it loaded the module
            commit = getattr(settings, "_commit_hash", None)
            try:
                found = hub.try_to_load_from_cache(where, name, revision=commit)
            except ValueError:  # not the name of a repository
                return None
            if isinstance(found, str):
                return Path(found)
    return None


def _channels(module: nn.Module) -> int:
    """Return the number of channels of the first convolution, 3 if there is none."""
    first = next((part for part in module.modules() if isinstance(part, nn.Conv2d)), None)
    return 3 if first is None else int(first.in_channels)


def _as_dict(cfg: object) -> Mapping[str, Any] | None:
    if isinstance(cfg, Mapping):
        return cfg or None
    if is_dataclass(cfg):
        return {f.name: getattr(cfg, f.name) for f in fields(cfg)}
    return None
