"""Unpack a .fqvit file and pack it again with a valid fingerprint, as a hostile writer can always do."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]
Tensors = dict[str, tuple[str, list[int], bytes]]  # name -> dtype, shape, little-endian bytes
Change = Callable[[Json, Tensors], None]
PROGRAM, DETECTOR = "fqvit", "fqvit_detector"  # key of the header in the metadata


def unpacked(raw: bytes, kind: str = PROGRAM) -> tuple[str, str, Tensors]:
    """Return the header as JSON text, the fingerprint and the constants of a file."""
    (length,) = struct.unpack("<Q", raw[:8])
    table = json.loads(raw[8 : 8 + length])
    metadata = table.pop("__metadata__")
    data = raw[8 + length :]
    tensors = {name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]) for name, entry in table.items()}
    return metadata[kind], metadata["fingerprint"], tensors


def packed(text: str, fingerprint: str, tensors: Tensors, kind: str = PROGRAM) -> bytes:
    """Return the bytes of a file with this header, fingerprint and constants."""
    table: Json = {"__metadata__": {kind: text, "fingerprint": fingerprint}}
    data = b""
    for name, (dtype, shape, part) in tensors.items():
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    head = json.dumps(table).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + data


def fingerprint_of(text: str, tensors: Tensors) -> str:
    """Compute the fingerprint as in docs/reference/format.md: over the text of the header, then the constants."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    for name in sorted(tensors):
        dtype, shape, part = tensors[name]
        digest.update(f"\n{name} {dtype.lower()} {','.join(map(str, shape))}\n".encode("utf-8", "surrogatepass"))
        digest.update(part)
    return digest.hexdigest()


def rewritten(raw: bytes, change: Change, kind: str = PROGRAM) -> bytes:
    """Apply `change` to a file and return it with a valid fingerprint."""
    text, _, tensors = unpacked(raw, kind)
    header = json.loads(text)
    change(header, tensors)
    text = json.dumps(header, separators=(",", ":"))
    return packed(text, fingerprint_of(text, tensors), tensors, kind)
