"""Make small pictures and compute their expected embeddings, for the tests of `embed`."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from fqvit.inference.model import ProgramModel
from fqvit.runtime.native import Integers

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
TOKENS = GOLDEN / "tokens_v1.fqvit"


def png(seed: int) -> bytes:
    data = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (14 + seed % 5, 16, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(data, "png")
    return data.getvalue()


def folder_of(folder: Path, count: int, first: int = 0) -> Path:
    """Write `count` pictures to two sub-folders."""
    for number in range(first, first + count):
        path = folder / f"{number % 2}" / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number))
    return folder


def tar_of(path: Path, numbers: range) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            info = tarfile.TarInfo(f"{number:04}.png")
            info.size = len(data := png(number))
            tar.addfile(info, io.BytesIO(data))
    return path


def expected_codes(names: list[str]) -> Integers:
    """Return the first output of TOKENS for pictures whose names end in NUMBER.png."""
    numbers = [int(name.rpartition("/")[2].removesuffix(".png")) for name in names]
    return ProgramModel(TOKENS).embed([Image.open(io.BytesIO(png(number))) for number in numbers]).codes()
