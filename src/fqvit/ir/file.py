"""Reading and writing .fqvit: one safetensors file, the program's JSON in its metadata. The page is docs/format.md.

Refuses, with one line that names the file, whatever is truncated, altered, of a newer version, or not verifiable.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialize

from fqvit.errors import FqvitError
from fqvit.files import write_atomically
from fqvit.ir.program import Header, Program, encode_header, fingerprint
from fqvit.ir.value import DAMAGED

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
            constants = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise FqvitError(
            f"{path}: not a readable .fqvit file ({error}). It is damaged or was cut short; quantize again."
        ) from None
    program = Program(header, constants)
    # Over the text as it stands, so that files stay whole however later versions would write it.
    if fingerprint(metadata["fqvit"].encode(), constants) != metadata.get("fingerprint"):
        raise FqvitError(f"{path}: the fingerprint does not match the contents. The file is damaged; quantize again.")
    try:
        program.verify()
    except FqvitError as error:
        raise FqvitError(f"{path}: {error}") from None
    return program


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
