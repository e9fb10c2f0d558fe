"""Read and write .fqvit files: safetensors files with the program's JSON in their metadata.

Reading raises FqvitError, with a one-line message that names the file, if the file is truncated or altered, has a newer version
or does not verify. Detectors use the same container. See also: detect/file.py (detectors), docs/reference/format.md (format).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialize

from fqvit.errors import FqvitError
from fqvit.ir.kit import DTYPES
from fqvit.ir.program import VERSIONS, Header, Program, encode_header, fingerprint
from fqvit.ir.value import DAMAGED, Constant, check_constant
from fqvit.system.files import write_atomically

# The kind of a file is the metadata key of its JSON. MADE_BY: the command that creates a file of that kind. WRONG_KIND: the
# error message for a file of that kind if the other kind is expected.
Kind = Literal["fqvit", "fqvit_detector"]
PROGRAM: Kind = "fqvit"
DETECTOR: Kind = "fqvit_detector"
MADE_BY: dict[Kind, str] = {PROGRAM: "fqvit quantize", DETECTOR: "fqvit detect quantize"}
WRONG_KIND: dict[Kind, str] = {
    PROGRAM: (
        "holds a classifier or an embedding model, not a detector. "
        "Use `fqvit eval`, `fqvit classify`, `fqvit embed` or `fqvit export` with it."
    ),
    DETECTOR: "holds a detector, not a classifier. Use `fqvit detect eval`, `predict` or `draw`, or `fqvit inspect`.",
}
SAFETENSORS_NAMES = {"U8": "u8", "I8": "i8", "U16": "u16", "I16": "i16", "I32": "i32", "I64": "i64"}


T = TypeVar("T")


def save(program: Program, path: Path) -> None:
    """Verify a program and write it atomically."""
    program.verify()
    write_container(path, PROGRAM, encode_header(program.header), program.fingerprint(), program.constants)


def file_size(program: Program) -> int:
    """Return the size in bytes of the file that `save` would write."""
    return len(container(PROGRAM, encode_header(program.header), program.fingerprint(), program.constants))


def write_container(path: Path, kind: Kind, text: bytes, fingerprint: str, constants: Mapping[str, Constant]) -> None:
    """Write a container atomically. text: the JSON of a program or a detector."""
    data = container(kind, text, fingerprint, constants)
    write_atomically(path, lambda temporary: temporary.write_bytes(data))


def container(kind: Kind, text: bytes, fingerprint: str, constants: Mapping[str, Constant]) -> bytes:
    """Return the bytes of a container. Equal contents give equal bytes."""
    metadata = {kind: text.decode(), "fingerprint": fingerprint}
    tensors = {name: np.asarray(array, order="C") for name, array in constants.items()}
    return _sorted_metadata(serialize(tensors, metadata))


def _sorted_metadata(raw: bytes) -> bytes:
    """Sort the metadata of a safetensors file. The library writes it in random order; equal programs must give equal files."""
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # safetensors aligns the data to 8 bytes
    return len(text).to_bytes(8, "little") + text + raw[8 + size :]


def load(path: Path) -> Program:
    """Load and verify a program. Its arrays are copies, so the file may be replaced afterwards."""
    header, metadata = _read_header(path)
    with FileConstants(path) as constants:
        program = Program(header, dict(constants.items()))
    _check(path, program, metadata)
    return program


def _read_header(path: Path) -> tuple[Header, dict[str, str]]:
    """Return the decoded header and the metadata that contain it."""
    metadata = read_metadata(path, PROGRAM)
    return decoded(path, metadata[PROGRAM], Header), metadata


def kind_of(path: Path) -> Kind:
    """Return the kind of a file from its metadata. Unreadable files count as PROGRAM: loading them reports the problem."""
    try:
        with safe_open(path, framework="numpy") as file:
            return DETECTOR if DETECTOR in (file.metadata() or {}) else PROGRAM
    except (SafetensorError, OSError, ValueError):
        return PROGRAM


def is_program(path: Path) -> bool:
    """Return whether a file, of any name, is a program or a detector by its metadata."""
    try:
        with safe_open(path, framework="numpy") as file:
            return not {PROGRAM, DETECTOR}.isdisjoint(file.metadata() or {})
    except (SafetensorError, OSError, ValueError):
        return False


def check_exists(path: Path, kind: Kind) -> None:
    """Raise FqvitError if there is no regular file at this path."""
    if not path.is_file():
        make = f", or make one with `{MADE_BY[kind]} -o {path.name}`" if path.suffix == ".fqvit" else ""
        raise FqvitError(f"{path}: no such file. Check the path{make}.")


def read_metadata(path: Path, kind: Kind) -> dict[str, str]:
    """Return the metadata of a file after checking its kind and that all constants are integers.

    safetensors validates the container when it opens the file.
    """
    check_exists(path, kind)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if kind not in metadata:
                for other in (key for key in WRONG_KIND if key in metadata):
                    raise FqvitError(f"{path}: {WRONG_KIND[other]}")
                said = f"{path}: safetensors, but not a quantized program"
                raise FqvitError(f"{said}. Make one with `{MADE_BY[kind]} --weights {path.name}`.")
            names = list(file.keys())
            for name in names:
                dtype = file.get_slice(name).get_dtype()
                if dtype not in SAFETENSORS_NAMES:
                    raise FqvitError(f"{path}: constant {name!r} is {dtype}: only integers may be in a program.")
        return metadata
    except (SafetensorError, OSError, ValueError) as error:
        raise _unreadable(path, kind, error) from None


def _unreadable(path: Path, kind: Kind, error: Exception) -> FqvitError:
    """Turn an exception of safetensors into a FqvitError: the file cannot be read, has another format, or is damaged."""
    start = b""
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as failed:
        error = failed  # names the cause; safetensors says "No such file" if the permission is missing
    if isinstance(error, OSError):
        return FqvitError(f"{path}: cannot be read ({error.strerror or error}). Check the disk and the file's permissions.")
    if start[8:] != b"{":  # safetensors: 8 bytes for the length of the JSON, then the JSON
        return FqvitError(f"{path}: not a .fqvit file, expected one written by `{MADE_BY[kind]}`. Check the path.")
    return FqvitError(f"{path}: damaged or truncated, expected a complete .fqvit file. Quantize again.")


def _check(path: Path, program: Program, metadata: dict[str, str]) -> None:
    check_fingerprint(path, metadata, PROGRAM, program.constants)
    try:
        program.verify()
    except FqvitError as error:
        raise FqvitError(f"{path}: {error}") from None


def check_fingerprint(path: Path, metadata: Mapping[str, str], kind: Kind, constants: Mapping[str, Constant]) -> None:
    """Raise FqvitError if the fingerprint does not match the JSON text, exactly as stored, and the constants."""
    if fingerprint(metadata[kind].encode(), constants) != metadata.get("fingerprint"):
        raise FqvitError(f"{path}: the fingerprint does not match the contents. The file is damaged. Quantize again.")


class FileConstants(Mapping[str, Constant]):
    """The tensors of a well-formed safetensors file, each read when it is accessed.

    The file is read, not mapped: mapped pages would count as memory of this process. The last constant read is cached, because
    checks access a constant several times in a row. The file stays open, so replacing it on disk has no effect.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        self._latest: tuple[str, Constant] | None = None
        try:
            self._entries = self._read_entries()
        except BaseException:
            self._file.close()
            raise

    def _read_entries(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Return the dtype, shape and position of every tensor."""
        size = int.from_bytes(self._file.read(8), "little")
        header = json.loads(self._file.read(size))
        header.pop("__metadata__", None)
        entries = {}
        for name, entry in header.items():
            if not isinstance(entry, dict) or not isinstance(entry["dtype"], str):  # accepted by safetensors
                raise FqvitError(f"{self._path}: damaged or truncated, expected a complete .fqvit file. Quantize again.")
            shape = tuple(entry["shape"])
            try:
                check_constant(name, shape)
            except FqvitError as error:
                raise FqvitError(f"{self._path}: {error}") from None
            entries[name] = SAFETENSORS_NAMES[entry["dtype"]], shape, 8 + size + entry["data_offsets"][0]
        return entries

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
                raise FqvitError(f"{self._path}: constant {name!r} is truncated. The file was changed while it was read.")
            self._latest = name, array.astype(array.dtype.newbyteorder("="), copy=False)
        return self._latest[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries


def decoded(path: Path, text: str, type_: type[T]) -> T:
    """Decode the JSON text of a file's metadata after checking its version."""
    try:
        version = json.loads(text).get("version")
    except (ValueError, AttributeError, RecursionError):
        raise FqvitError(f"{path}: the program is not JSON. {DAMAGED}") from None
    if type(version) is not int or version not in VERSIONS:
        raise FqvitError(
            f"{path}: format version {version!r}, this fqvit reads {VERSIONS[0]} to {VERSIONS[-1]}."
            " Install a newer fqvit, or quantize again."
        )
    try:
        return msgspec.json.decode(text, type=type_)
    except msgspec.ValidationError as error:
        raise FqvitError(f"{path}: {_fault(error)}. {DAMAGED}") from None
    except (msgspec.DecodeError, RecursionError):
        raise FqvitError(f"{path}: the program is not JSON. {DAMAGED}") from None


def _fault(error: msgspec.ValidationError) -> str:
    """Reformat `Expected int, got str - at $.ops[41].shift` as `ops[41].shift: expected int, got str`."""
    message, _, location = str(error).partition(" - at ")
    return f"{location.strip('`').removeprefix('$.') or 'program'}: {message[0].lower()}{message[1:]}".replace("`", "")
