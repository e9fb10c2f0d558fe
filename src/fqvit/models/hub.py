"""hf:ORG/NAME[@REVISION] and folders of Hugging Face files: config.json beside the weights.

Needs huggingface_hub for downloads only, imports it late, and reads config.json itself: transformers is never needed.
Refuses configurations our modules do not compute. Neighbours: checkpoint.py reads the weights, fold.py takes the hints.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from fqvit.errors import FqvitError
from fqvit.models.fold import Hints

ADDRESS = re.compile(r"hf:([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
SUPPORTED = ("vit", "deit", "swin")
T = TypeVar("T")


@dataclass(frozen=True)
class Files:
    """`label` is what errors call the model."""

    label: str
    config: Path
    weights: Path
    preprocessor: Path | None


class _Pretrained(msgspec.Struct):
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


class _Config(msgspec.Struct):
    """The fields of a config.json that matter, of transformers models and of timm's on the hub."""

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


class _Preprocessor(msgspec.Struct):
    image_mean: tuple[float, ...] | None = None
    image_std: tuple[float, ...] | None = None


def is_address(weights: object) -> bool:
    return isinstance(weights, str) and weights.startswith("hf:")


def download(address: str) -> Files:
    """Fetches a model's files into huggingface_hub's cache; HF_ENDPOINT chooses another hub."""
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
    """The files of a folder written by save_pretrained; None where it is no such folder."""
    if not (folder / "config.json").is_file():
        return None
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise FqvitError(f"{folder}: has config.json but neither {' nor '.join(WEIGHTS)}. Save the model there again.")
    preprocessor = folder / "preprocessor_config.json"
    return Files(folder.name, folder / "config.json", weights, preprocessor if preprocessor.is_file() else None)


def read_hints(files: Files) -> Hints:
    config = _decode(files.config, _Config, files.label)
    if config.architecture is None and config.model_type not in SUPPORTED:
        expected = ", ".join(SUPPORTED)
        raise FqvitError(f"{files.label}: model_type '{config.model_type}', expected {expected}. Choose another model.")
    if config.hidden_act not in (None, "gelu"):
        raise FqvitError(f"{files.label}: hidden_act '{config.hidden_act}', expected 'gelu' (with the exact error function).")
    labels = config.label_names
    if config.id2label:
        if sorted(config.id2label) != list(range(len(config.id2label))):
            raise FqvitError(f"{files.label}: id2label does not number its classes 0, 1, 2, ... The config.json is damaged.")
        labels = tuple(config.id2label[i] for i in range(len(config.id2label)))
    size = config.image_size
    heads = config.num_heads or ((config.num_attention_heads,) if config.num_attention_heads else None)
    mean, std = _normalisation(files, config)
    return Hints(
        heads=heads,
        eps=config.layer_norm_eps,
        image=(size, size) if isinstance(size, int) else size,
        labels=labels,
        mean=mean,
        std=std,
        architecture=config.architecture,
        model_type=config.model_type,
    )


def _normalisation(files: Files, config: _Config) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    if files.preprocessor is not None:
        found = _decode(files.preprocessor, _Preprocessor, files.label)
        return found.image_mean, found.image_std
    if config.pretrained_cfg is not None:
        return config.pretrained_cfg.mean, config.pretrained_cfg.std
    return None, None


def _decode(path: Path, kind: type[T], label: str) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FqvitError(f"{label}: {path.name}: {error}. The file is damaged or not of a supported model.") from error


def _fetch(address: str, repository: str, name: str, revision: str | None) -> Path | None:
    """The local copy of one file; None where the repository has no such file."""
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError as error:
        raise FqvitError(f"{address}: huggingface_hub is not installed. Run `pip install huggingface_hub`.") from error
    try:
        # The package reads HF_ENDPOINT once, when it is imported; given here, it may be set later.
        return Path(hub.hf_hub_download(repository, name, revision=revision, endpoint=os.environ.get("HF_ENDPOINT")))
    except errors.GatedRepoError as error:
        raise FqvitError(f"{address}: needs permission. Accept its terms on the hub, then `hf auth login`.") from error
    except errors.RepositoryNotFoundError as error:
        raise FqvitError(f"{address}: no such model on the hub (or it is private). Check the name.") from error
    except errors.RevisionNotFoundError as error:
        raise FqvitError(f"{address}: no revision '{revision}'. Leave it out for the newest.") from error
    except errors.LocalEntryNotFoundError as error:
        said = f"{address}: the hub cannot be reached. Check the network"
        raise FqvitError(f"{said}, or download the file elsewhere and pass its path.") from error
    except errors.EntryNotFoundError:
        return None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FqvitError(f"{address}: the hub refused ({first}). Try again, or download the file and pass its path.") from error
