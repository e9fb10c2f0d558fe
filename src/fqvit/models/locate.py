"""Decide whether a model argument is a known name, a checkpoint, a folder or an hf: name. Does not import torch."""

from __future__ import annotations

import os
from pathlib import Path

from fqvit.errors import FqvitError
from fqvit.models import architectures, zoo

CHECKPOINTS = (".safetensors", ".pth", ".pt", ".bin", ".npz")


def located(name: str | None, weights: str | None) -> tuple[str | None, str | None]:
    """Return the name and the weights of a model. A name that is a file or a folder becomes the weights.

    Raises FqvitError for an unknown name, before torch is imported. If weights are given, the name is not checked here: the
    checkpoint may determine the model.
    """
    if name is None or weights is not None or name.startswith("hf:"):
        return name, weights
    path = Path(name)
    if "/" in name or os.sep in name or path.suffix in CHECKPOINTS:
        if not path.exists():
            raise FqvitError(f"{name}: no such file or folder. For a model of the Hugging Face Hub, pass hf:ORG/NAME.")
        return None, name
    known = zoo.lookup(name) is not None or architectures.lookup(name) is not None
    if not known and path.exists():
        return None, name
    return zoo.check(name), None


def named(weights: str) -> tuple[str | None, str | None]:
    """Return (name, weights) of a checkpoint given without a name. The name is taken from the file if it is a known name.

    Otherwise, and for a folder, the name is None: config.json or the weights decide. An hf: name counts as a name.
    """
    if weights.startswith("hf:"):
        return weights, None
    stem = Path(weights).stem
    known = stem.split(".")[0] in zoo.BY_NAME or architectures.lookup(stem) is not None
    return stem.split(".")[0] if known and not Path(weights).is_dir() else None, weights
