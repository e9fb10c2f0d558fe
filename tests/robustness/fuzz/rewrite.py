"""Format-aware mutations that keep checksums valid, so that mutated data reaches the code behind the checksum tests.

Each mutation takes a file, the maximum size of the result, a random generator, and `bytewise`, which mutates plain bytes.
See also: mutate.py (.fqvit files).
"""

from __future__ import annotations

import io
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable

from tests.robustness.fuzz.mutate import Seed, mutated

Bytewise = Callable[[bytes, int], bytes]
BLOCK = 512


def fqvit(raw: bytes, most: int, rng: random.Random, bytewise: Bytewise) -> bytes:
    """Mutate a .fqvit file. A file that can no longer be unpacked is mutated bytewise."""
    try:
        return mutated(rng, Seed.of(raw))[:most]
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, struct.error):
        return bytewise(raw, most)


def zipped(raw: bytes, most: int, rng: random.Random, bytewise: Bytewise) -> bytes:
    """Mutate one member of a zip file, with valid checksums: mostly the first, which describes the others in PyTorch files."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            members = [(name, archive.read(name)) for name in archive.namelist()]
        index = 0 if rng.random() < 0.7 else rng.randrange(len(members))
        name, data = members[index]
        members[index] = name, bytewise(data, max(len(data) + 100, 200))
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
            for name, data in members:
                archive.writestr(name, data)
        return out.getvalue()[:most]
    except Exception:  # zipfile raises almost any exception for a damaged file
        return bytewise(raw, most)


def tarred(raw: bytes, most: int, rng: random.Random, bytewise: Bytewise) -> bytes:
    """Mutate any bytes of a tar file, then make the checksum of every header valid."""
    data = bytearray(bytewise(raw, most))
    for at in range(0, len(data) - BLOCK + 1, BLOCK):
        header = data[at : at + BLOCK]
        if any(header[:100]) and header[257:262] == b"ustar":
            data[at + 148 : at + 156] = b"%06o\0 " % tarfile.calc_chksums(bytes(header))[0]
    return bytes(data)


def plain(raw: bytes, most: int, rng: random.Random, bytewise: Bytewise) -> bytes:
    """Mutate plain bytes."""
    return bytewise(raw, most)


BY_READER = {"program": fqvit, "detector": fqvit, "torch": zipped, "npz": zipped, "shard": tarred}


def randomly(rng: random.Random) -> Bytewise:
    """Return a bytewise mutation for runs without a fuzzer: insert, delete, duplicate or change a few bytes."""

    def altered(raw: bytes, most: int) -> bytes:
        data = bytearray(raw)
        for _ in range(rng.choice((1, 1, 2, 4))):
            at, what = rng.randrange(len(data) + 1), rng.randrange(5)
            if what == 0:
                data[at:at] = rng.randbytes(rng.randrange(1, 5))
            elif what == 1:
                del data[at : at + rng.choice((1, 1, 4, 100))]
            elif what == 2:
                data[at:at] = data[at : at + rng.choice((1, 8, 60))]
            elif at < len(data):
                data[at] = rng.choice((0, 1, 48, 57, 127, 128, 255, data[at] ^ (1 << rng.randrange(8))))
        return bytes(data[:most])

    return altered
