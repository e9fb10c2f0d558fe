"""Embeddings: the integers that a program returns per image, with the names of the images and the meaning of the integers.

Embeddings of the same program can be compared code by code; those of programs with different fingerprints cannot.
See also: formats.py (the files), embed.py (computes embeddings of many images).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fqvit.errors import FqvitError
from fqvit.inference import formats
from fqvit.inference.formats import DAMAGED, Column, Content, Integers, Rows

VERSION = 1
SIGNS = "signs"  # the kind of an output of packed sign bits
Size = Annotated[int, msgspec.Meta(ge=1, le=2**28)]


@dataclass(frozen=True)
class Info:
    """What the integers of one output mean: value = (code - zero) * scale * 2^alpha[c]

    name: unique among the outputs of a program   kind: as in ir/program.py   dtype: u8, u16 or i32
    shape: without the axis of the images   alpha: one exponent per channel, the last axis; empty: all 0
    Kind `signs`: each byte has eight sign bits, the first in the most significant bit; 1 means a value above 0.
    """

    name: str
    kind: str
    scale: Annotated[float, msgspec.Meta(gt=0, lt=1e30)]
    zero: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    dtype: Literal["u8", "u16", "i32"]
    shape: tuple[Size, ...]
    alpha: tuple[Annotated[int, msgspec.Meta(ge=0, le=255)], ...] = ()


@dataclass(frozen=True, repr=False)
class Embeddings:
    """The outputs of a program for several images.

    names: one per image, in input order, such as relative paths. vectors: the program's integers by output name, [N, *shape].
    model: the name of the model. fingerprint: the fingerprint of the program.
    source: digest of the images, the program and the outputs; "" if unknown
    """

    names: Sequence[str]
    vectors: Mapping[str, Integers]
    info: Mapping[str, Info]
    model: str
    fingerprint: str
    source: str = ""

    def __repr__(self) -> str:
        outputs = ", ".join(f"{each.name} ({each.dtype} {' x '.join(map(str, each.shape))})" for each in self.info.values())
        count = "1 image" if len(self) == 1 else f"{len(self)} images"
        return f"Embeddings({outputs} of {count}, by {self.model}, fingerprint {self.fingerprint[:12]})"

    def __len__(self) -> int:
        return len(self.names)

    def output(self, name: str | None = None) -> Info:
        """Return the description of an output. None: the first output."""
        if name is None:
            return next(iter(self.info.values()))
        if name not in self.info:
            raise FqvitError(f"{self.model}: no output {name!r}, expected one of {', '.join(self.info)}.")
        return self.info[name]

    def codes(self, name: str | None = None) -> Integers:
        """Return the integers of an output, [N, *shape]. None: the first output."""
        return self.vectors[self.output(name).name]

    def float(self, name: str | None = None) -> NDArray[np.float32]:
        """Decode an output, f32 [N, *shape]. None: the first one. Kind `signs`: -1 and 1, eight per byte."""
        info = self.output(name)
        return decode(info, self.vectors[info.name])

    def save(self, path: str | Path) -> None:
        """Write the embeddings atomically, in the format that the suffix names: .npy, .safetensors or .parquet."""
        write(path, self)

    @staticmethod
    def load(path: str | Path) -> Embeddings:
        """Read an embedding file. Raises FqvitError for any other file."""
        return read(path)

    def joined(self, later: Embeddings) -> Embeddings:
        """Return these embeddings followed by others with the same outputs."""
        vectors = {name: np.concatenate([array, later.vectors[name]]) for name, array in self.vectors.items()}
        return replace(self, names=[*self.names, *later.names], vectors=vectors)

    def check_same_program(self, other: Embeddings, where: str) -> None:
        """Raise FqvitError unless both come from the same program. where: names `other` in the message."""
        if other.fingerprint != self.fingerprint:
            raise FqvitError(
                f"{where}: made by {other.model} {other.fingerprint[:12]}, expected {self.model} {self.fingerprint[:12]}."
                " Embeddings of different programs cannot be compared. Embed the images again with the same file."
            )


def decode(info: Info, codes: Integers) -> NDArray[np.float32]:
    """Return the values of an output, f32 [N, ..., C]. Kind `signs`: -1 and 1, eight per byte."""
    if info.kind == SIGNS:
        return np.unpackbits(codes, axis=-1).astype(np.float32) * 2 - 1
    scale = info.scale * np.exp2(np.array(info.alpha)) if info.alpha else info.scale
    return ((codes.astype(np.int64) - info.zero) * scale).astype(np.float32)


class _About(msgspec.Struct, frozen=True, omit_defaults=True):
    """The JSON in a file. Unknown fields are ignored, so that a later version may add some."""

    version: int
    model: str
    fingerprint: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    outputs: Annotated[tuple[Info, ...], msgspec.Meta(min_length=1)]
    source: str = ""


Write = Callable[[Path, str, Sequence[Column], int, Iterable[Rows]], None]
FORMATS: dict[str, tuple[Callable[[Path], Content], Write]] = {
    ".npy": (formats.read_npy, formats.write_npy),
    ".safetensors": (formats.read_safetensors, formats.write_safetensors),
    ".parquet": (formats.read_parquet, formats.write_parquet),
}


def check_suffix(path: str | Path) -> str:
    """Return the suffix of an embedding file. Raises FqvitError for a suffix without a format."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise FqvitError(f"{path}: unknown kind of embedding file, expected a name ending in {', '.join(FORMATS)}.")
    return suffix


def write(path: str | Path, embeddings: Embeddings) -> None:
    """Write embeddings atomically, in the format that the suffix names."""
    write_parts(path, [embeddings])


def write_parts(path: str | Path, parts: Sequence[Embeddings]) -> None:
    """Write consecutive parts as one file. Each part is read several times; `parts` may load its items from files."""
    path, first = Path(path), parts[0]
    outputs = tuple(first.info.values())
    count = 0
    for part in parts:
        if tuple(part.info.values()) != outputs or part.fingerprint != first.fingerprint:
            raise FqvitError(f"{path}: parts of different programs or outputs, expected one program.")
        _check(path, part)
        bad = next((name for name in part.names if name != storable(name)), None)
        if bad is not None:
            raise FqvitError(f"{path}: name {bad!r} has a line break or is not valid text. Rename the image.")
        count += len(part)
    text = msgspec.json.encode(_About(VERSION, first.model, first.fingerprint, outputs, first.source)).decode()
    columns = [Column(info.name, info.dtype, info.shape) for info in outputs]
    _, save = FORMATS[check_suffix(path)]
    save(path, text, columns, count, _PartRows(parts))


def storable(name: str) -> str:
    """Return a name that fits on one line of UTF-8: line breaks and bytes that are not UTF-8 become backslash escapes."""
    name = name.encode("utf-8", "backslashreplace").decode()
    return name.replace("\r", "\\r").replace("\n", "\\n")


def read(path: str | Path) -> Embeddings:
    """Read an embedding file of any format and memory-map .npy and .safetensors files. Raises FqvitError for any other file."""
    path = Path(path)
    load, _ = FORMATS[check_suffix(path)]
    if not path.is_file():
        raise FqvitError(
            f"{path}: no such file. Check the path, or make one with `fqvit embed FILE.fqvit IMAGES -o {path.name}`."
        )
    try:
        content = load(path)
    except OSError as error:
        raise FqvitError(f"{path}: cannot be read ({error.strerror or error}). Check its permissions.") from None
    about = _about(path, content.text)
    vectors = dict(content.rows.vectors)
    if list(vectors) == [""]:  # .npy: the name of its only output is in the JSON
        vectors = {about.outputs[0].name: vectors[""]}
    info = {output.name: output for output in about.outputs}
    if len(info) != len(about.outputs) or set(info) != set(vectors):
        said = f"{', '.join(sorted(vectors))} stored, {', '.join(output.name for output in about.outputs)} described"
        raise FqvitError(f"{path}: the outputs do not match: {said}. {DAMAGED}")
    count = len(content.rows.names)
    if path.suffix.lower() == ".parquet":  # one list per image, whatever the shape
        for name, output in info.items():
            if vectors[name].shape == (count, math.prod(output.shape)):
                vectors[name] = vectors[name].reshape(count, *output.shape)
    found = Embeddings(
        content.rows.names, {name: vectors[name] for name in info}, info, about.model, about.fingerprint, about.source
    )
    _check(path, found)
    return found


def source_of(path: Path) -> str | None:
    """Return the digest (Embeddings.source) of a .safetensors or .parquet file; None if there is no such file or digest."""
    try:
        text = formats.text_of(path) if path.is_file() else None
        return None if text is None else _about(path, text).source or None
    except (FqvitError, OSError):
        return None


def _about(path: Path, text: str) -> _About:
    try:
        about = msgspec.json.decode(text, type=_About)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FqvitError(f"{path}: the description of the outputs is not valid ({error}). {DAMAGED}") from None
    if about.version != VERSION:
        raise FqvitError(f"{path}: version {about.version}, this fqvit reads {VERSION}. Install a newer fqvit.")
    for output in about.outputs:
        if output.alpha and len(output.alpha) != output.shape[-1]:
            raise FqvitError(
                f"{path}: {len(output.alpha)} exponents for shape {list(output.shape)} of {output.name}. {DAMAGED}"
            )
    return about


def _check(path: Path, embeddings: Embeddings) -> None:
    """Raise FqvitError if the arrays are not those that the info describes."""
    for name, info in embeddings.info.items():
        array, shape = embeddings.vectors[name], (len(embeddings.names), *info.shape)
        if array.dtype != formats.DTYPES[info.dtype] or array.shape != shape:
            found = f"{array.dtype} {list(array.shape)}"
            raise FqvitError(f"{path}: output {name} is {found}, expected {info.dtype} {list(shape)}. {DAMAGED}")


class _PartRows(Iterable[Rows]):
    """The rows of parts, one part in memory at a time."""

    def __init__(self, parts: Sequence[Embeddings]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Rows]:
        for part in self.parts:
            yield Rows(part.names, part.vectors)
