"""Load a float model from a checkpoint or a live module, and capture it as a graph unless it is built from leaf modules.

See also: models/load.py (checkpoints), models/live.py (metadata of live modules), capture.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fqvit.errors import FqvitError
from fqvit.frontend.capture import capture, share_weights
from fqvit.models import live, load
from fqvit.models.graph import Captured
from fqvit.models.load import FloatModel, Weights
from fqvit.models.locate import located, named

Size = int | tuple[int, int]


def load_model(
    name: str | Path | nn.Module | FloatModel | None = None,
    weights: Weights | Size | Tensor | None = None,
    classes: Sequence[str] | None = None,
    *,
    size: Size | None = None,
    processor: object = None,
    **settings: Any,
) -> FloatModel:
    """Load a float model, ready to be calibrated.

    name: a model name of the zoo, of timm or of an original release; hf:ORG/NAME; a checkpoint file or folder; or a live torch
    module, which takes normalised images [N, channels, height, width] and returns logits or features. Not needed for weights
    that identify their model.
    weights: a file, a folder with config.json, hf:ORG/NAME, or a state dict. For a live module: the image size, or an example
    of its input; by default the module's own size.
    classes: class names, one per logit   size: height and width of the images, if not those of the checkpoint or module
    processor: for a live module of transformers: its image processor, which has the preprocessing. By default, the
    preprocessing is read from the folder or the cached hub repository that the module was loaded from.
    settings: for checkpoints, if neither their name nor their config has them: heads (a number), pool ("token", "avg", ...),
    activation ("gelu", "gelu_tanh", "quick_gelu"), qkv_bias (True or False); features=True leaves out the classifier
    """
    if isinstance(name, FloatModel):
        return _loaded(name, (weights, classes, size, processor, *settings))
    if isinstance(name, nn.Module):
        if settings:
            raise FqvitError(f"{', '.join(settings)}: for checkpoints only. Leave this out for a live module.")
        return _live(name, size if size is not None else weights, classes, processor)  # type: ignore[arg-type]
    if processor is not None:
        raise FqvitError("processor: for live modules only. A checkpoint has its own preprocessing.")
    if not isinstance(name, str | Path | None):
        raise FqvitError(f"model: got {type(name).__name__}, expected a name, a checkpoint, a torch module or hf:ORG/NAME.")
    if not isinstance(weights, str | Path | Mapping | None):
        raise FqvitError(f"weights: got {type(weights).__name__}, expected a checkpoint. Pass an image size as size=.")
    if name is not None and weights is None:
        name, weights = located(str(name), None)
        name, weights = named(weights) if weights is not None else (name, None)
    return captured(load.load_model(None if name is None else str(name), weights, classes, size=size, **settings))


def _loaded(model: FloatModel, others: tuple[object, ...]) -> FloatModel:
    """Return a model that is loaded already. others: the other arguments, which it would ignore"""
    if any(other is not None for other in others):
        raise FqvitError(f"{model.name}: loaded already. Pass only the model, or the original module or checkpoint.")
    return model


def captured(model: FloatModel) -> FloatModel:
    """Return the model with its plain module captured. Models built from leaf modules are returned as they are."""
    if not load.is_plain(model.module):
        return model
    p = model.preprocess
    graph = capture(model.module, (p.channels, p.height, p.width))
    share_weights(graph, model.module)  # safe, because no caller has this module and could change it
    if model.classes is not None:
        graph.use_as_classifier(True)
    return dataclasses.replace(model, module=graph, original=model.module)


def _live(module: nn.Module, given: Size | Tensor | None, classes: Sequence[str] | None, processor: object) -> FloatModel:
    if isinstance(module, Captured):
        raise FqvitError("load_model: this module was captured before. Pass the original one.")
    if isinstance(given, Tensor):
        if given.ndim != 4:
            raise FqvitError(f"example: shape {list(given.shape)}, expected [N, channels, height, width].")
        size: tuple[int, int] | None = (given.shape[2], given.shape[3])
    elif given is None or isinstance(given, tuple):
        size = given
    elif isinstance(given, int):
        size = (given, given)
    else:
        raise FqvitError(f"size: got {type(given).__name__}, expected a number of pixels, (height, width) or an example.")
    described = live.describe(module, processor)
    preprocess, assumed = described.preprocess(size)
    graph = capture(module, (preprocess.channels, preprocess.height, preprocess.width))
    names = tuple(classes) if classes is not None else described.labels
    if classes is not None or described.projects:
        graph.use_as_classifier(classes is not None)
    count = graph.classes
    if names is not None and count is not None and len(names) != count:
        if classes is not None:
            raise FqvitError(f"{described.name}: {len(names)} class names for {count} logits. Pass one name per logit.")
        names = None
    names = names if count is not None else None
    return FloatModel(described.name, graph, preprocess, names, described.source, assumed=assumed, original=module)
