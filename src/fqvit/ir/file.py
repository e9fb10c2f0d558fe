"""Reading and writing .fqvit: one safetensors file, the program's JSON in its metadata. The page is docs/format.md.

Refuses, with one line that names the file, whatever is truncated, altered, of a newer version, or not verifiable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialize

from fqvit.errors import FqvitError
from fqvit.files import write_atomically
from fqvit.ir.kit import DTYPES
from fqvit.ir.program import Header, Program, Verified, encode_header, fingerprint
from fqvit.ir.value import DAMAGED, Constant

VERSION = 1  # what is written
READABLE = (1,)  # every version ever released: docs/format.md promises it
SAFETENSORS_NAMES = {"U8": "u8", "I8": "i8", "U16": "u16", "I16": "i16", "I32": "i32", "I64": "i64"}


def save(program: Program, path: Path) -> None:
    program.verify()
    metadata = {"fqvit": encode_header(program.header).decode(), "fingerprint": program.fingerprint()}
    tensors = {name: np.ascontiguousarray(array) for name, array in program.constants.items()}
    data = _sorted_metadata(serialize(tensors, metadata))
    write_atomically(path, lambda temporary: temporary.write_bytes(data))


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
    """The header, and the metadata that it is in. safetensors checks the container before anything is read."""
    if not path.is_file():
        raise FqvitError(f"{path}: no such file. Make one with `fqvit quantize -o {path.name}`.")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if "fqvit" not in metadata:
                raise FqvitError(
                    f"{path}: safetensors, but not a quantized program. Make one with `fqvit quantize --weights {path.name}`."
                )
            header = _header(path, metadata["fqvit"])
            names = list(file.keys())
            for name in names:
                dtype = file.get_slice(name).get_dtype()
                if dtype not in SAFETENSORS_NAMES:
                    raise FqvitError(f"{path}: constant {name!r} is {dtype}: only integers may be in a program.")
        return header, metadata
    except (SafetensorError, OSError, ValueError) as error:
        raise FqvitError(
            f"{path}: not a readable .fqvit file ({error}). It is damaged or was cut short; quantize again."
        ) from None


def _check(path: Path, program: Program, metadata: dict[str, str]) -> Verified:
    # Over the text as it stands, so that files stay whole however later versions would write it.
    if fingerprint(metadata["fqvit"].encode(), program.constants) != metadata.get("fingerprint"):
        raise FqvitError(f"{path}: the fingerprint does not match the contents. The file is damaged; quantize again.")
    try:
        return program.verify()
    except FqvitError as error:
        raise FqvitError(f"{path}: {error}") from None


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


def _header(path: Path, text: str) -> Header:
    try:
        version = json.loads(text).get("version")
    except (ValueError, AttributeError, RecursionError):
        raise FqvitError(f"{path}: the program is not JSON. {DAMAGED}") from None
    if version not in READABLE:
        raise FqvitError(
            f"{path}: format version {version!r}, this fqvit reads {READABLE[-1]}. Install a newer fqvit, or quantize again."
        )
    try:
        return msgspec.json.decode(text, type=Header)
    except msgspec.ValidationError as error:
        raise FqvitError(f"{path}: {_fault(error)}. {DAMAGED}") from None
    except (msgspec.DecodeError, RecursionError):
        raise FqvitError(f"{path}: the program is not JSON. {DAMAGED}") from None


def _fault(error: msgspec.ValidationError) -> str:
    """`Expected int, got str - at $.ops[41].shift` -> `ops[41].shift: expected int, got str`"""
    message, _, place = str(error).partition(" - at ")
    return f"{place.strip('`').removeprefix('$.') or 'program'}: {message[0].lower()}{message[1:]}".replace("`", "")
