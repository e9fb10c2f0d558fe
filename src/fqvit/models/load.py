"""Load a float model from a checkpoint, with its preprocessing, class names and source.

ViT, DeiT and Swin v1 classifiers are built from leaf modules; all other models are plain torch modules (`is_plain`), which the
front end captures. See also: zoo.py and architectures.py (names), checkpoints/ (files, layouts, configs), families/ (plain
modules), live.py (modules in memory).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.models import architectures, zoo
from fqvit.models.architectures import FamilyConfig
from fqvit.models.checkpoints import checkpoint, fold, hub, recognise, resample
from fqvit.models.checkpoints.checkpoint import Checkpoint
from fqvit.models.checkpoints.hints import Hints, agreed
from fqvit.models.checkpoints.keymaps import Canonical, to_timm
from fqvit.models.checkpoints.settle import settle
from fqvit.models.config import Activation, Pool, SwinConfig, VisionConfig, ViTConfig
from fqvit.models.embedded import FMNIST_CLASSES, embedded_weights
from fqvit.models.families.build import build_family
from fqvit.models.graph import Captured
from fqvit.models.swin import Swin
from fqvit.models.transform import Transform, merged, to_preprocess
from fqvit.models.vit import ViT
from fqvit.system.hub import is_address

Weights = str | Path | Mapping[str, Tensor]


@dataclass(frozen=True)
class FloatModel:
    """A float model with its preprocessing, class names and source.

    module: in eval mode, normalised images [N, C, H, W] -> logits or features   source: name and sha256 of the checkpoint
    square: only for a detector's head, which reads RoI features [N, *square] instead of images; preprocess is then that of the
    detector's images
    assumed: one sentence per setting that the checkpoint does not contain and that comes from the name or from a default
    original: the module that a captured graph was made from; speed comparisons run it in other runtimes
    """

    name: str
    module: nn.Module
    preprocess: Preprocess
    classes: tuple[str, ...] | None
    source: str
    square: tuple[int, int, int] | None = None
    assumed: tuple[str, ...] = ()
    original: nn.Module | None = None


def is_plain(module: nn.Module) -> bool:
    """Return whether a module is a plain torch module, to be captured, rather than one that is built from leaf modules."""
    return not isinstance(module, ViT | Swin)


def class_count(model: FloatModel) -> int | None:
    """Return the number of logits of a model; None if it has no classifier."""
    module = model.module
    return module.classes if isinstance(module, Captured) else int(module.config.classes)  # type: ignore[union-attr,arg-type]


def load_model(
    name: str | None = None,
    weights: Weights | None = None,
    classes: Sequence[str] | None = None,
    *,
    size: int | tuple[int, int] | None = None,
    heads: int | None = None,
    pool: Pool | None = None,
    activation: Activation | None = None,
    qkv_bias: bool | None = None,
    features: bool = False,
) -> FloatModel:
    """Load a float model. Families other than ViT, DeiT and Swin are plain modules, which frontend/load.py captures.

    name: a name from the zoo, from timm (with or without tag) or of an original release; needed only for settings that neither
    the weights nor their config.json show. hf:ORG/NAME is the same as weights="hf:ORG/NAME".
    weights: a file, a folder with config.json, hf:ORG/NAME, or a state dict. The embedded models need none.
    classes: class names, one per logit; by default those of config.json, or of Fashion-MNIST for the embedded weights.
    size: height and width of the images, if not those of the checkpoint; learned position embeddings are resampled
    heads, pool, activation, qkv_bias: settings that a state dict does not show, if neither a name nor a config has them
    features: leave out the classifier or the projection
    """
    if name is not None and is_address(name):
        if weights is not None:
            raise FqvitError(f"{name}: the name already selects weights, but other weights were given. Pass only one of them.")
        name, weights = None, name
    _check_choice("pool", pool, get_args(Pool))
    _check_choice("activation", activation, get_args(Activation))
    if weights is None:
        name = zoo.check(name or "")
    found, hints = _read(name, weights)
    label = found.label
    if name is not None and hints.architecture is None and hints.heads is None:
        zoo.refuse_undefined(name)
    given = Hints(heads=(heads,) if heads is not None else None, pool=pool, activation=activation, qkv_bias=qkv_bias)
    canonical = _without_unused(to_timm(found.tensors, label), hints, features)
    recognise.check_supported(canonical, label)
    if features and pool is not None:
        hints = replace(hints, pool=None)
    hints = agreed(replace(given, source="the arguments"), hints, label)
    asked = (size, size) if isinstance(size, int) else size
    hints, assumed = settle(canonical, hints, hints.architecture if hints.exact else name or hints.architecture, label)
    transform = _transform(name, hints)
    if _is_leaf_built(canonical, hints):
        model = _leaf_built(name, canonical, hints, transform, asked, found)
    else:
        model = _plain(name, canonical, hints, transform, asked, found)
    embedded = weights is None and name in zoo.BY_NAME
    return _with_classes(model, classes, FMNIST_CLASSES if embedded else hints.labels, assumed, label)


def _check_choice(setting: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise FqvitError(f"{setting}: {value!r}, expected one of {', '.join(choices)}.")


def load_for_program(
    name: str | None, weights: Weights | None, source: str, image: tuple[int, int], **settings: Any
) -> FloatModel:
    """Load the float model of a program, at the program's image size if the program was made from these weights.

    source: source of the program   image: height and width of its images   settings: as in load_model
    """
    model = load_model(name, weights, **settings)
    resized = (model.preprocess.height, model.preprocess.width) != image
    return load_model(name, weights, size=image, **settings) if resized and same_weights(model.source, source) else model


def same_weights(first: str, second: str) -> bool:
    """Return whether two sources name the same weights, by their sha256."""
    return first.rpartition("sha256:")[2] == second.rpartition("sha256:")[2]


def _with_classes(
    model: FloatModel, given: Sequence[str] | None, known: Sequence[str] | None, assumed: tuple[str, ...], label: str
) -> FloatModel:
    """Return the model with its class names and all assumptions. Features and projections have no class names."""
    config: Any = model.module.config
    outputs = config.classes if isinstance(config, ViTConfig | SwinConfig) else config.outputs
    projects = isinstance(config, VisionConfig) and not config.head_bias
    names = given if given is not None else None if projects or not outputs else known
    if names is not None and len(names) != outputs:
        problem = f"{len(names)} class names for {outputs} logits in {label}"
        raise FqvitError(f"{model.name}: {problem}. Pass one name per logit.")
    return replace(model, classes=None if names is None else tuple(names), assumed=(*assumed, *model.assumed))


def build(config: ViTConfig | SwinConfig) -> ViT | Swin:
    """Build a module from leaf modules with random weights, without changing torch's random state."""
    with torch.random.fork_rng(devices=[]):
        return Swin(config) if isinstance(config, SwinConfig) else ViT(config)


def _read(name: str | None, weights: Weights | None) -> tuple[Checkpoint, Hints]:
    if isinstance(weights, Mapping):
        return checkpoint.from_mapping(weights), Hints()
    if weights is None:
        row = zoo.lookup(name or "")
        if row is None or not row.embedded:
            raise FqvitError(f"{name}: no weights given. Pass a checkpoint file (--weights FILE) or hf:ORG/NAME.")
        return checkpoint.read_checkpoint(embedded_weights(row.name)), Hints()
    if isinstance(weights, str) and is_address(weights):
        files: hub.Files | None = hub.download(weights)
    else:
        files = hub.in_folder(Path(weights))
    if files is None:
        return checkpoint.read_checkpoint(Path(weights)), Hints()
    hints = hub.read_hints(files)  # before the weights, so that an unsupported config fails early
    found = checkpoint.read_checkpoint(files.weights)
    return replace(found, label=files.label, source=f"{files.label} {found.source}"), hints


def _without_unused(found: Canonical, hints: Hints, features: bool) -> Canonical:
    """Leave out the tensors that the model class does not use, and with `features` the classifier."""
    heads = ("head.", "head_dist.") if features else ()
    kept = {name: value for name, value in found.tensors.items() if not name.startswith((*hints.unused, *heads))}
    if "dist_token" in kept and "head.weight" not in kept:  # without its head, the distillation token is a register
        kept["reg_token"] = kept.pop("dist_token")
    return replace(found, tensors=kept)


def _transform(name: str | None, hints: Hints) -> Transform:
    """Return the preprocessing of the checkpoint's own config, completed with that of the named model."""
    transform = hints.transform
    for known in filter(None, (name, hints.architecture)):
        row, tagged = zoo.lookup(known), architectures.transform(known)
        stem, tag = architectures.resolve(known)
        if tagged is not None and (tag or stem not in zoo.BY_NAME):
            transform = merged(transform, tagged)
        elif row is not None:
            transform = merged(transform, zoo.transform_of(row))
    return transform


def _is_leaf_built(found: Canonical, hints: Hints) -> bool:
    """Return whether a checkpoint is a classifier of the kind that vit.py and swin.py build."""
    t = found.tensors
    family = recognise.family_of(found)
    if family == "swin":
        return True
    head, patch = t.get("head.weight"), t.get("patch_embed.proj.weight")
    if family != "vision" or head is None or patch is None or hints.activation not in (None, "gelu"):
        return False
    other = ("reg_token", "norm_pre.weight", "attn_pool.latent")
    square = head.ndim != 2 or patch.ndim != 4 or head.shape[1] == patch.shape[0]
    gated = any(".mlp.fc1_g." in name for name in t) or recognise.is_packed_swiglu(t)
    return (
        square
        and not gated
        and not any(name in t for name in other)
        and hints.pool in (None, "token", "avg")
        and "head.bias" in t
    )


def _row(name: str | None, found: Canonical, hints: Hints, label: str) -> zoo.Row:
    """Return the zoo row that matches the name, the architecture or the checkpoint's sizes; if none does, make a new row."""
    for known in filter(None, (name, hints.architecture if hints.exact else None)):
        if (row := zoo.lookup(known)) is not None:
            return row
    series, (width, depths, prefix) = fold.sizes_of(found)
    if hints.model_type == "deit" or "deit" in f"{label} {hints.architecture}".lower():
        series = "deit"
    row = zoo.likely(series, width, depths, prefix, hints.image)
    heads = fold.heads_of(found, hints, len(depths))
    same_heads = row is not None and heads == (row.config.heads if isinstance(row.config, SwinConfig) else (row.config.heads,))
    if row is not None and same_heads:
        return row
    return zoo.new_row(name or _short(label), width, depths, heads, prefix, hints.image, series == "swin")


def _leaf_built(
    name: str | None, canonical: Canonical, hints: Hints, transform: Transform, asked: tuple[int, int] | None, found: Checkpoint
) -> FloatModel:
    recognise.check_sizes(canonical, hints, found.label)
    row = _row(name, canonical, hints, found.label)
    if asked is not None:
        canonical, hints = resample.for_leaves(canonical, asked, hints, found.label)
    config, state = fold.fit(canonical, row, hints, found.label)
    module = build(config)
    error = fold.mismatch(row.name, found.label, dict(module.state_dict()), state, canonical.origin)
    if error is not None:
        raise error
    module.load_state_dict(state)
    if zoo.lookup(row.name) is not None:
        transform = merged(transform, zoo.transform_of(row))
    preprocess, assumed = to_preprocess(transform, config.image, config.channels, found.label)
    assumed = _with_origin(transform, hints, assumed)
    return FloatModel(row.name, module.eval(), preprocess, None, found.source, assumed=assumed)


def _plain(
    name: str | None, canonical: Canonical, hints: Hints, transform: Transform, asked: tuple[int, int] | None, found: Checkpoint
) -> FloatModel:
    label = found.label
    shown = name or hints.architecture or _short(label)
    config = recognise.infer(canonical, hints, label)
    state = fold.weights_of(canonical, label)
    image = asked or (transform.image if hints.resizable else None) or config.image
    config = resample.for_image(config, state, image, hints.antialias, label)
    module = build_family(config)
    error = fold.mismatch(shown, label, dict(module.state_dict()), state, canonical.origin)
    if error is not None:
        raise error
    module.load_state_dict(state)
    preprocess, assumed = to_preprocess(transform, config.image, config.channels, label)
    assumed = (*_constants(config, hints), *_with_origin(transform, hints, assumed))
    return FloatModel(shown, module.eval(), preprocess, None, found.source, assumed=assumed)


def _constants(config: FamilyConfig, hints: Hints) -> tuple[str, ...]:
    """Return one sentence per constant of the architecture that neither the weights nor a config contain."""
    found = () if hints.eps is not None else (f"eps of the norms: {config.eps:g}, the default of the checkpoint's layout",)
    theta = getattr(config, "theta", None)
    return found if theta is None or hints.theta is not None else (*found, f"theta of rotary embeddings: {theta:g}, DINOv3's")


def _short(label: str) -> str:
    """Return a name for a model without one: that of its repository, folder or file."""
    return label.removeprefix("hf:").split("@")[0].rsplit("/", 1)[-1].removesuffix(".safetensors")


def _with_origin(transform: Transform, hints: Hints, assumed: tuple[str, ...]) -> tuple[str, ...]:
    """Prepend a sentence about where the preprocessing comes from, unless that is the checkpoint's own config."""
    own = hints.transform.source
    if transform.source and transform.source != own:
        return (f"preprocessing: that of {transform.source}", *assumed)
    return assumed
