"""Load a float model by name from a checkpoint, with its preprocessing, class names and source.

See also: zoo.py (the known models, one row each), checkpoints/checkpoint.py (files), checkpoints/hub.py (downloads),
checkpoints/keymaps.py (key names), checkpoints/fold.py (adapts a row's config to the checkpoint).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.models import zoo
from fqvit.models.checkpoints import checkpoint, fold, hub
from fqvit.models.checkpoints.checkpoint import Checkpoint
from fqvit.models.checkpoints.fold import Hints
from fqvit.models.checkpoints.keymaps import Canonical, to_timm
from fqvit.models.config import SwinConfig, ViTConfig
from fqvit.models.embedded import FMNIST_CLASSES, embedded_weights
from fqvit.models.swin import Swin
from fqvit.models.vit import ViT


@dataclass(frozen=True)
class FloatModel:
    """A float model with its preprocessing, class names and source.

    module: in eval mode, normalised images [N, C, H, W] -> logits   source: name and sha256 of the checkpoint
    square: only for a detector's head, which reads RoI features [N, *square] instead of images; preprocess is then that of the
    detector's images
    """

    name: str
    module: nn.Module
    preprocess: Preprocess
    classes: tuple[str, ...] | None
    source: str
    square: tuple[int, int, int] | None = None


def load_model(
    name: str,
    weights: str | Path | Mapping[str, Tensor] | None = None,
    classes: Sequence[str] | None = None,
) -> FloatModel:
    """Load the float model `name`.

    weights: a file, a folder with config.json, hf:ORG/NAME, or a state dict. The embedded models need none. If `name` itself is
    hf:ORG/NAME, the model is identified by the sizes in the checkpoint.
    classes: class names, one per logit; by default those of config.json, or of Fashion-MNIST for the embedded weights.
    """
    if hub.is_address(name):
        if weights is not None:
            raise FqvitError(f"{name}: the name already selects weights, but others were given. Pass only one of them.")
        weights = name
    row = None if hub.is_address(name) else zoo.find(name)
    found, hints = _read(row, weights)
    canonical = to_timm(found.tensors, found.label)
    row = row or _row_of(canonical, hints, found.label)
    config, state = fold.fit(canonical, row, hints, found.label)
    module = build(config)
    error = fold.mismatch(row.name, found.label, dict(module.state_dict()), state, canonical.origin)
    if error is not None:
        raise error
    module.load_state_dict(state)
    names = tuple(classes) if classes is not None else hints.labels
    if classes is None and row.embedded and weights is None:
        names = FMNIST_CLASSES
    if names is not None and len(names) != config.classes:
        problem = f"{len(names)} class names for {config.classes} logits in {found.label}"
        raise FqvitError(f"{row.name}: {problem}. Pass one name per logit.")
    return FloatModel(row.name, module.eval(), preprocess_of(row, config, hints, found.label), names, found.source)


def build(config: ViTConfig | SwinConfig) -> ViT | Swin:
    """Build a module with random weights, without changing torch's random state."""
    with torch.random.fork_rng(devices=[]):
        return Swin(config) if isinstance(config, SwinConfig) else ViT(config)


def _read(row: zoo.Row | None, weights: str | Path | Mapping[str, Tensor] | None) -> tuple[Checkpoint, Hints]:
    if isinstance(weights, Mapping):
        return checkpoint.from_mapping(weights), Hints()
    if weights is None:
        assert row is not None
        if not row.embedded:
            raise FqvitError(f"{row.name}: no weights given. Pass a checkpoint file (--weights FILE) or hf:ORG/NAME.")
        return checkpoint.read_checkpoint(embedded_weights(row.name)), Hints()
    if isinstance(weights, str) and hub.is_address(weights):
        files: hub.Files | None = hub.download(weights)
    else:
        files = hub.in_folder(Path(weights))
    if files is None:
        return checkpoint.read_checkpoint(Path(weights)), Hints()
    hints = hub.read_hints(files)  # before the weights, so that an unsupported config fails early
    found = checkpoint.read_checkpoint(files.weights)
    return replace(found, label=files.label, source=f"{files.label} {found.source}"), hints


def _row_of(canonical: Canonical, hints: Hints, label: str) -> zoo.Row:
    """Find the row for weights that were given without a model name."""
    named = zoo.lookup(hints.architecture) if hints.architecture is not None else None
    if named is not None:
        return named
    fold.check_supported(canonical, label)
    series, (width, depths, prefix) = fold.sizes_of(canonical)
    if hints.model_type == "deit" or "deit" in f"{label} {hints.architecture}".lower():
        series = "deit"
    row = zoo.likely(series, width, depths, prefix, hints.image)
    if row is None:
        shown = "-".join(map(str, depths))
        raise FqvitError(f"{label}: width {width} and depth {shown} match no known model. `fqvit models` lists them.")
    return row


def preprocess_of(row: zoo.Row, config: ViTConfig | SwinConfig, hints: Hints, label: str) -> Preprocess:
    """Adapt the row's preprocessing to the image size and channels of the checkpoint and to its config files."""
    p = row.preprocess
    height, width = config.image
    short = min(height, width)
    if hints.crop is not None:
        resize = math.floor(short / hints.crop)
    elif hints.resize is not None and hints.resize >= short:  # a smaller value was meant for another image size
        resize = hints.resize
    elif config.image == row.config.image:
        resize = p.resize
    else:  # as in timm: no crop at 384 and above; below, the same fraction as in the row
        resize = short if short >= 384 else short * p.resize // min(p.height, p.width)
    mean, std = hints.mean or p.mean, hints.std or p.std
    if config.channels == 1 and len(mean) == 3:  # a greyscale checkpoint of an RGB row
        mean, std = (sum(mean) / 3,), (sum(std) / 3,)
    elif config.channels == 3 and len(mean) == 1:
        mean, std = mean * 3, std * 3
    interpolation = hints.interpolation or p.interpolation
    try:
        return Preprocess(height, width, config.channels, resize, interpolation, mean, std)  # type: ignore[arg-type]
    except ValueError as error:
        raise FqvitError(f"{label}: {error}. Its config.json or preprocessor_config.json is damaged.") from error
