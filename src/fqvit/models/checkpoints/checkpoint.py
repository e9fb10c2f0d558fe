"""Read the named tensors of a checkpoint file: .safetensors, .pth/.pt/.bin or .npz.

Files are untrusted input: no code from a file is executed (torch.load with weights_only, NumPy without pickle).
See also: keymaps.py (translates key names).
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

# Keys under which training scripts save the state dict, in order of preference, and prefixes that module wrappers add to names.
NESTS = ("model", "state_dict", "model_ema", "state_dict_ema", "teacher")
WRAPPERS = ("module.", "_orig_mod.", "model.")
MAX_NESTING = 8  # a pickled mapping can contain itself
# An archive may unpack to at most MAX_RATIO times its size plus ALLOWANCE bytes. Weights hardly compress.
MAX_RATIO, ALLOWANCE = 20, 1 << 26
MEMORY = re.compile(r"(allocate|out of) memory|not enough memory", re.IGNORECASE)


@dataclass(frozen=True)
class Checkpoint:
    """The named tensors of a checkpoint.

    label: the checkpoint's name in error messages
    source: the label and a sha256, of the file or, for a state dict in memory, of the tensors
    """

    label: str
    source: str
    tensors: dict[str, Tensor]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the tensors of one file, on the CPU, in the dtypes of the file."""
    if not path.is_file():
        problem = "is a folder without config.json" if path.is_dir() else "no such file"
        raise FqvitError(f"{path}: {problem}. Pass a checkpoint file ({', '.join(CONTAINERS)}) or hf:ORG/NAME.")
    expected = CONTAINERS.get(path.suffix.lower())
    if path.suffix.lower() == ".fqvit":
        raise FqvitError(f"{path.name}: quantized already, expected a float checkpoint. Use it with fqvit.load.")
    if expected is None:
        raise FqvitError(f"{path.name}: unknown checkpoint type '{path.suffix}', expected {', '.join(CONTAINERS)}.")
    found = _sniff(path)
    if found is None:
        raise FqvitError(f"{path.name}: not a {expected} file, or truncated. Download it again.")
    if found == "torch script":
        raise FqvitError(f"{path.name}: is a TorchScript program, and code is never run. Save model.state_dict() instead.")
    if found != expected:
        raise FqvitError(f"{path.name}: is a {found} file, expected {expected}. Rename it to {path.stem}{SUFFIX[found]}.")
    tensors = flatten(_read(path, found), path.name)
    _check_views(path, tensors)
    return Checkpoint(path.name, f"{path.name} sha256:{file_hash(path)}", tensors)


def from_mapping(state: Mapping[str, object]) -> Checkpoint:
    """Take the tensors of a state dict in memory, without copying them."""
    tensors = flatten(state, "state dict")
    return Checkpoint("state dict", f"state dict sha256:{tensors_hash(tensors)}", tensors)


def flatten(content: object, label: str) -> dict[str, Tensor]:
    """Extract the state dict from the object that a training script saved, and remove the prefixes of module wrappers."""
    for _ in range(MAX_NESTING):
        if not isinstance(content, Mapping):
            break
        nest = next((key for key in NESTS if isinstance(content.get(key), Mapping)), None)
        if nest is None:
            break
        content = content[nest]
    tensors = {str(k): v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, Mapping) else {}
    if not tensors:
        found = type(content).__name__ if not isinstance(content, Mapping) else f"keys {_few(content)}"
        raise FqvitError(f"{label}: contains no weights (found {found}), expected a state dict. Save model.state_dict().")
    wrapper: str | None = ""
    while wrapper is not None:
        tensors = {key[len(wrapper) :]: value for key, value in tensors.items()}
        wrapper = next((w for w in WRAPPERS if all(key.startswith(w) for key in tensors)), None)
    return tensors


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of the names in sorted order, each followed by its tensor's bytes (row-major, native byte order)."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sniff(path: Path) -> Container | Literal["torch script"] | None:
    """Detect the container format from the first bytes; None if it is unknown or a ZIP archive has no readable directory."""
    with path.open("rb") as file:
        start = file.read(9)
    if start[:2] == b"PK":
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        except Exception:  # zipfile raises almost anything for damaged files
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
        # Training scripts save their arguments with the weights; a Namespace is plain data.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "global" in str(error).lower() or "Unsupported" in str(error):
            problem = f"{path.name}: contains code or objects other than tensors, which are not loaded"
            raise FqvitError(f"{problem}. Save only model.state_dict().") from error
        raise _unreadable(path, error) from error
    except FqvitError:
        raise
    except Exception as error:  # the three readers raise almost anything for damaged files
        raise _unreadable(path, error) from error


def _check_archive(path: Path) -> None:
    """Raise FqvitError if an archive would unpack to far more than its size. Other files pass."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        claimed = sum(member.file_size for member in archive.infolist())
    size = path.stat().st_size
    if claimed > MAX_RATIO * size + ALLOWANCE:
        raise FqvitError(
            f"{path.name}: {size:,} bytes claim to unpack to {claimed:,}. The file is not a checkpoint; download it again."
        )


def _check_views(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise FqvitError for tensors with more elements than are stored: a single value can be expanded to any shape."""
    for name, x in tensors.items():
        plain = x.layout is torch.strided and x.device.type == "cpu" and not x.is_quantized
        if not plain or x.numel() * x.element_size() > x.untyped_storage().nbytes():
            problem = f"'{name}' of shape {list(x.shape)} is not a dense tensor that stores all its elements"
            raise FqvitError(f"{path.name}: {problem}. Save model.state_dict() of contiguous tensors.")


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
    """Raise FqvitError if an array's header claims a size other than the stored one.

    NumPy would allocate the claimed size before it reads the data.
    """
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            with archive.open(member) as file:
                version = np.lib.format.read_magic(file)
                if version not in ((1, 0), (2, 0)):
                    # Version 3 is meant for dtypes with fields, which _read_npz rejects. NumPy rejects all other versions.
                    continue
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(file)
                claimed, stored = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
            if claimed != stored and not dtype.hasobject:
                problem = f"{member.filename} claims {claimed:,} bytes and has {stored:,}"
                raise FqvitError(f"{path.name}: {problem}. The file is damaged; download it again.")


def _unreadable(path: Path, error: Exception) -> FqvitError:
    """Turn a reader's exception into a FqvitError.

    The readers raise the same exception types for lack of memory, new versions and damage, so the message decides.
    """
    text = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, MemoryError) or MEMORY.search(text):
        problem = f"{path.name}: not enough memory to read this file of {path.stat().st_size / 1e6:,.1f} MB"
        return FqvitError(f"{problem}. Free some memory, or download the file again if the model is small.")
    if "maximum supported version" in text:
        remedy = "Install a newer torch, or save the weights as .safetensors"
        return FqvitError(f"{path.name}: written by a newer torch than {torch.__version__}. {remedy}.")
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # EINVAL: a seek beyond the truncated end
        return FqvitError(f"{path.name}: cannot be read ({error.strerror}). Check the disk and the file's permissions.")
    short = text if len(text) <= 100 else f"{text[:97]}..."
    return FqvitError(f"{path.name}: damaged or truncated ({short or type(error).__name__}). Download it again.")


def _few(keys: Mapping[str, object]) -> str:
    names = [str(key) for key in keys]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
