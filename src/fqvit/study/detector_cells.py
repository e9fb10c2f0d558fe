"""Run one cell of a detector table (a detector with a method) and cache its average precisions.

As in cells.py, calibration and evaluation are cached under keys made from everything that determines their results.
Detecting objects in thousands of images takes hours, so detections are cached too, PART images at a time, until the cell is
finished.
See also: cells.py (classifiers), detector_table.py (rows and tables). Needs torch and pycocotools.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
from PIL import Image

from fqvit.detect.calibrate import DetectorCalibration, calibrate_detector
from fqvit.detect.detections import ImageDetections
from fqvit.detect.file import file_size
from fqvit.detect.fixed.detector import IntegerDetector
from fqvit.detect.float.networks import FloatNetworks
from fqvit.detect.float.pipeline import detect
from fqvit.detect.image_files import ImageFiles
from fqvit.detect.images import FLOAT_RULE, prepare
from fqvit.detect.lower import LoweredDetector
from fqvit.detect.model.detector import FloatDetector
from fqvit.detect.program import DetectorProgram
from fqvit.detect.results import Result, coco_results
from fqvit.errors import FqvitError
from fqvit.evaluate.coco import CocoImages, average_precision, categories_of
from fqvit.quant.recipe import Recipe
from fqvit.study.cells import DECIDING, Cache, Kept, cell_progress, code_digest, step_key
from fqvit.study.methods import Method
from fqvit.system.progress import busy, track

PART = 50  # images whose detections are cached together
DETECTOR_DECIDING = (*DECIDING, "detect", "evaluate/coco.py", "study/detector_cells.py")

Detect = Callable[[Image.Image], ImageDetections]


class DetectorResult(msgspec.Struct, frozen=True):
    """The result of a cell. scores: average precisions in percent, as in evaluate/coco.py

    file_bytes, fingerprint: those of the integer program; 0 and "" for the float detector. skipped: (name, reason) of each
    image that could not be read.
    """

    calibration_images: int
    calibration_seconds: float
    seconds: float
    file_bytes: int
    fingerprint: str
    scores: dict[str, float | None]
    images: int
    detections: int
    skipped: list[tuple[str, str]]


class Part(msgspec.Struct, frozen=True):
    """The detections of some images. seen: indices of the images that could be read"""

    seen: list[int]
    results: list[Result]
    skipped: list[tuple[str, str]]
    seconds: float


@dataclass(frozen=True)
class DetectorBench:
    """Everything that the cells of one detector share. name: in the table   calib(n): at most n calibration images

    report: called with the images after a calibration, to warn about those that could not be read
    """

    name: str
    detector: FloatDetector
    calib: Callable[[int], ImageFiles]
    data: CocoImages
    cache: Cache
    report: Callable[[ImageFiles], object]
    threads: int | None = None

    def result(self, method: Method) -> tuple[DetectorResult, bool]:
        """Return the result of the method's cell, from the cache or by running it, and whether it came from the cache."""
        calib = None if method.recipe is None else self.calib(method.recipe.images)
        fields = {"calibration": None if calib is None else calib.digest(), **self._data_fields()}
        key = self._key("result", method, fields)
        try:
            return msgspec.json.decode(self.cache.read(key), type=DetectorResult), True
        except msgspec.DecodeError:
            pass  # missing or damaged
        self.cache.check()
        found = self._evaluate(method, key)
        self.cache.write(key, msgspec.json.encode(found))
        for number in range(len(self._parts())):
            self.cache.drop(f"{key}-{number}")
        return found, False

    def _evaluate(self, method: Method, key: str) -> DetectorResult:
        run, images, spent, size, fingerprint = self._prepare(method)
        label = f"{self.name} {method.label}: detecting"
        parts: list[Part] = []
        for _ in track(self._detect(run, key, parts), len(self.data.files), label, "images"):
            pass
        seen = [self.data.ids[i] for part in parts for i in part.seen]
        if not seen:
            raise FqvitError(f"{self.data.annotations}: none of its images can be read. Repair or remove them.")
        results = [result for part in parts for result in part.results]
        classes = self.detector.module.config.classes
        categories, _ = categories_of(self.data, self.detector.settings, classes)
        with busy(f"{self.name} {method.label}: average precision"):
            scores = average_precision(self.data.truth, results, seen, categories)
        seconds, skipped = sum(part.seconds for part in parts), [one for part in parts for one in part.skipped]
        return DetectorResult(images, spent, seconds, size, fingerprint, scores, len(seen), len(results), skipped)

    def _parts(self) -> list[range]:
        total = len(self.data.files)
        return [range(first, min(first + PART, total)) for first in range(0, total, PART)]

    def _detect(self, run: Detect, key: str, parts: list[Part]) -> Iterator[int]:
        """Yield the index of each image, and append all parts, from the cache or by running the detector."""
        files, settings = self.data.files, self.detector.settings
        files.skipped.clear()
        for number, indices in enumerate(self._parts()):
            own = f"{key}-{number}"
            part = self._kept_part(own)
            if part is not None:
                files.skipped += part.skipped
                yield from indices
            else:
                start, before = time.perf_counter(), len(files.skipped)
                seen: list[int] = []
                results: list[Result] = []
                for i, image in files.read(indices):
                    results += coco_results(run(image), self.data.ids[i], settings)
                    seen.append(i)
                    yield i
                part = Part(seen, results, files.skipped[before:], time.perf_counter() - start)
                self.cache.write(own, msgspec.json.encode(part))
            parts.append(part)

    def _kept_part(self, key: str) -> Part | None:
        try:
            return msgspec.json.decode(self.cache.read(key), type=Part)
        except msgspec.DecodeError:  # missing or damaged
            return None

    def _prepare(self, method: Method) -> tuple[Detect, int, float, int, str]:
        """Return the detector to run, its calibration's image count and seconds, and the program's size and fingerprint."""
        if method.recipe is None:
            networks, settings = FloatNetworks(self.detector), self.detector.settings
            return lambda image: detect(networks, prepare(image, settings, FLOAT_RULE), settings), 0, 0.0, 0, ""
        calibration, spent = self._calibration(method, method.recipe)
        with busy(f"{self.name} {method.label}: lowering"):
            program = DetectorProgram.of(self.detector, LoweredDetector(self.detector, calibration))
            size = file_size(program)
        ready = IntegerDetector(program, self.threads)
        return ready.detect_image, calibration.pyramid.images, spent, size, program.fingerprint()

    def _calibration(self, method: Method, recipe: Recipe) -> tuple[DetectorCalibration, float]:
        """Return the calibration, from the cache or by running it, and the seconds that it took."""
        files = self.calib(recipe.images)
        key = self._key("calibration", method, {"calibration": files.digest()})
        try:
            kept = msgspec.json.decode(self.cache.read(key), type=Kept)
            return DetectorCalibration.from_json(kept.calibration), kept.seconds
        except (msgspec.DecodeError, FqvitError):
            pass  # missing or damaged
        start = time.perf_counter()
        label = f"{self.name} {method.label}: calibrating"
        readable = (image for _, image in track(files, len(files), label, "images"))
        calibration = calibrate_detector(
            self.detector,
            readable,
            recipe,
            progress=cell_progress(f"{self.name} {method.label}"),
            size_of=lambda found: file_size(DetectorProgram.of(self.detector, LoweredDetector(self.detector, found))),
        )
        self.report(files)
        spent = time.perf_counter() - start
        self.cache.write(key, msgspec.json.encode(Kept(spent, calibration.to_json())))
        return calibration, spent

    def _data_fields(self) -> dict[str, object]:
        annotations = hashlib.sha256(self.data.annotations.read_bytes()).hexdigest()
        return {"images": self.data.files.digest(), "annotations": annotations}

    def _key(self, step: str, method: Method, fields: Mapping[str, object]) -> str:
        own = {
            "model": self.detector.name,
            "weights": self.detector.source.rsplit("sha256", 1)[-1],
            "settings": msgspec.to_builtins(self.detector.settings),
            "code": code_digest(DETECTOR_DECIDING),
        }
        return step_key(step, method, {**own, **fields})
