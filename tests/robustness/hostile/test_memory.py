"""Small files that declare huge contents: each is rejected or accepted without allocating memory for the contents."""

from __future__ import annotations

import io
import json
import pickle
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.robustness.fuzz.seeds import seeds_of
from tests.robustness.hostile.containers import Tensors, fingerprint_of, packed

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc/self/statm of Linux")
SIDE = 8192
ALL = SIDE * SIDE
PREPROCESS = {"height": SIDE, "width": SIDE, "channels": 1, "resize": 1, "interpolation": "bicubic"}
PREPROCESS |= {"mean": [0.5], "std": [0.5]}
FLAT = {"op": "permute", "y": "flat", "x": "pixels", "view": [ALL], "perm": [0]}
MILLION = {"op": "permute", "y": "million", "x": "pixels", "view": [64, 1 << 20], "perm": [0], "select": [0, 0]}
COLUMN = {"op": "permute", "y": "column", "x": "pixels", "view": [ALL, 1], "perm": [0, 1]}


def program(ops: list[Any], tensors: Tensors, kind: str = "pooled") -> bytes:
    header = {
        "version": 1,
        "model": "x",
        "preprocess": PREPROCESS,
        "ops": ops,
        "sites": {},
        "recipe": {},
        "source": "",
        "images": 1,
    }
    text = json.dumps({**header, "output": {"buffer": ops[-1]["y"], "kind": kind, "scale": 1.0}})
    return packed(text, fingerprint_of(text, tensors), tensors)


def add(**fields: Any) -> dict[str, Any]:
    terms = [{"x": "flat", "mult": 1, **fields}] * 2
    return {"op": "add", "y": "z", "terms": terms, "shift": 1}


THREE: Tensors = {"z.w": ("I8", [3, 1], b"\1\2\3"), "z.bias": ("I32", [3], bytes(12))}
MAP = {"op": "permute", "y": "map", "x": "z", "view": [SIDE, SIDE, 3], "perm": [0, 1, 2]}
TABLE: Tensors = {"z.table": ("U8", [256], bytes(range(256)))}


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def saved(content: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(content, out, **options)
    return out.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def npy(shape: str, data: bytes) -> bytes:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + data


def safetensors(entries: dict[str, Any], data: bytes = b"") -> bytes:
    head = json.dumps(entries).encode()
    return struct.pack("<Q", len(head)) + head + data


def self_containing() -> bytes:
    """Make a checkpoint that contains itself as its weights."""
    content: dict[str, Any] = {}
    content["model"] = content
    return saved(content)


def legacy() -> bytes:
    """Make a file in the legacy format whose storage of 4 bytes claims 4 TB."""
    raw = saved({"w": torch.zeros(1)}, _use_new_zipfile_serialization=False)
    size = pickle.dumps(1, 2)[2:-1]
    at = raw.index(b"cpu") + 3
    at = raw.index(size, at)
    return raw[:at] + pickle.dumps(1 << 40, 2)[2:-1] + raw[at + len(size) :]


def annotated(height: int, width: int, segmentation: Any) -> bytes:
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 9, 9], "segmentation": segmentation}
    image = {"id": 1, "file_name": "a.png", "height": height, "width": width}
    return json.dumps({"images": [image], "annotations": [box], "categories": [{"id": 1, "name": "a"}]}).encode()


def tar(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


def wide_detector() -> bytes:
    """Make a few hundred kB of weights that describe a network of terabytes."""
    state = dict(torch.load(io.BytesIO(seeds_of("torch")["detector.pth"]))["state_dict"])
    state["backbone.patch_embed.proj.weight"] = torch.zeros(100_000, 3, 1, 1, dtype=torch.int8)
    return saved(state)


# "target description.suffix": (contents, part of the error message or "accepted"). The targets are those of fuzz/readers.py.
CASES: dict[str, tuple[bytes, str]] = {
    "program a sum of 2^26 channels.fqvit": (program([FLAT, add()], {}), "too many channels"),
    "program groups over 2^26 channels.fqvit": (program([FLAT, add(zero=[1, 2])], {}), "too many channels"),
    "program a table over 2^26 channels.fqvit": (
        program([FLAT, {"op": "lookup", "y": "z", "x": "flat"}], TABLE),
        "too many channels",
    ),
    "program many sums of 2^20 channels.fqvit": (
        program([MILLION, *(add(x="million") | {"y": f"z{i}"} for i in range(50))], {}),
        "MB, but the file stores only 0 bytes",
    ),
    "program i32 scores of a large map.fqvit": (
        program([COLUMN, {"op": "linear", "y": "z", "x": "column", "out": "acc"}, MAP], THREE, "scores"),
        "its buffers need 1536 MiB",
    ),
    "program a large view.fqvit": (program([FLAT], {}), "accepted"),
    "safetensors a tensor without data.safetensors": (
        safetensors({"w": {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4 * 10**12]}}),
        "damaged",
    ),
    "safetensors 0 rows of 2^60 elements.safetensors": (
        safetensors({"w": {"dtype": "F32", "shape": [0, 2**60], "data_offsets": [0, 0]}}),
        "not a known layout",
    ),
    "torch one number expanded to 10^12.pth": (
        saved({"head.weight": torch.zeros(1).expand(10**6, 10**6)}),
        "not a dense tensor",
    ),
    "torch a tensor on the meta device.pth": (
        saved({"head.weight": torch.zeros(10**6, 10**6, device="meta")}),
        "not a dense tensor",
    ),
    "torch a checkpoint that contains itself.pth": (self_containing(), "contains no weights"),
    "torch a storage of 4 TB.pth": (legacy(), "torch a storage"),
    "torch a network of terabytes.pth": (wide_detector(), "torch a network"),
    "torch a zip bomb.pth": (zipped({"x/data.pkl": bytes(100 << 20), "x/version": b"3"}), "claim to unpack"),
    "npz an array of 4 TB.npz": (zipped({"w.npy": npy("(1000000, 1000000)", bytes(16))}), "claims 4,000,000,000,000 bytes"),
    "npz a zip bomb.npz": (zipped({"w.npy": npy("(26214400,)", bytes(100 << 20))}), "claim to unpack"),
    "image a png of 10^10 pixels.png": (png(100_000, 100_000), "limit of"),
    "image a png of one row.png": (png(2**31 - 1, 1), "limit of"),
    "coco run lengths of 10^10 pixels.json": (
        annotated(100_000, 100_000, {"size": [100_000, 100_000], "counts": [5_000_000_000, 5_000_000_000]}),
        "pixels, expected",
    ),
    "coco an image of 10^6 x 10^6 pixels.json": (annotated(10**6, 10**6, None), "height"),
    "coco a polygon far outside the image.json": (annotated(9_999, 9_999, [[0, 0, 9e5, 0, 9e5, 9e5]]), "outline"),
    "results a mask of 10^10 pixels.json": (
        seeds_of("results")["one.json"].replace(b'"size": [8, 9]', b'"size": [100000, 100000]'),
        "results a mask",
    ),
    "recipe a number of 10,000 digits.toml": (b"weight_bits = " + b"9" * 10_000, "not a TOML file"),
    "recipe 10,000 brackets.toml": (b"x = " + b"[" * 10_000, "not a TOML file"),
    "settings 10,000 brackets.toml": (b"x = " + b"[" * 10_000, "not TOML"),
    "settings a million proposals.toml": (b"proposals = 1000000", "proposals"),
    "classes 10,000 brackets.txt": (b"[" * 10_000, "not valid JSON"),
    "shard an image of 8 GB.tar": (tar("0/a.png", (1 << 33) - 1), "has size 8589934591"),
    "shard a long name of 8 GB.tar": (tar("x", (1 << 33) - 1, tarfile.GNUTYPE_LONGNAME), "has size 8589934591"),
}


def test_a_small_file_does_not_allocate_the_sizes_that_it_declares(tmp_path: Path) -> None:
    (tmp_path / "warm-up.toml").write_text("short = 480\n")
    for name, (raw, _) in CASES.items():
        assert len(raw) < 500_000
        (tmp_path / name).write_bytes(raw)
    child = [sys.executable, str(Path(__file__).parent / "frugal.py"), str(tmp_path)]
    done = subprocess.run(child, capture_output=True, text=True, check=False)
    found = {name: (said, grown) for name, said, grown in map(json.loads, done.stdout.splitlines())}
    assert found.keys() == CASES.keys(), done.stderr[-2000:]
    for name, (_, expected) in CASES.items():
        said, grown = found[name]
        assert expected in said and "FINDING" not in said and len(said.splitlines()) == 1, (name, said)
        assert expected == "accepted" or name in said, (name, said)
        assert grown < 200e6, (name, grown)


def test_the_files_are_small() -> None:
    assert np.median([len(raw) for raw, _ in CASES.values()]) < 1000
