"""Reading and writing .fqvit: one safetensors file, the program's JSON in its metadata. The page is docs/format.md.

Refuses, with one line that names the file, whatever is truncated, altered, of a newer version, or not verifiable. The container
is also that of detectors, whose contents are detect/file.py's business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialize

from fqvit.errors import FqvitError
from fqvit.ir.kit import DTYPES
from fqvit.ir.program import Header, Program, Verified, encode_header, fingerprint
from fqvit.ir.value import DAMAGED, Constant
from fqvit.system.files import write_atomically

VERSION = 1  # what is written
READABLE = (1,)  # every version ever released: docs/format.md promises it

# What a file is: the key of its JSON in the metadata. How to make one, and what to do with one in the wrong place.
Kind = Literal["fqvit", "fqvit_detector"]
PROGRAM: Kind = "fqvit"
DETECTOR: Kind = "fqvit_detector"
MADE_BY: dict[Kind, str] = {PROGRAM: "fqvit quantize", DETECTOR: "fqvit detect quantize"}
TAKEN_BY: dict[Kind, str] = {
    PROGRAM: "holds a classifier, not a detector. Use `fqvit eval`, `fqvit classify` or `fqvit export` with it.",
    DETECTOR: "holds a detector, which this does not take. Use `fqvit detect eval`, `predict` or `draw`, or `fqvit inspect`.",
}
SAFETENSORS_NAMES = {"U8": "u8", "I8": "i8", "U16": "u16", "I16": "i16", "I32": "i32", "I64": "i64"}


T = TypeVar("T")


def save(program: Program, path: Path) -> None:
    program.verify()
    write_container(path, PROGRAM, encode_header(program.header), program.fingerprint(), program.constants)


def file_size(program: Program) -> int:
    """Bytes of the file that a program would be saved to."""
    return len(container(PROGRAM, encode_header(program.header), program.fingerprint(), program.constants))


def write_container(path: Path, kind: Kind, text: bytes, fingerprint: str, constants: Mapping[str, Constant]) -> None:
    data = container(kind, text, fingerprint, constants)
    write_atomically(path, lambda temporary: temporary.write_bytes(data))


def container(kind: Kind, text: bytes, fingerprint: str, constants: Mapping[str, Constant]) -> bytes:
    metadata = {kind: text.decode(), "fingerprint": fingerprint}
    tensors = {name: np.ascontiguousarray(array) for name, array in constants.items()}
    return _sorted_metadata(serialize(tensors, metadata))


def _sorted_metadata(raw: bytes) -> bytes:
    """The same safetensors file with its metadata in order: the library writes it in random order, and equal programs
    should be equal files."""
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    return len(text).to_bytes(8, "little") + text + raw[8 + size :]


def load(path: Path) -> Program:
    """The program in a file, verified. The arrays are copies: the file may be replaced afterwards."""
    header, metadata = _read_header(path)
    with FileConstants(path) as constants:
        program = Program(header, dict(constants.items()))
    _check(path, program, metadata)
    return program


@contextmanager
def opened(path: Path) -> Iterator[tuple[Program, Verified]]:
    """The same with constants that are read from the file whenever they are asked for, so that few are in memory at a time."""
    header, metadata = _read_header(path)
    with FileConstants(path) as constants:
        program = Program(header, constants)
        yield program, _check(path, program, metadata)


def _read_header(path: Path) -> tuple[Header, dict[str, str]]:
    """The header, and the metadata that it is in."""
    metadata = read_metadata(path, PROGRAM)
    return decoded(path, metadata[PROGRAM], Header, READABLE), metadata


def kind_of(path: Path) -> Kind:
    """What a file holds, by its metadata alone; PROGRAM for whatever is none, so that reading it says what is wrong."""
    try:
        with safe_open(path, framework="numpy") as file:
            return DETECTOR if DETECTOR in (file.metadata() or {}) else PROGRAM
    except (SafetensorError, OSError, ValueError):
        return PROGRAM


def read_metadata(path: Path, kind: Kind) -> dict[str, str]:
    """Of a file of that kind with integer constants. safetensors checks the container before anything is read."""
    if not path.is_file():
        raise FqvitError(f"{path}: no such file. Make one with `{MADE_BY[kind]} -o {path.name}`.")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if kind not in metadata:
                for other in (key for key in TAKEN_BY if key in metadata):
                    raise FqvitError(f"{path}: {TAKEN_BY[other]}")
                said = f"{path}: safetensors, but not a quantized program"
                raise FqvitError(f"{said}. Make one with `{MADE_BY[kind]} --weights {path.name}`.")
            names = list(file.keys())
            for name in names:
                dtype = file.get_slice(name).get_dtype()
                if dtype not in SAFETENSORS_NAMES:
                    raise FqvitError(f"{path}: constant {name!r} is {dtype}: only integers may be in a program.")
        return metadata
    except (SafetensorError, OSError, ValueError) as error:
        raise FqvitError(
            f"{path}: not a readable .fqvit file ({error}). It is damaged or was cut short; quantize again."
        ) from None


def _check(path: Path, program: Program, metadata: dict[str, str]) -> Verified:
    check_fingerprint(path, metadata, PROGRAM, program.constants)
    try:
        return program.verify()
    except FqvitError as error:
        raise FqvitError(f"{path}: {error}") from None


def check_fingerprint(path: Path, metadata: Mapping[str, str], kind: Kind, constants: Mapping[str, Constant]) -> None:
    """Over the text as it stands, so that files stay whole however later versions would write it."""
    if fingerprint(metadata[kind].encode(), constants) != metadata.get("fingerprint"):
        raise FqvitError(f"{path}: the fingerprint does not match the contents. The file is damaged; quantize again.")


class FileConstants(Mapping[str, Constant]):
    """The tensors of a safetensors file that is known to be well-formed, each read when it is asked for.

    Read, not mapped: pages of a mapped file would count as memory of this process. The latest one is remembered, since whoever
    checks a constant asks for it a few times in a row. The file stays open, so that replacing it changes nothing here.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        size = int.from_bytes(self._file.read(8), "little")
        entries = json.loads(self._file.read(size))
        entries.pop("__metadata__", None)
        self._entries: dict[str, tuple[str, tuple[int, ...], int]] = {
            name: (SAFETENSORS_NAMES[entry["dtype"]], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
            for name, entry in entries.items()
        }
        self._latest: tuple[str, Constant] | None = None

    def __enter__(self) -> FileConstants:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getitem__(self, name: str) -> Constant:
        if self._latest is None or self._latest[0] != name:
            dtype, shape, offset = self._entries[name]
            array = np.empty(shape, np.dtype(DTYPES[dtype]).newbyteorder("<"))
            self._file.seek(offset)
            if array.size and self._file.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:
                raise FqvitError(f"{self._path}: constant {name!r} is cut short. The file was changed while it was read.")
            self._latest = name, array.astype(array.dtype.newbyteorder("="), copy=False)
        return self._latest[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries


def decoded(path: Path, text: str, type_: type[T], readable: tuple[int, ...]) -> T:
    """The JSON text of a file's metadata, of one of the versions that can be read."""
    try:
        version = json.loads(text).get("version")
    except (ValueError, AttributeError, RecursionError):
        raise FqvitError(f"{path}: the program is not JSON. {DAMAGED}") from None
    if version not in readable:
        raise FqvitError(
            f"{path}: format version {version!r}, this fqvit reads {readable[-1]}. Install a newer fqvit, or quantize again."
        )
    try:
        return msgspec.json.decode(text, type=type_)
    except msgspec.ValidationError as error:
        raise FqvitError(f"{path}: {_fault(error)}. {DAMAGED}") from None
    except (msgspec.DecodeError, RecursionError):
        raise FqvitError(f"{path}: the program is not JSON. {DAMAGED}") from None


def _fault(error: msgspec.ValidationError) -> str:
    """`Expected int, got str - at $.ops[41].shift` -> `ops[41].shift: expected int, got str`"""
    message, _, place = str(error).partition(" - at ")
    return f"{place.strip('`').removeprefix('$.') or 'program'}: {message[0].lower()}{message[1:]}".replace("`", "")
