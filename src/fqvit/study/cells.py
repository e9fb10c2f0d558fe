"""Run one cell of a table (a model with a method) and cache its predictions for every image.

A cell has two steps, calibration and evaluation. Each is cached under a key made from everything that determines its result:
checkpoint, preprocessing, recipe, images, device, the code of this package, and the versions of torch and Pillow. After an
interrupted run, finished steps are not repeated. Needs torch.
See also: table.py (rows and tables of cells).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import PIL
import torch
from numpy.typing import NDArray

import fqvit
from fqvit.data.images import Batch, Source
from fqvit.distributed.workers import SINGLE_PROCESS, Workers
from fqvit.errors import FqvitError
from fqvit.evaluate.accuracy import Run, measure
from fqvit.ir.file import file_size
from fqvit.lowering.lower import lower
from fqvit.models.device import device_of
from fqvit.models.graph import run_float, trace
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.quant.calibrate import calibrate
from fqvit.quant.calibration import Calibration
from fqvit.quant.recipe import Recipe
from fqvit.quant.simulate import Simulation
from fqvit.runtime.native import Engine
from fqvit.study.methods import Method
from fqvit.system.files import write_atomically
from fqvit.system.progress import Progress, T, track

BATCH = 16
# Files and folders whose code determines the result of a cell, unlike commands, reports, exports and kernels (all bit-exact).
DECIDING = ("data", "models", "frontend", "quant", "lowering", "ir", "evaluate/accuracy.py", "study/cells.py")


class Images(Protocol):
    """Images shared by workers (cli/inputs.py implements it).

    batches(size, label): this worker's share of one pass   report(): warn about images that the pass could not read
    """

    source: Source
    workers: Workers

    def batches(self, size: int, label: str) -> Iterable[Batch]: ...

    def report(self) -> None: ...


class CellResult(msgspec.Struct, frozen=True):
    """The result of a cell. predictions, ranks: int32 [images] as bytes: the best class, and the rank of the label (0: best).

    file_bytes, fingerprint: those of the integer program; 0 and "" if there is none. skipped: images that could not be read.
    """

    calibration_images: int
    calibration_seconds: float
    seconds: float
    file_bytes: int
    fingerprint: str
    predictions: bytes
    ranks: bytes
    skipped: list[str]

    def predicted(self) -> NDArray[np.int32]:
        return np.frombuffer(self.predictions, "<i4")

    def ranked(self) -> NDArray[np.int32]:
        return np.frombuffer(self.ranks, "<i4")


class Kept(msgspec.Struct, frozen=True):
    """A finished calibration as JSON text, and the seconds that it took."""

    seconds: float
    calibration: str


class CacheError(FqvitError):
    """The cache cannot be written. It ends the run: further cells would be lost, too."""


class Cache:
    """A folder of finished steps. The first worker reads and writes it for all workers. fresh: write only, ignore old steps."""

    def __init__(self, folder: Path, fresh: bool = False, workers: Workers = SINGLE_PROCESS) -> None:
        self.folder, self.fresh, self.workers = folder, fresh, workers
        if workers.first:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                said = f"{folder}: cannot create the folder ({error.strerror})"
                raise FqvitError(f"{said}. Choose another folder (--cache DIR).") from None

    def read(self, key: str) -> str:
        """Return the cached text; "" if there is none or the file is not UTF-8. The caller checks that the text is complete."""
        kept = ""
        if self.workers.first and not self.fresh:
            with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
                kept = self._path(key).read_text(encoding="utf-8")
        found: str = self.workers.broadcast(kept)
        return found

    def write(self, key: str, value: bytes) -> None:
        """Write atomically; raises CacheError if that fails."""
        if self.workers.first:
            try:
                write_atomically(self._path(key), lambda temporary: temporary.write_bytes(value))
            except FqvitError as error:
                raise CacheError(str(error)) from error

    def drop(self, key: str) -> None:
        """Delete a step that is no longer needed, if it exists."""
        if self.workers.first:
            with contextlib.suppress(OSError):
                self._path(key).unlink()

    def check(self) -> None:
        """Raise CacheError before minutes of work that could not be saved. Reading works from a read-only folder, too."""
        if self.workers.first and not os.access(self.folder, os.W_OK):
            raise CacheError(f"{self.folder}: is not writable. Choose another folder (--cache DIR).")

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


@dataclass(frozen=True)
class Bench:
    """Everything that the cells of one model share. calib(n): at most n calibration images; data: labelled test images."""

    model: FloatModel
    calib: Callable[[int], Images]
    data: Images
    cache: Cache
    device: str = "cpu"

    def result(self, method: Method) -> tuple[CellResult, bool]:
        """Return the result of the method's cell, from the cache or by running it, and whether it came from the cache."""
        calib = None if method.recipe is None else self.calib(method.recipe.images)
        key = self._key("result", method, calib, self.data)
        try:
            return msgspec.json.decode(self.cache.read(key), type=CellResult), True
        except msgspec.DecodeError:
            pass  # missing or damaged
        self.cache.check()
        found = self._evaluate(method)
        self.cache.write(key, msgspec.json.encode(found))
        return found, False

    def _evaluate(self, method: Method) -> CellResult:
        run, images, spent, size, fingerprint = self._prepare(method)
        label = f"{self.model.name} {method.label}: evaluating"
        found = measure(run, self.data.batches(BATCH, label), self.data.workers)
        predictions, ranks = (values.astype("<i4").tobytes() for values in (found.predictions, found.ranks))
        skipped = [name for name, _ in self.data.source.skipped]
        return CellResult(images, spent, found.seconds, size, fingerprint, predictions, ranks, skipped)

    def _prepare(self, method: Method) -> tuple[Run, int, float, int, str]:
        """Return the model to run, its calibration's image count and seconds, and the program's size and fingerprint."""
        if method.recipe is None:
            return self._float(), 0, 0.0, 0, ""
        calibration, spent = self._calibration(method, method.recipe)
        if not method.recipe.integer:
            simulation = Simulation(self.model, calibration)
            return lambda images: simulation.run(images).numpy(), calibration.images, spent, 0, ""
        program = lower(self.model, calibration)
        return Engine(program).run, calibration.images, spent, file_size(program), program.fingerprint()

    def _calibration(self, method: Method, recipe: Recipe) -> tuple[Calibration, float]:
        """Return the calibration, from the cache or by running it, and the seconds that it took."""
        calib = self.calib(recipe.images)
        key = self._key("calibration", method, calib)
        try:
            kept = msgspec.json.decode(self.cache.read(key), type=Kept)
            return Calibration.from_json(kept.calibration), kept.seconds
        except (msgspec.DecodeError, FqvitError):
            pass  # missing or damaged
        start = time.perf_counter()
        calibration = calibrate(
            self.model,
            calib.source,
            recipe,
            device=self.device,
            progress=cell_progress(f"{self.model.name} {method.label}"),
            workers=calib.workers,
            size_of=lambda found: file_size(lower(self.model, found)),
        )
        calib.report()
        spent = time.perf_counter() - start
        self.cache.write(key, msgspec.json.encode(Kept(spent, calibration.to_json())))
        return calibration, spent

    def _float(self) -> Run:
        where = device_of(self.device)
        graph = trace(self.model.module if self.device == "cpu" else copy.deepcopy(self.model.module).to(where))
        preprocess = self.model.preprocess

        def run(images: NDArray[np.uint8]) -> NDArray[np.float32]:
            logits: NDArray[np.float32] = run_float(graph, normalise(images, preprocess).to(where)).cpu().numpy()
            return logits

        return run

    def _key(self, step: str, method: Method, *sources: Images | None) -> str:
        fields: dict[str, object] = {
            "model": self.model.name,
            "weights": self.model.source.rsplit("sha256", 1)[-1],
            "preprocess": msgspec.to_builtins(self.model.preprocess),
            "images": [None if images is None else images.source.digest() for images in sources],
            "code": code_digest(),
        }
        return step_key(step, method, fields, self.device)


def cell_progress(cell: str) -> Progress:
    """Return a progress bar whose label names the cell."""

    def labelled(iterable: Iterable[T], total: int | None, label: str) -> Iterable[T]:
        return track(iterable, total, f"{cell}: {label}")

    return labelled


def step_key(step: str, method: Method, fields: Mapping[str, object], device: str = "cpu") -> str:
    """Return the key of a step. fields: what determines its result besides the recipe, the device and installed packages"""
    recipe: dict[str, Any] | None = None
    if method.recipe is not None:
        recipe = msgspec.to_builtins(method.recipe)
        del recipe["name"]  # the name does not change the result, so that two tables can share a cell
    # Programs are bit-exact everywhere, but float sums and resized pixels depend on the build.
    built = [device, str(torch.__version__), PIL.__version__]
    every = {"step": step, "recipe": recipe, "built": built, **fields}
    return f"{step}-{hashlib.sha256(msgspec.json.encode(every, order='deterministic')).hexdigest()[:32]}"


@functools.cache  # the running code does not change, even if its files do meanwhile
def code_digest(parts: Sequence[str] = DECIDING) -> str:
    """Return a digest of the code that determines results, so that a new version does not reuse results of an older one."""
    root = Path(fqvit.__file__).parent
    digest = hashlib.sha256()
    for path in deciding_files(root, parts):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def deciding_files(root: Path, parts: Sequence[str] = DECIDING) -> list[Path]:
    """List the Python files in these parts of the package, sub-folders included, in sorted order."""
    paths = [root / part for part in parts]
    return sorted(path for part in paths for path in ([part] if part.suffix == ".py" else part.rglob("*.py")))
