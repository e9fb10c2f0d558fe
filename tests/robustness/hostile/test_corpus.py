"""Commands reject malformed files of every kind that they read: a one-line error that names the file, exit code 2, no output.

The tests of each reader have more cases; docs/explanation/hardening.md lists these tests.
"""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.cli.command_line import assert_rejected, fqvit
from tests.factories import one_thread as one_thread
from tests.robustness.fuzz.seeds import golden, seeds_of
from tests.robustness.hostile.containers import DETECTOR, rewritten

Words = tuple[object, ...]


def bitmap() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (20, 20), (9, 99, 199)).save(out, "bmp")
    return out.getvalue()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of valid files for the arguments other than the malformed file."""
    folder = tmp_path_factory.mktemp("good")
    (folder / "program.fqvit").write_bytes(golden()["tiny_v1.fqvit"])
    (folder / "detector.fqvit").write_bytes(seeds_of("detector")["tiny.fqvit"])
    (folder / "detector.safetensors").write_bytes(seeds_of("safetensors")["detector.safetensors"])
    (folder / "images").mkdir()
    (folder / "images" / "a.bmp").write_bytes(bitmap())
    return folder


# {kind of file: (file name, commands that read it)}. G: folder of valid files, F: the malformed file, O: output file.
G, F, O = Path("G"), Path("F"), Path("O")
COMMANDS: dict[str, tuple[str, list[Words]]] = {
    "program": (
        "bad.fqvit",
        [
            ("inspect", F),
            ("classify", F, G / "images" / "a.bmp"),
            ("eval", F, "--data", G / "images"),
            ("export", F, "--to", "c", "-o", O),
            ("compare", F),
        ],
    ),
    "detector": ("bad.fqvit", [("detect", "predict", F, G / "images" / "a.bmp", "-o", O), ("inspect", F)]),
    "safetensors": (
        "bad.safetensors",
        [
            ("quantize", "fmnist_vit", "--weights", F, "-o", O),
            ("detect", "quantize", "--weights", F, "--calib", G / "images", "-o", O),
        ],
    ),
    "torch": ("bad.pth", [("quantize", "fmnist_vit", "--weights", F, "-o", O)]),
    "npz": ("bad.npz", [("quantize", "fmnist_vit", "--weights", F, "-o", O)]),
    "image": (
        "bad.png",
        [("classify", G / "program.fqvit", F), ("detect", "predict", G / "detector.fqvit", F)],
    ),
    "coco": (
        "bad.json",
        [("detect", "eval", G / "detector.fqvit", "--data", G / "images", "--annotations", F, "-o", O)],
    ),
    "results": ("bad.json", [("detect", "draw", "--results", F, "--data", G / "images", "-o", O)]),
    "recipe": ("bad.toml", [("quantize", "--recipe", F, "-o", O), ("table", "--methods", F, "-o", O)]),
    "settings": (
        "bad.toml",
        [("detect", "quantize", "--weights", G / "detector.safetensors", "--calib", G / "images", "--settings", F, "-o", O)],
    ),
    "classes": ("bad.txt", [("quantize", "--classes", F, "-o", O)]),
    "calibration": ("bad.json", [("quantize", "--calibration", F, "-o", O)]),
    "shard": (
        "bad.tar",
        [("eval", G / "program.fqvit", "--data", F), ("quantize", "--calib", F, "-o", O)],
    ),
    "parquet": (
        "bad.parquet",
        [("eval", G / "program.fqvit", "--data", F), ("quantize", "--calib", F, "-o", O)],
    ),
    "embeddings": ("bad.safetensors", [("search", F, "--queries", F)]),
}
NEEDS = {"coco": "pycocotools", "parquet": "pyarrow"}
TEXTS = ("recipe", "settings", "classes")  # kinds in which an empty file or a word can be valid


def archive(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for member, type_ in (("0/good.bmp", tarfile.REGTYPE), (name, kind)):
            info = tarfile.TarInfo(member)
            info.type, info.linkname = type_, target
            info.size = len(bitmap()) if type_ == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(bitmap()))
    return out.getvalue()


def parquet() -> bytes:
    import pyarrow
    from pyarrow.parquet import write_table

    out = io.BytesIO()
    write_table(pyarrow.table({"image": [bitmap()], "label": [0]}), out)
    return out.getvalue()


def saved(content: Any) -> bytes:
    out = io.BytesIO()
    torch.save(content, out)
    return out.getvalue()


def zipped(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def shifted(seed: bytes, kind: str, ops_of: Callable[[Any], list[Any]], shift: int) -> bytes:
    """Return the file with the field `shift` replaced in every op that has it."""

    def change(header: Any, _: Any) -> None:
        for op in ops_of(header):
            if "shift" in op:
                op["shift"] = shift

    return rewritten(seed, change, kind)


def in_program(shift: int) -> bytes:
    return shifted(golden()["tiny_v1.fqvit"], "fqvit", lambda header: header["ops"], shift)


def in_detector(shift: int) -> bytes:
    return shifted(seeds_of("detector")["tiny.fqvit"], DETECTOR, lambda header: header["pyramid"]["ops"], shift)


class Opens:
    """An object whose pickle opens a file when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("/nowhere/opened-by-a-pickle", "w")


OWN: dict[str, dict[str, bytes]] = {
    "program": {f"shift {shift}": in_program(shift) for shift in (0, 63, -1)},
    "detector": {f"shift {shift}": in_detector(shift) for shift in (0, 63, -1)},
    "safetensors": {"a long header": struct.pack("<Q", 2**63) + b"{}", "no tensors": struct.pack("<Q", 2) + b"{}"},
    "torch": {
        "code": saved({"model": Opens()}),
        "no weights": saved([1, 2]),
        "a string as weights": saved({"head.weight": "x"}),
        "a newline in a name": saved({"a\nb\x1b[2J": torch.zeros(1)}),
        "a plain pickle": b"\x80\x02}q\x00.",
        "an empty archive": zipped(**{"x/data.pkl": b""}),
    },
    "npz": {
        "objects": zipped(**{"a.npy": b"\x93NUMPY\x01\x00\x10\x00{'descr':'|O'} \n"}),
        "no magic": zipped(**{"a.npy": b"x"}),
    },
    "image": {
        "a truncated jpeg": seeds_of("image")["rgb.jpeg"][:300],
        "a gif of size 0 x 0": b"GIF89a\0\0\0\0\0\0\0;",
        "a bitmap of 2^31 rows": bitmap()[:22] + struct.pack("<i", -(2**31)) + bitmap()[26:],
    },
    "coco": {
        "a list": b"[]",
        "no images": b'{"images":[],"annotations":[],"categories":[]}',
        "not a number": b'{"images": NaN}',
    },
    "results": {"an object": b"{}", "nested": b"[" * 100_000},
    "recipe": {
        "an unknown field": b"bit = 3",
        "no table": b"[[sites]]\n",
        "a base that is a list": b"base = ['fqvit']",
        "a duplicate key": b"name = 'a'\nname = 'b'",
        "a newline in a key": b'"a\\nb" = 1',
        "bits of 10^40": b"weight_bits = 1" + b"0" * 40,
    },
    "settings": {"an unknown field": b"shrt = 3", "infinite": b"score = inf", "a date": b"short = 2026-01-01"},
    "classes": {"numbers": b"[1, 2]", "an object": b'{"a": 1}'},
    "shard": {
        "a symbolic link": archive("0/a.png", tarfile.SYMTYPE, "/etc/passwd"),
        "a hard link": archive("0/a.png", tarfile.LNKTYPE, "0/good.bmp"),
        "a device": archive("0/a.png", tarfile.CHRTYPE),
        "a pipe": archive("0/a.png", tarfile.FIFOTYPE),
        "a name in the parent folder": archive("../a.png"),
        "a name that leads out of the archive": archive("0/../../a.png"),
        "an absolute name": archive("/a.png"),
        "a member that is not an image": archive("0/a.bmp").replace(b"BM", b"XX"),
    },
}


def malformed(kind: str) -> dict[str, bytes]:
    """Return {case: malformed bytes} for a kind of file."""
    found = {"zeros": bytes(3000), "bytes that are not text": b"\xff\xfe\xfd" * 50, "an image": bitmap()}
    found |= {"an archive": zipped(x=b"1"), "brackets": b"[" * 20_000}
    if kind not in TEXTS:
        found |= {"nothing": b"", "a word": b"hello"}
        if kind == "calibration":
            whole = b'{"recipe": {}}'
        else:
            whole = parquet() if kind == "parquet" else max(seeds_of(kind).values(), key=len)
        found |= {"half of a file": whole[: 700 if kind == "shard" else len(whole) // 2]}
    if kind == "image":
        del found["an image"]
    return found | OWN.get(kind, {})


@pytest.mark.parametrize("kind", COMMANDS)
def test_commands_reject_malformed_files_with_a_one_line_error(kind: str, home: Path, tmp_path: Path) -> None:
    if kind in NEEDS:
        pytest.importorskip(NEEDS[kind])
    name, commands = COMMANDS[kind]
    file, out = tmp_path / name, tmp_path / "out"
    real_paths = {"G": home, "F": file, "O": out}
    for case, raw in malformed(kind).items():
        file.write_bytes(raw)
        for words in commands:
            real = [real_paths[word.parts[0]].joinpath(*word.parts[1:]) if isinstance(word, Path) else word for word in words]
            done = fqvit(*real)
            said = (case, words[:2], done)
            if kind not in ("image", "shard"):
                assert_rejected(done, name)
            # Commands that read images or shards also print one warning per image.
            assert done.code == 2 and name in done.err and len(done.err.splitlines()) <= 3, said
            assert all(line.startswith("fqvit: ") for line in done.err.splitlines()), said
            assert not out.exists(), said
            assert [path.name for path in tmp_path.iterdir()] == [name], said
