"""Zero-shot classification: text embeddings made elsewhere are the classes, and scores are integer cosines.

A file of text embeddings is an .npz file with two arrays, as numpy.savez writes them:

    embeddings: float [classes, C], or [classes, prompts, C] with several prompts per class
    names: str [classes]

Rule for quantizing text: normalise each prompt to length 1, average the prompts of a class, normalise again, and round to
15-bit codes, round(16383 * t). No floats are used after that: scores are the integer cosines of search.py.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fqvit.errors import FqvitError
from fqvit.inference.products import MAX_LENGTH
from fqvit.inference.search import MIDDLE, Index

LARGEST = (1 << 14) - 1  # code of the value 1
MOST_BYTES = 1 << 30  # largest total size of the arrays in a file
EXPECTED = "an .npz file with the arrays embeddings (float [classes, C]) and names (str [classes])"


@dataclass(frozen=True)
class TextClasses:
    """Classes that are given by text. codes: u16 [classes, C] with zero point 2^15"""

    names: tuple[str, ...]
    codes: NDArray[np.uint16]

    def check_length(self, path: str, wanted: int, of: str) -> None:
        """Raise FqvitError unless the text embeddings have as many values as the image embeddings. path, of: for the message"""
        if self.codes.shape[1] != wanted:
            found = f"{self.codes.shape[1]} values per text embedding, but {of} has {wanted}"
            raise FqvitError(f"{path}: {found}. Use the text model that belongs to the image model.")

    def index(self, threads: int | None = None) -> Index:
        """Return an index whose rows are the classes."""
        return Index(self.codes, MIDDLE, threads)


def read_text(path: str | Path) -> TextClasses:
    """Read and quantize a file of text embeddings. Raises FqvitError that names the fault."""
    arrays = _read_npz(Path(path))
    for name in ("embeddings", "names"):
        if name not in arrays:
            raise FqvitError(f"{path}: no array {name!r} (has {', '.join(sorted(arrays)) or 'none'}), expected {EXPECTED}.")
    values, names = arrays["embeddings"], arrays["names"]
    if values.dtype.kind != "f" or values.ndim not in (2, 3) or 0 in values.shape:
        found = f"{values.dtype} {list(values.shape)}"
        raise FqvitError(f"{path}: embeddings are {found}, expected float [classes, C] or [classes, prompts, C].")
    if names.dtype.kind != "U" or names.shape != values.shape[:1]:
        found = f"{names.dtype} {list(names.shape)}"
        raise FqvitError(f"{path}: names are {found}, expected one string per class: [{values.shape[0]}].")
    if values.shape[-1] > MAX_LENGTH:
        raise FqvitError(f"{path}: {values.shape[-1]} values per embedding, at most {MAX_LENGTH} are allowed.")
    listed = [str(name) for name in names]
    if len(set(listed)) != len(listed):
        double = next(name for name in listed if listed.count(name) > 1)
        raise FqvitError(f"{path}: class {double!r} occurs twice. Give every class a name of its own.")
    return TextClasses(tuple(listed), _quantized(path, values.astype(np.float64), listed))


def _quantized(path: str | Path, values: NDArray[np.float64], names: list[str]) -> NDArray[np.uint16]:
    if not np.isfinite(values).all():
        raise FqvitError(f"{path}: embeddings contain infinite values or NaN. Compute them again.")
    if values.ndim == 3:
        values = _unit(path, values, names).mean(1)
    codes = np.rint(_unit(path, values, names) * LARGEST).astype(np.int64) + MIDDLE
    return codes.astype(np.uint16)


def _unit(path: str | Path, values: NDArray[np.float64], names: list[str]) -> NDArray[np.float64]:
    scaled = values / np.maximum(np.abs(values).max(-1, keepdims=True), 1e-300)  # so that squares neither overflow nor vanish
    lengths = np.linalg.norm(scaled, axis=-1, keepdims=True)
    if not lengths.all():
        name = names[int(np.argwhere(lengths == 0)[0][0])]
        raise FqvitError(f"{path}: the embedding of {name!r} is zero, which has no direction. Compute it again.")
    unit: NDArray[np.float64] = scaled / lengths
    return unit


def _read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file. Nothing is unpickled, and the size is checked before reading."""
    if not path.is_file():
        raise FqvitError(f"{path}: no such file. Pass {EXPECTED}.")
    try:
        with zipfile.ZipFile(path) as archive:
            total = sum(entry.file_size for entry in archive.infolist())
        if total > MOST_BYTES:
            raise FqvitError(f"{path}: {total / 1e6:,.0f} MB of arrays, at most {MOST_BYTES / 1e6:,.0f} MB are allowed.")
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files if name in ("embeddings", "names")} | {
                name: np.zeros(0) for name in file.files if name not in ("embeddings", "names")
            }
    except FqvitError:
        raise
    except Exception as error:  # zipfile, zlib and numpy raise many kinds of errors for damaged files
        raise FqvitError(f"{path}: cannot be read ({' '.join(str(error).split())}), expected {EXPECTED}.") from error
