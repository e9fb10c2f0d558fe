"""Load quantized and float detectors, and run them on images, for the commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from fqvit.cli import inputs
from fqvit.cli.output import Unreadable
from fqvit.data.images import UnreadableImage
from fqvit.detect.detections import ImageDetections
from fqvit.detect.image_files import ImageFiles, read_rgb
from fqvit.detect.images import FLOAT_RULE, prepare
from fqvit.detect.results import NamedResult, coco_results, image_ids, named
from fqvit.detect.settings import DetectSettings, read_settings
from fqvit.errors import FqvitError
from fqvit.system.progress import busy, track

if TYPE_CHECKING:
    from fqvit.detect.fixed.detector import Backend
    from fqvit.detect.model.detector import FloatDetector
    from fqvit.detect.program import DetectorProgram


@dataclass(frozen=True)
class LoadedDetector:
    """A detector that can run.

    source: its path   backend: native, reference or float   classes: number of classes
    """

    source: str
    model: str
    backend: str
    settings: DetectSettings
    classes: int
    detect: Callable[[Image.Image], ImageDetections]

    def results(self, image: Image.Image, image_id: int, file_name: str, min_score: float = 0.0) -> list[NamedResult]:
        """Detect objects in an image, and return those with a score of at least `min_score`."""
        found = coco_results(self.detect(image), image_id, self.settings)
        return named([result for result in found if result["score"] >= min_score], file_name, self.settings)


@dataclass(frozen=True)
class ImageResults:
    """The results of one image. index: its position among all images, from 0. name: its path as given."""

    index: int
    name: Path
    image: Image.Image
    results: list[NamedResult]


def detect_images(
    detector: LoadedDetector, paths: Sequence[Path], min_score: float, unreadable: Unreadable
) -> Iterator[ImageResults]:
    """Yield, for each image, the results with a score of at least `min_score`; add unreadable images to `unreadable`."""
    numbered = enumerate(zip(paths, image_ids(paths), strict=True))
    for index, (path, number) in track(numbered, len(paths), "detecting", "images"):
        try:
            image = read_rgb(path)
        except UnreadableImage as error:
            unreadable.add(error)
            continue
        yield ImageResults(index, path, image, detector.results(image, number, str(path), min_score))


def check_score(score: float | None) -> float:
    """Return the value of --score, 0 by default. Raises FqvitError if it is not from 0 to 1."""
    if score is not None and not 0 <= score <= 1:
        raise FqvitError(f"--score {score:g}: expected 0 to 1.")
    return score or 0.0


def load_program(path: Path, backend: Backend | None = None, threads: int | None = None) -> LoadedDetector:
    """Load a quantized detector from a .fqvit file."""
    from fqvit.detect.fixed.detector import IntegerDetector

    check_threads(threads)
    ready = IntegerDetector(path, threads, backend or "native")
    header = ready.header
    return LoadedDetector(str(path), header.model, ready.backend, header.settings, ready.classes, ready.detect_image)


def load_float(weights: Path, settings: Path | None, threads: int | None) -> LoadedDetector:
    """Load a float detector from a checkpoint; it runs with torch."""
    check_threads(threads)
    changes = None if settings is None else read_settings(settings)
    inputs.require_torch("detect eval of a float detector")
    import torch

    from fqvit.detect.float.networks import FloatNetworks
    from fqvit.detect.float.pipeline import detect
    from fqvit.detect.model.load import load_detector
    from fqvit.models.device import keep_freed_memory

    if threads is not None:
        torch.set_num_threads(threads)
    keep_freed_memory()
    loaded = load_detector(weights, changes)
    networks = FloatNetworks(loaded)

    def run(image: Image.Image) -> ImageDetections:
        return detect(networks, prepare(image, loaded.settings, FLOAT_RULE), loaded.settings)

    return LoadedDetector(str(weights), loaded.name, "float", loaded.settings, loaded.module.config.classes, run)


def refuse_settings(given: Mapping[str, object]) -> None:
    """Raise FqvitError if settings of a classifier's state dict are given for a detector."""
    if given:
        raise FqvitError(f"--{next(iter(given))}: not for detectors, whose file has all settings. Leave it out.")


def float_of_program(program: DetectorProgram, weights: str | None, command: str) -> FloatDetector:
    """Load the float detector of a program, with the settings of the program."""
    if weights is None:
        raise FqvitError(f"{command}: no checkpoint given. Pass the weights of the float detector (--weights FILE).")
    with busy(f"loading {weights}"):
        from fqvit.detect.model.rebuild import load_for_program
        from fqvit.models.device import keep_freed_memory

        keep_freed_memory()
        return load_for_program(program, weights)


def images_in(data: Path | None, command: str, limit: int) -> ImageFiles:
    """Return at most `limit` images of a folder, for a detector."""
    if data is None:
        raise FqvitError(f"{command}: no images given. Pass a folder of images (--data DIR); labels are not needed.")
    return ImageFiles.in_folder(data).limit(limit)


def check_threads(threads: int | None) -> None:
    """Raise FqvitError if the value of --threads is out of range."""
    if threads is not None and not 1 <= threads <= 256:
        raise FqvitError(f"--threads {threads}: expected 1 to 256.")
