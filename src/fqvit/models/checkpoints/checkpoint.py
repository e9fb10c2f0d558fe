"""Checkpoint files -> named tensors, whatever their container: .safetensors, .pth/.pt/.bin, .npz.

Executes nothing from a file (torch.load with weights_only, numpy without pickle). Knows containers, not key names:
keymaps.py translates those.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import math
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from fqvit.errors import FqvitError

Container = Literal["safetensors", "torch", "npz"]

CONTAINERS: dict[str, Container] = {
    ".safetensors": "safetensors",
    ".pth": "torch",
    ".pt": "torch",
    ".bin": "torch",
    ".npz": "npz",
}
SUFFIX: dict[Container, str] = {"safetensors": ".safetensors", "torch": ".pth", "npz": ".npz"}

# Where training scripts put the weights inside what they save, in order of preference, and what wrappers put before names.
NESTS = ("model", "state_dict", "model_ema", "state_dict_ema")
WRAPPERS = ("module.", "_orig_mod.", "model.")
MOST_NESTS = 8  # a pickle can hold itself
# Bytes that an archive may unpack to: so many times its own, and some more. Weights hardly shrink.
MOST_TIMES, MORE = 20, 1 << 26
MEMORY = re.compile(r"(allocate|out of) memory|not enough memory", re.IGNORECASE)


@dataclass(frozen=True)
class Checkpoint:
    """`label` is what errors call it; `source` adds the sha256 of the file, or of the tensors where there is no file."""

    label: str
    source: str
    tensors: dict[str, Tensor]


def read_checkpoint(path: Path) -> Checkpoint:
    """The tensors of one file, on the CPU, in the file's own dtypes."""
    if not path.is_file():
        what = "is a folder without config.json" if path.is_dir() else "no such file"
        raise FqvitError(f"{path}: {what}. Pass a checkpoint file ({', '.join(CONTAINERS)}) or hf:ORG/NAME.")
    expected = CONTAINERS.get(path.suffix.lower())
    if expected is None:
        raise FqvitError(f"{path.name}: unknown kind of checkpoint '{path.suffix}', expected {', '.join(CONTAINERS)}.")
    found = _sniff(path)
    if found is None:
        raise FqvitError(f"{path.name}: not a {expected} file, or cut short. Download it again.")
    if found == "torch script":
        raise FqvitError(f"{path.name}: a TorchScript program, which is code and is not run. Save model.state_dict() instead.")
    if found != expected:
        raise FqvitError(f"{path.name}: is a {found} file, not a {expected} one. Rename it to {path.stem}{SUFFIX[found]}.")
    tensors = flatten(_read(path, found), path.name)
    _check_views(path, tensors)
    return Checkpoint(path.name, f"{path.name} sha256:{file_hash(path)}", tensors)


def from_mapping(state: Mapping[str, object]) -> Checkpoint:
    """The tensors of a live state dict; they are not copied."""
    tensors = flatten(state, "state dict")
    return Checkpoint("state dict", f"state dict sha256:{tensors_hash(tensors)}", tensors)


def flatten(content: object, label: str) -> dict[str, Tensor]:
    """The state dict inside what a training script saved, without its wrappers' prefixes."""
    for _ in range(MOST_NESTS):
        if not isinstance(content, Mapping):
            break
        nest = next((key for key in NESTS if isinstance(content.get(key), Mapping)), None)
        if nest is None:
            break
        content = content[nest]
    tensors = {str(k): v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, Mapping) else {}
    if not tensors:
        found = type(content).__name__ if not isinstance(content, Mapping) else f"keys {_few(content)}"
        raise FqvitError(f"{label}: holds no weights (found {found}), expected a state dict. Save model.state_dict().")
    wrapper: str | None = ""
    while wrapper is not None:
        tensors = {key[len(wrapper) :]: value for key, value in tensors.items()}
        wrapper = next((w for w in WRAPPERS if all(key.startswith(w) for key in tensors)), None)
    return tensors


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over the names in sorted order, each followed by its tensor's bytes (row-major, little-endian as in memory)."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sniff(path: Path) -> Container | Literal["torch script"] | None:
    """The container by its first bytes; None if it is none of them or its directory is cut off."""
    with path.open("rb") as file:
        start = file.read(9)
    if start[:2] == b"PK":
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        except Exception:  # zipfile, too
            return None
        if all(name.endswith(".npy") for name in names):
            return "npz"
        script = any(name.endswith("/constants.pkl") for name in names) and any("/code/" in name for name in names)
        return "torch script" if script else "torch"
    if start[8:9] == b"{":
        return "safetensors"
    return "torch" if start[:1] == b"\x80" else None


def _read(path: Path, container: Container) -> object:
    try:
        if container == "safetensors":
            return load_file(path)
        if container == "npz":
            _check_archive(path)
            return _read_npz(path)
        _check_archive(path)
        # Training scripts keep their arguments beside the weights; a Namespace is plain data.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "global" in str(error).lower() or "Unsupported" in str(error):
            said = f"{path.name}: holds code or foreign objects beside its tensors, which are not run"
            raise FqvitError(f"{said}. Save model.state_dict() alone.") from error
        raise _unreadable(path, error) from error
    except FqvitError:
        raise
    except Exception as error:  # the three readers raise almost anything on damaged files
        raise _unreadable(path, error) from error


def _check_archive(path: Path) -> None:
    """Refuses what would unpack to far more than the file has. Files that are no archives pass."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        claimed = sum(member.file_size for member in archive.infolist())
    size = path.stat().st_size
    if claimed > MOST_TIMES * size + MORE:
        raise FqvitError(f"{path.name}: {size:,} bytes claim to unpack to {claimed:,}. It is no checkpoint; download it again.")


def _check_views(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuses tensors of more elements than are stored: one number can be shown as any shape."""
    for name, x in tensors.items():
        plain = x.layout is torch.strided and x.device.type == "cpu" and not x.is_quantized
        if not plain or x.numel() * x.element_size() > x.untyped_storage().nbytes():
            said = f"'{name}' of shape {list(x.shape)} is no plain tensor with all its elements"
            raise FqvitError(f"{path.name}: {said}. Save model.state_dict() of contiguous tensors.")


def _read_npz(path: Path) -> dict[str, Tensor]:
    tensors = {}
    _check_npz(path)
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files:
            array = arrays[name]
            if array.dtype.kind not in "fiub":
                raise FqvitError(f"{path.name}: '{name}' has dtype {array.dtype}, expected float. Convert it to float32.")
            tensors[name] = torch.from_numpy(array)
    return tensors


def _check_npz(path: Path) -> None:
    """Refuses arrays that claim another size than they have: numpy would make room for them first."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            with archive.open(member) as file:
                version = np.lib.format.read_magic(file)
                if version not in ((1, 0), (2, 0)):
                    continue  # numpy refuses it, or it has fields, which are refused later
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(file)
                claimed, there = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
            if claimed != there and not dtype.hasobject:
                said = f"{member.filename} claims {claimed:,} bytes and has {there:,}"
                raise FqvitError(f"{path.name}: {said}. The file is damaged; download it again.")


def _unreadable(path: Path, error: Exception) -> FqvitError:
    """The readers raise their errors of memory, of versions and of damage as the same types: their words tell which."""
    said = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, MemoryError) or MEMORY.search(said):
        said = f"{path.name}: reading this file of {path.stat().st_size / 1e6:,.1f} MB takes more memory than there is"
        return FqvitError(f"{said}. Free some, or, if the model is small, download it again.")
    if "maximum supported version" in said:
        remedy = "Install a newer torch, or save it as .safetensors"
        return FqvitError(f"{path.name}: written by a newer torch than {torch.__version__}. {remedy}.")
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # EINVAL: a seek beyond where it was cut
        return FqvitError(f"{path.name}: cannot be read ({error.strerror}). Check the disk and the file's permissions.")
    words = said if len(said) <= 100 else f"{said[:97]}..."
    return FqvitError(f"{path.name}: damaged or cut short ({words or type(error).__name__}). Download it again.")


def _few(keys: Mapping[str, object]) -> str:
    names = [str(key) for key in keys]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
