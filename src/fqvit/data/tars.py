"""List the members of a tar file with their offsets and sizes. Nothing is unpacked and no link is followed.

Safe for untrusted input: sizes are checked against the file, and extended headers are limited. Compressed files
(no random access), files without an end-of-archive marker (possibly truncated between two members) and sparse members are
rejected.
See also: shards.py, which interprets the members.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from fqvit.errors import FqvitError

BLOCK = tarfile.BLOCKSIZE
LONGEST_NAME = 1 << 16
LARGEST_PAX = 1 << 20
TRAILING = 1 << 20  # bytes after the end-of-archive marker that must be zero; the padding of tar writers is shorter
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Member(NamedTuple):
    """A member of a tar file.

    offset: position of its first content byte   regular: whether it is a file, not a link or device
    """

    name: str
    offset: int
    size: int
    regular: bool


def members(path: Path) -> Iterator[Member]:
    """Yield the members in file order, without folders. Raises FqvitError for a damaged file."""
    try:
        with path.open("rb") as file:
            yield from _members(path, file)
    except OSError as error:
        raise FqvitError(f"{path}: cannot be read ({error.strerror or error}). Check the file and its disk.") from None


def _members(path: Path, file: IO[bytes]) -> Iterator[Member]:
    total = os.fstat(file.fileno()).st_size
    at = 0
    name: str | None = None  # from an extended header, for the next member
    size: int | None = None
    while True:
        file.seek(at)
        block = file.read(BLOCK)
        if at == 0:
            _check_not_compressed(path, block)
        if len(block) < BLOCK:
            raise FqvitError(f"{path}: no end-of-archive marker at byte {at}. The file is truncated; copy it again.")
        if not any(block):
            _check_zero_padding(path, file.read(TRAILING))
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise FqvitError(f"{path}: no tar header at byte {at} ({error}). The file is damaged; copy it again.") from None
        full_name = header.name if name is None else name
        length = header.size if size is None else size
        # As in tarfile: of the known types, only files and extended headers have content.
        has_content = header.isreg() or header.type not in tarfile.SUPPORTED_TYPES or header.type in EXTENSIONS
        if length < 0 or (has_content and at + BLOCK + length > total):
            left = max(0, total - at - BLOCK)
            raise FqvitError(
                f"{path}: member {full_name!r} has size {length}, but {left} bytes are left. The file is truncated; "
                "copy it again."
            )
        if header.type == tarfile.GNUTYPE_LONGNAME:
            name = _read_limited(path, file, length, LONGEST_NAME).rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
            found = _pax(path, _read_limited(path, file, length, LARGEST_PAX))
            name, size = found.get("path", name), _size(path, found)
        elif header.type in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
            pass  # global headers and link targets do not affect where members are
        elif header.type == tarfile.GNUTYPE_SPARSE:
            raise FqvitError(f"{path}: member {full_name!r} is sparse, expected a regular file. Pack it without --sparse.")
        else:
            if not header.isdir() and not full_name.endswith("/"):
                yield Member(full_name, at + BLOCK, length, header.isreg())
            name = size = None
        at += BLOCK + (-(-length // BLOCK) * BLOCK if has_content else 0)


EXTENSIONS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)


def _read_limited(path: Path, file: IO[bytes], length: int, most: int) -> bytes:
    if length > most:
        raise FqvitError(f"{path}: extended header of {length} bytes, expected at most {most}. The file is damaged.")
    return file.read(length)


def _pax(path: Path, data: bytes) -> dict[str, str]:
    """Parse records "LENGTH KEY=VALUE\\n", where LENGTH counts the whole record."""
    found = {}
    while data.strip(b"\0"):
        digits, _, rest = data.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
        record = rest[: max(0, length - len(digits) - 1)]
        key, equals, value = record.partition(b"=")
        if not equals or not record.endswith(b"\n") or len(digits) + 1 + len(record) != length:
            raise FqvitError(f"{path}: malformed extended header. The file is damaged; copy it again.")
        if key.startswith(b"GNU.sparse"):
            raise FqvitError(f"{path}: a sparse member, expected regular files. Pack it without --sparse.")
        found[key.decode("utf-8", "replace")] = value[:-1].decode("utf-8", "surrogateescape")
        data = data[length:]
    return found


def _size(path: Path, pax: dict[str, str]) -> int | None:
    text = pax.get("size")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise FqvitError(f"{path}: size {text[:20]!r} in an extended header, expected a number. The file is damaged.")
    return int(text)


def _check_not_compressed(path: Path, block: bytes) -> None:
    for magic, kind in COMPRESSED.items():
        if block.startswith(magic):
            raise FqvitError(
                f"{path}: compressed ({kind}), expected a plain tar file. Decompress it; compression saves little on images."
            )


def _check_zero_padding(path: Path, trailing: bytes) -> None:
    if any(trailing):
        raise FqvitError(f"{path}: data after the end-of-archive marker. Concatenate tar files with `tar -A`, not with `cat`.")
