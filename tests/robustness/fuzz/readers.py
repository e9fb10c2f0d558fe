"""Fuzz targets: readers of untrusted files, called through functions of the Python API and of the commands.

Each target has a name, a file suffix and a function that reads one file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from fqvit.cli.inputs import read_classes
from fqvit.data.images import read_image
from fqvit.data.preprocess import Preprocess
from fqvit.data.shards import TarShards
from fqvit.detect.annotations import read_annotations
from fqvit.detect.draw import draw
from fqvit.detect.image_files import read_rgb
from fqvit.detect.results import read_results
from fqvit.detect.settings import read_settings
from fqvit.errors import FqvitError
from fqvit.evaluate.coco import average_precision
from fqvit.inference import embeddings
from fqvit.quant.recipe import load_recipe

PREPROCESS = Preprocess(16, 16, 3, 16, "bicubic", (0.5,) * 3, (0.5,) * 3)
SCORED_PIXELS = 10**6  # annotations of larger images are read but not scored


def read_program(path: Path) -> None:
    from tests.robustness.fuzz.oracle import judge_program

    judge_program(path, path.stat().st_size)


def read_detector(path: Path) -> None:
    from tests.robustness.fuzz.oracle import judge_detector

    judge_detector(path, path.stat().st_size)


def read_checkpoint(path: Path) -> None:
    """Read a checkpoint as weights of a classifier and as weights of a detector.

    Raises FqvitError if both loaders reject the file, or if an error message does not name the file.
    """
    from fqvit.detect.model.load import load_detector
    from fqvit.models.load import load_model

    errors = []
    for load in (lambda: load_model("fmnist_vit", path), lambda: load_detector(path)):
        try:
            load()
        except FqvitError as error:
            errors.append(error)
    unnamed = [error for error in errors if path.name not in str(error)]
    if unnamed or len(errors) == 2:
        raise (unnamed or errors)[0]


def read_any_image(path: Path) -> None:
    read_image(path, PREPROCESS)
    read_rgb(path)


def read_and_score(path: Path) -> None:
    truth = read_annotations(path)
    if sum(row.height * row.width for row in truth.images.values()) <= SCORED_PIXELS and len(truth.annotations) < 50:
        average_precision(truth, [], list(truth.images))


def read_and_draw(path: Path) -> None:
    draw(Image.new("RGB", (9, 8)), read_results(path)[:20], str(path))


def read_shard(path: Path) -> None:
    shards = TarShards.unlabelled(path, PREPROCESS)
    for index in range(min(len(shards), 20)):
        shards.read(index)
    TarShards.labelled(path, PREPROCESS, 10)


def read_embeddings(path: Path) -> None:
    """Read an embedding file and decode everything in it."""
    found = embeddings.read(path)
    for name in found.info:
        found.float(name)


@dataclass(frozen=True)
class Reader:
    """A reader of one kind of file. ending: suffix of the files; read: a function that raises FqvitError or returns."""

    ending: str
    read: Callable[[Path], object]


READERS = {
    "program": Reader(".fqvit", read_program),
    "detector": Reader(".fqvit", read_detector),
    "safetensors": Reader(".safetensors", read_checkpoint),
    "embeddings": Reader(".safetensors", read_embeddings),
    "torch": Reader(".pth", read_checkpoint),
    "npz": Reader(".npz", read_checkpoint),
    "image": Reader(".png", read_any_image),
    "coco": Reader(".json", read_and_score),
    "results": Reader(".json", read_and_draw),
    "recipe": Reader(".toml", load_recipe),
    "settings": Reader(".toml", read_settings),
    "classes": Reader(".txt", read_classes),
    "shard": Reader(".tar", read_shard),
}
