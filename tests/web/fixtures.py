"""Write the inputs and expected outputs of the JavaScript tests: PNG files of every kind, and Python's results for them."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fqvit.detect.fixed.detector import IntegerDetector
from fqvit.inference.search import BinaryIndex, Index
from fqvit.runtime.native import Engine
from tests.cli.command_line import fqvit

GOLDEN = Path(__file__).parent.parent / "golden"
CLASSIFIERS = ("fqvit_v1", "swin_v1", "tiny_v1", "uniform_v1")
# Adam7 interlacing: first row, first column, row step and column step of each pass
PASSES = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))


def write_fixtures(folder: Path) -> None:
    images = write_images(folder)
    classifiers = {}
    for name in CLASSIFIERS:
        path = GOLDEN / f"{name}.fqvit"
        classifiers[str(path)] = fqvit("classify", path, *images, "--json", "--logits").json
    answers = {
        "classifiers": classifiers,
        "outputs": run_all(GOLDEN / "outputs" / "vit_v1.fqvit", images[0]),
        "detectors": {str(path): detections(path, images[0]) for path in sorted((GOLDEN / "detectors").glob("*.fqvit"))},
        "similarities": similarities(),
    }
    (folder / "answers.json").write_text(json.dumps(answers))


def write_images(folder: Path) -> list[Path]:
    """Write PNG files of every color type and depth, some of which Pillow cannot write."""
    random = np.random.default_rng(0)
    coarse = Image.fromarray(random.integers(0, 256, (9, 11, 4), np.uint8))
    rgba = coarse.resize((97, 61), Image.Resampling.BICUBIC)
    rgb = rgba.convert("RGB")
    pictures = {
        "rgb": rgb,
        "rgba": rgba,
        "gray": rgb.convert("L"),
        "gray_alpha": rgba.convert("LA"),
        "gray_16": Image.fromarray(random.integers(0, 65536, (23, 31)).astype(np.uint16)),
        "one_bit": rgb.convert("1"),
        "palette": rgb.quantize(200),
        "palette_4": rgb.quantize(16),
        "palette_2": rgb.quantize(4),
    }
    paths = []
    for name, picture in pictures.items():
        paths.append(folder / f"{name}.png")
        picture.save(paths[-1])
    pixels = np.asarray(rgba)
    small = random.integers(0, 16, (13, 17, 1), np.uint8)
    for name, data, depth, color, interlaced in (
        ("rgb_16", pixels[..., :3].astype(np.uint16) * 257 - 3, 16, 2, False),
        ("rgba_16", pixels.astype(np.uint16) * 251, 16, 6, False),
        ("gray_4", small, 4, 0, False),
        ("gray_4_interlaced", small, 4, 0, True),
        ("rgb_interlaced", pixels[..., :3], 8, 2, True),
        ("tiny_interlaced", pixels[:2, :3, :3], 8, 2, True),
    ):
        paths.append(folder / f"{name}.png")
        paths[-1].write_bytes(png(data, depth, color, interlaced))
    return paths


def png(pixels: NDArray[Any], depth: int, color: int, interlaced: bool) -> bytes:
    """Encode pixels [height, width, samples] as PNG. The rows of a pass use the filter types 0, 1 and 2 in turn."""
    height, width, samples = pixels.shape
    raw = bytearray()
    for top, left, down, right in PASSES if interlaced else ((0, 0, 1, 1),):
        part = pixels[top::down, left::right]
        before = b""
        for number, row in enumerate(part if part.size else ()):
            if depth == 16:
                line = row.astype(">u2").tobytes()
            elif depth == 8:
                line = row.astype(np.uint8).tobytes()
            else:
                bits = "".join(f"{value:0{depth}b}" for value in row.ravel())
                line = int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")
            kind = number % 3
            distance = max(1, samples * depth // 8)
            other = {0: bytes(len(line)), 1: bytes(distance) + line, 2: before or bytes(len(line))}[kind]
            raw += bytes([kind]) + bytes((a - b) % 256 for a, b in zip(line, other))
            before = line
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(raw))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def run_all(path: Path, image: Path) -> dict[str, Any]:
    engine = Engine(path)
    with Image.open(image) as picture:
        outputs = engine.run_all(engine.header.preprocess.apply(picture)[None])
    described = [
        {"name": info.name, "kind": info.kind, "data": y[0].ravel().tolist()} for info, y in zip(engine.outputs, outputs)
    ]
    return {"file": str(path), "image": str(image), "outputs": described}


def detections(path: Path, image: Path) -> dict[str, Any]:
    with Image.open(image) as picture:
        found = IntegerDetector(path).detect_image(picture.convert("RGB"))
    parts = found.detections
    return {
        "image": str(image),
        "boxes": parts.boxes.tolist(),
        "scores": parts.scores.tolist(),
        "labels": parts.labels.tolist(),
        "masks": [mask.astype(int).ravel().tolist() for mask in found.masks()],
    }


def similarities() -> list[dict[str, Any]]:
    """Return pairs of embeddings of each type and their cosines, computed by `fqvit search`, in units of 2^-24."""
    random = np.random.default_rng(1)
    rows: list[dict[str, Any]] = []
    for dtype, most in (("u8", 256), ("u16", 65536), ("i32", 1 << 30), ("signs", 256)):
        for length in (1, 7, 384):
            kind: Any = {"u16": np.uint16, "i32": np.int32}.get(dtype, np.uint8)
            a, b = (random.integers(-most if dtype == "i32" else 0, most, (1, length)).astype(kind) for _ in range(2))
            zero = 0 if dtype in ("i32", "signs") else int(random.integers(0, 200))
            index = BinaryIndex(a) if dtype == "signs" else Index(a, zero, 1)
            rows.append(
                {
                    "dtype": dtype,
                    "zero": zero,
                    "a": a[0].tolist(),
                    "b": b[0].tolist(),
                    "score": int(index.scores(b, zero)[0, 0]),
                }
            )
    return rows
