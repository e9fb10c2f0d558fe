"""Find a model's files on the Hugging Face Hub (hf:ORG/NAME[@REVISION]) or in a folder, and read its config.json.

huggingface_hub is imported for downloads only; transformers is never needed. Configurations that our modules cannot compute are
rejected. See also: checkpoint.py (reads the weights), fold.py (uses the Hints that are read here).
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from fqvit.errors import FqvitError
from fqvit.models.checkpoints.fold import Hints

ADDRESS = re.compile(r"hf:([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
SUPPORTED = ("vit", "deit", "swin")
# timm architectures with another activation or order of norms, which cannot be detected from their keys.
UNSUPPORTED_VARIANTS = re.compile(r"quickgelu|clip|siglip|gelu|_rpn_|_pe_")
RESAMPLE = {2: "bilinear", 3: "bicubic"}  # keys: Pillow's filter numbers
Side = Annotated[int, msgspec.Meta(ge=1, le=8192)]
T = TypeVar("T")


@dataclass(frozen=True)
class Files:
    """The files of one model. label: the model's name in error messages"""

    label: str
    config: Path
    weights: Path
    preprocessor: Path | None


class _Pretrained(msgspec.Struct):
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop_pct: Annotated[float, msgspec.Meta(ge=0.1, le=1)] | None = None
    interpolation: str | None = None


class _Arguments(msgspec.Struct):
    """timm's model_args: arguments that override those of the architecture."""

    act_layer: str | None = None
    norm_layer: str | None = None
    block_fn: str | None = None
    global_pool: str | None = None


class _Config(msgspec.Struct):
    """The fields of config.json that are used, as written by transformers or timm."""

    model_type: str | None = None
    hidden_act: str | None = None
    layer_norm_eps: float | None = None
    image_size: int | tuple[int, int] | None = None
    num_attention_heads: int | None = None
    num_heads: tuple[int, ...] | None = None
    id2label: dict[int, str] | None = None
    architecture: str | None = None
    label_names: tuple[str, ...] | None = None
    pretrained_cfg: _Pretrained | None = None
    global_pool: str | None = None
    model_args: _Arguments | None = None


class _Preprocessor(msgspec.Struct):
    image_mean: tuple[float, ...] | None = None
    image_std: tuple[float, ...] | None = None
    do_resize: bool | None = None
    size: Side | dict[str, Side] | None = None
    resample: int | None = None


def is_address(weights: object) -> bool:
    return isinstance(weights, str) and weights.startswith("hf:")


def download(address: str) -> Files:
    """Download a model's files into huggingface_hub's cache; HF_ENDPOINT selects another hub."""
    match = ADDRESS.fullmatch(address)
    if match is None:
        raise FqvitError(f"{address}: not an address on the hub, expected hf:ORG/NAME or hf:ORG/NAME@REVISION.")
    repository, revision = match[1], match[2]
    config = _fetch(address, repository, "config.json", revision)
    weights = next(filter(None, (_fetch(address, repository, name, revision) for name in WEIGHTS)), None)
    if config is None or weights is None:
        lacking = "config.json" if config is None else " or ".join(WEIGHTS)
        raise FqvitError(f"{address}: has no {lacking}. Choose a classifier saved by transformers or timm.")
    return Files(address, config, weights, _fetch(address, repository, "preprocessor_config.json", revision))


def in_folder(folder: Path) -> Files | None:
    """Return the files of a folder written by save_pretrained; None if the folder has no config.json."""
    if not (folder / "config.json").is_file():
        return None
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise FqvitError(f"{folder}: has config.json but neither {' nor '.join(WEIGHTS)}. Save the model there again.")
    preprocessor = folder / "preprocessor_config.json"
    return Files(folder.name, folder / "config.json", weights, preprocessor if preprocessor.is_file() else None)


def read_hints(files: Files) -> Hints:
    """Read config.json and preprocessor_config.json; raises FqvitError for unsupported configurations."""
    config = _decode(files.config, _Config, files.label)
    if config.architecture is None and config.model_type not in SUPPORTED:
        expected = ", ".join(SUPPORTED)
        raise FqvitError(f"{files.label}: model_type '{config.model_type}', expected {expected}. Choose another model.")
    if config.hidden_act not in (None, "gelu"):
        raise FqvitError(f"{files.label}: hidden_act '{config.hidden_act}', expected 'gelu' (with the exact error function).")
    arguments = config.model_args or _Arguments()
    _check_plain_architecture(config.architecture, arguments, files.label)
    labels = config.label_names
    if config.id2label:
        if sorted(config.id2label) != list(range(len(config.id2label))):
            raise FqvitError(f"{files.label}: the keys of id2label are not 0, 1, 2, ... The config.json is damaged.")
        labels = tuple(config.id2label[i] for i in range(len(config.id2label)))
    size = config.image_size
    heads = config.num_heads or ((config.num_attention_heads,) if config.num_attention_heads else None)
    read = Hints() if config.pretrained_cfg is None else _timm_transform(config.pretrained_cfg, files.label)
    if files.preprocessor is not None:
        read = _transform(_decode(files.preprocessor, _Preprocessor, files.label), files.label)
    _check_finite(files.label, files.config.name, "layer_norm_eps", (config.layer_norm_eps or 0,))
    _check_finite(files.label, (files.preprocessor or files.config).name, "mean", read.mean or ())
    _check_finite(files.label, (files.preprocessor or files.config).name, "std", read.std or ())
    return replace(
        read,
        heads=heads,
        eps=config.layer_norm_eps,
        image=(size, size) if isinstance(size, int) else size,
        labels=labels,
        pool=config.global_pool or arguments.global_pool,
        architecture=config.architecture,
        model_type=config.model_type,
    )


def _check_finite(label: str, file: str, name: str, values: tuple[float, ...]) -> None:
    """Raise FqvitError for NaN and infinity, which a config file can contain as strings: `_decode` converts them to numbers."""
    wrong = next((value for value in values if not math.isfinite(value)), None)
    if wrong is not None:
        raise FqvitError(f"{label}: {file}: {wrong} in {name}, expected finite numbers. The file is damaged.")


def _check_plain_architecture(architecture: str | None, arguments: _Arguments, label: str) -> None:
    """Raise FqvitError for settings that change the function of a timm model without changing its keys."""
    if architecture is not None and UNSUPPORTED_VARIANTS.search(architecture):
        raise FqvitError(
            f"{label}: architecture '{architecture}' has another activation or norm. Use a plain ViT, DeiT or Swin."
        )
    for name, value, usual in [
        ("act_layer", arguments.act_layer, ("gelu",)),
        ("norm_layer", arguments.norm_layer, ("layernorm",)),
        ("block_fn", arguments.block_fn, ()),
    ]:
        if value is not None and value not in usual:
            raise FqvitError(
                f"{label}: model_args has {name} '{value}', which is not supported. Use a plain ViT, DeiT or Swin."
            )


def _timm_transform(found: _Pretrained, label: str) -> Hints:
    interpolation = None if found.interpolation is None else _filter(found.interpolation, label)
    return Hints(mean=found.mean, std=found.std, crop=found.crop_pct, interpolation=interpolation)


def _transform(found: _Preprocessor, label: str) -> Hints:
    """Convert a preprocessor config to Hints.

    transformers resizes images to a given height and width, which may distort them. Here the short side is resized to the
    smaller of the two, and the image is then cropped.
    """
    size = found.size
    if isinstance(size, dict):
        sides = [size[key] for key in ("shortest_edge", "height", "width") if key in size]
        size = min(sides, default=None)
    if found.do_resize is False:
        size = None
    if found.resample is None:
        return Hints(mean=found.image_mean, std=found.image_std, resize=size)
    interpolation = _filter(RESAMPLE.get(found.resample, f"resample {found.resample}"), label)
    return Hints(mean=found.image_mean, std=found.image_std, resize=size, interpolation=interpolation)


def _filter(name: str, label: str) -> Literal["bicubic", "bilinear"]:
    if name == "bicubic":
        return "bicubic"
    if name == "bilinear":
        return "bilinear"
    raise FqvitError(f"{label}: interpolation '{name}', expected bicubic or bilinear. Choose another model.")


def _decode(path: Path, kind: type[T], label: str) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind, strict=False)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FqvitError(f"{label}: {path.name}: {error}. The file is damaged, or the model is not supported.") from error


def _fetch(address: str, repository: str, name: str, revision: str | None) -> Path | None:
    """Download one file and return its local path; None if the repository has no such file."""
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError as error:
        raise FqvitError(f"{address}: huggingface_hub is not installed. Run `pip install huggingface_hub`.") from error
    try:
        # huggingface_hub reads HF_ENDPOINT only when it is imported; passing it here allows setting it later.
        return Path(hub.hf_hub_download(repository, name, revision=revision, endpoint=os.environ.get("HF_ENDPOINT")))
    except errors.GatedRepoError as error:
        raise FqvitError(f"{address}: the model is gated. Accept its terms on the hub, then run `hf auth login`.") from error
    except errors.RepositoryNotFoundError as error:
        raise FqvitError(f"{address}: no such model on the hub (or it is private). Check the name.") from error
    except errors.RevisionNotFoundError as error:
        raise FqvitError(f"{address}: no revision '{revision}'. Leave it out to get the newest one.") from error
    except errors.LocalEntryNotFoundError as error:
        advice = "Check the network, or download the file elsewhere and pass its path."
        raise FqvitError(f"{address}: the hub cannot be reached. {advice}") from error
    except errors.EntryNotFoundError:
        return None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FqvitError(f"{address}: download failed ({first}). Try again, or download the file and pass its path.") from error
