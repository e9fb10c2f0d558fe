"""Find a model's files on the Hugging Face Hub (hf:ORG/NAME[@REVISION]) or in a folder, and read its config files.

huggingface_hub is imported for downloads only; transformers and timm are never needed.
See also: checkpoint.py (reads the weights), transformers_config.py, timm_config.py and openclip_config.py (check the fields).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from fqvit.errors import FqvitError
from fqvit.models.checkpoints import openclip_config, timm_config, transformers_config
from fqvit.models.checkpoints.hints import Hints
from fqvit.models.checkpoints.preprocessing import read_preprocessor

ADDRESS = re.compile(r"hf:([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
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


def is_address(weights: object) -> bool:
    return isinstance(weights, str) and weights.startswith("hf:")


def download(address: str) -> Files:
    """Download a model's files into huggingface_hub's cache; HF_ENDPOINT selects another hub."""
    match = ADDRESS.fullmatch(address)
    if match is None:
        raise FqvitError(f"{address}: not a valid hf: address, expected hf:ORG/NAME or hf:ORG/NAME@REVISION.")
    repository, revision = match[1], match[2]

    def first(names: tuple[str, ...]) -> Path | None:
        return next(filter(None, (_fetch(address, repository, name, revision) for name in names)), None)

    config = first(CONFIGS)
    weights = None if config is None else first(_weights_of(config.name))
    if config is None or weights is None:
        lacking = " or ".join(CONFIGS if config is None else _weights_of(config.name))
        raise FqvitError(f"{address}: has no {lacking}. Choose a model saved by transformers, timm or OpenCLIP.")
    return Files(address, config, weights, first(PREPROCESSORS))


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
    """Read the config and the preprocessor's config; raises FqvitError for whatever is not understood."""
    config = _decode(files.config, files.label)
    if openclip_config.is_openclip(config):
        return openclip_config.read_config(config, files.label)
    if timm_config.is_timm(config):
        hints = timm_config.read_config(config, files.label)
    else:
        hints = transformers_config.read_config(config, files.label)
    if files.preprocessor is None:
        return hints
    found = _decode(files.preprocessor, files.label)
    found = found.get("image_processor", found)  # processor_config.json describes a tokenizer too
    return replace(hints, transform=read_preprocessor(found, files.label, files.preprocessor.name))


def _decode(path: Path, label: str) -> Mapping[str, Any]:
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FqvitError(f"{label}: {path.name}: {error}. The file is damaged; download it again.") from error
    if not isinstance(found, dict):
        raise FqvitError(f"{label}: {path.name}: a JSON {type(found).__name__}, expected an object. The file is damaged.")
    return found


def _fetch(address: str, repository: str, name: str, revision: str | None) -> Path | None:
    """Download one file and return its local path; None if the repository has no such file."""
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError as error:
        raise FqvitError(f"{address}: huggingface_hub is not installed. Run `pip install huggingface_hub`.") from error
    try:
        # huggingface_hub reads HF_ENDPOINT only on import; passing the endpoint here allows setting the variable later.
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
