"""List the commands whose outputs must stay intact after any fault, and check whether an output is complete."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEFT = re.compile(r"\..+\.[0-9a-f]{8}\.(tmp|old)")  # file names from fqvit.system.files.temporary_path


@dataclass(frozen=True)
class Job:
    """A command and its output.

    words: the arguments of `fqvit`, run in a folder that `prepare` has filled.
    out: the output. load: raises unless the output is complete.
    before: the arguments of a command that writes another output to the same path.
    cells: the folder with the finished cells of a table (one cell per method and model) or the finished parts of embeddings.
        The next run continues from it.
    """

    name: str
    words: tuple[object, ...]
    out: str
    load: Callable[[Path], object]
    before: tuple[object, ...]
    cells: str | None = None


def _program(path: Path) -> None:
    from fqvit import Program

    Program.load(path)


def _detector(path: Path) -> None:
    from fqvit import DetectorProgram

    DetectorProgram.load(path)


def _embeddings(path: Path) -> None:
    from fqvit.inference.embeddings import read

    read(path)


def _onnx(path: Path) -> None:
    import onnx

    onnx.checker.check_model(onnx.load(path), full_check=True)


def _folder(path: Path) -> None:
    """Check that no file of the manifest is missing or empty, and that every array matches its digest."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name in manifest["files"]:
        assert (path / name).stat().st_size > 0, name
    for array in (*manifest.get("buffers", {}).values(), *manifest.get("constants", {}).values()):
        assert hashlib.sha256((path / array["file"]).read_bytes()).hexdigest() == array["sha256"], array


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON table, without their timings."""
    return [
        {key: value for key, value in row.items() if not key.endswith("seconds")}
        for row in json.loads(path.read_text())["rows"]
    ]


TABLE = (
    "table",
    "--models",
    "fmnist_vit",
    "--images",
    32,
    "--limit",
    32,
    "--cache",
    "cells",
    "-o",
    "out.json",
    "-o",
    "out.csv",
)


def _export(kind: str, load: Callable[[Path], object]) -> Job:
    return Job(
        kind,
        ("export", "new.fqvit", "--to", kind, "-o", "out"),
        "out",
        load,
        ("export", "old.fqvit", "--to", kind, "-o", "out"),
    )


JOBS = {
    job.name: job
    for job in (
        Job(
            "quantize",
            ("quantize", "--images", 64, "-o", "out.fqvit"),
            "out.fqvit",
            _program,
            ("quantize", "--images", 3, "-o", "out.fqvit"),
        ),
        Job(
            "detect quantize",
            ("detect", "quantize", "--weights", "shapes.safetensors", "--calib", "train", "-o", "out.fqvit"),
            "out.fqvit",
            _detector,
            ("detect", "quantize", "--weights", "shapes.safetensors", "--calib", "train", "--images", 1, "-o", "out.fqvit"),
        ),
        Job("table", (*TABLE, "--methods", "minmax,fq-vit"), "out.json", rows, (*TABLE, "--methods", "ema"), "cells"),
        Job(
            "embed",
            ("embed", "new.fqvit", "photos", "-o", "out.safetensors"),
            "out.safetensors",
            _embeddings,
            ("embed", "old.fqvit", "photos", "-o", "out.safetensors"),
            ".out.safetensors.parts",
        ),
        _export("onnx", _onnx),
        _export("qdq", _onnx),
        _export("c", _folder),
        _export("vectors", _folder),
    )
}


def prepare(folder: Path, names: Iterable[str] = ()) -> None:
    """Write the input files of these jobs, or of all jobs if no names are given."""
    from PIL import Image

    import fqvit
    from fqvit.models import embedded
    from tests.detect.saved import write_all

    model = fqvit.load_model("fmnist_vit")
    images = embedded.calibration_images()
    for name, count in (("old", 3), ("new", 32)):
        fqvit.lower(model, fqvit.calibrate(model, images[:count], fqvit.load_recipe("fqvit"))).save(folder / f"{name}.fqvit")
    (folder / "photos").mkdir()
    for number, pixels in enumerate(images[:64]):
        Image.fromarray(pixels[:, :, 0]).save(folder / "photos" / f"{number:02}.png")
    if not names or any("detect" in name for name in names):
        write_all(folder)


def digest(path: Path) -> str | None:
    """Return the digest of a file, of all files of a folder, or of the rows of a table; None if the path does not exist."""
    if not path.exists():
        return None
    if path.suffix == ".json" and path.is_file():
        return hashlib.sha256(json.dumps(rows(path)).encode()).hexdigest()
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    whole = hashlib.sha256()
    for file in files:
        whole.update(str(file.relative_to(path)).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


def leftovers(folder: Path) -> list[Path]:
    """Return the temporary files and folders, recognized by their names."""
    return [path for path in folder.iterdir() if LEFT.fullmatch(path.name)]
