"""Find a model's files on the Hugging Face Hub (hf:ORG/NAME[@REVISION]) or in a folder, and read its config files.

Neither transformers nor timm is needed. See also: system/hub.py (downloads), checkpoint.py (reads the weights),
transformers_config.py, timm_config.py and openclip_config.py (check the fields).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from fqvit.errors import FqvitError
from fqvit.models.checkpoints import openclip_config, timm_config, transformers_config
from fqvit.models.checkpoints.hints import Hints
from fqvit.models.checkpoints.preprocessing import read_preprocessor
from fqvit.system import hub

WEIGHTS = ("model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors", "open_clip_pytorch_model.bin")
CONFIGS = ("config.json", "open_clip_config.json")
PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class Files:
    """The files of one model. label: the model's name in error messages"""

    label: str
    config: Path
    weights: Path
    preprocessor: Path | None


def download(text: str) -> Files:
    """Download a model's files into huggingface_hub's cache; HF_ENDPOINT selects another hub."""
    address = hub.parse(text)
    if address.file is not None:
        raise FqvitError(f"{text}: names a file, expected hf:ORG/NAME or hf:ORG/NAME@REVISION.")

    def first(names: tuple[str, ...]) -> Path | None:
        return next(filter(None, (hub.fetch(address, name) for name in names)), None)

    config = first(CONFIGS)
    weights = None if config is None else first(_weights_of(config.name))
    if config is None or weights is None:
        lacking = " or ".join(CONFIGS if config is None else _weights_of(config.name))
        raise FqvitError(f"{text}: has no {lacking}. Choose a model saved by transformers, timm or OpenCLIP.")
    return Files(text, config, weights, first(PREPROCESSORS))


def in_folder(folder: Path) -> Files | None:
    """Return the files of a folder that transformers, timm or OpenCLIP wrote; None if the folder has none of CONFIGS."""

    def first(names: tuple[str, ...]) -> Path | None:
        return next((folder / name for name in names if (folder / name).is_file()), None)

    config = first(CONFIGS)
    if config is None:
        return None
    weights = first(_weights_of(config.name))
    if weights is None:
        wanted = " or ".join(_weights_of(config.name))
        raise FqvitError(f"{folder}: has {config.name}, but no {wanted}. Save the model there again.")
    return Files(folder.name, config, weights, first(PREPROCESSORS))


def _weights_of(config: str) -> tuple[str, ...]:
    """Return the names of the weight files that belong to a config. A repository may have files of several libraries."""
    return WEIGHTS[:2] if config == "config.json" else (*WEIGHTS[2:], *WEIGHTS[:2])


def read_hints(files: Files) -> Hints:
    """Read the config and the preprocessor's config; raises FqvitError for fields and values that are not understood."""
    config = decode_config(files.config, files.label)
    if openclip_config.is_openclip(config):
        return openclip_config.read_config(config, files.label)
    if timm_config.is_timm(config):
        hints = timm_config.read_config(config, files.label)
    else:
        hints = transformers_config.read_config(config, files.label)
    if files.preprocessor is None:
        return hints
    found = decode_config(files.preprocessor, files.label)
    found = found.get("image_processor", found)  # processor_config.json describes a tokenizer too
    return replace(hints, transform=read_preprocessor(found, files.label, files.preprocessor.name))


def decode_config(path: Path, label: str) -> Mapping[str, Any]:
    """Read a config file; raises FqvitError if it is not a JSON object. label: the model's name in messages"""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FqvitError(f"{label}: {path.name}: {error}. The file is damaged; download it again.") from error
    if not isinstance(found, dict):
        raise FqvitError(f"{label}: {path.name}: a JSON {type(found).__name__}, expected an object. The file is damaged.")
    return found
