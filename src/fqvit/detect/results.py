"""Write and read COCO detection results with file and category names, for `detect predict` and `detect draw`.

pycocotools also reads such a file; it ignores the names.
See also: draw.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypedDict

import msgspec

from fqvit.detect.detections import ImageDetections
from fqvit.detect.masks import Runs, lengths_of, to_runs
from fqvit.detect.settings import DetectSettings
from fqvit.errors import FqvitError
from fqvit.system.files import write_atomically


class Result(TypedDict):
    """One detection as pycocotools reads it. bbox: x, y, width, height"""

    image_id: int
    category_id: int
    bbox: list[float]
    score: float
    segmentation: Runs


def coco_results(found: ImageDetections, image_id: int, s: DetectSettings) -> list[Result]:
    """Return the detections of one image as COCO results."""
    d = found.detections
    return [
        Result(
            image_id=image_id,
            category_id=s.category(int(label)),
            bbox=[round(float(v), 3) for v in (box[0], box[1], box[2] - box[0], box[3] - box[1])],
            score=round(float(score), 6),
            segmentation=to_runs(mask),
        )
        for box, score, label, mask in zip(d.boxes, d.scores, d.labels, found.masks(), strict=True)
    ]


class NamedResult(Result):
    """A result with names. file_name: name of the image, with ? for bytes that are not UTF-8   category: name of the class"""

    file_name: str
    category: str


def named(results: Sequence[Result], file_name: str, s: DetectSettings) -> list[NamedResult]:
    """Add the names of the file and of the categories."""
    names = category_names(s)
    # Python represents bytes that are not UTF-8 in file names as lone surrogates, which JSON readers reject.
    file_name = file_name.encode("utf-8", "replace").decode()
    return [
        NamedResult(**result, file_name=file_name, category=names.get(result["category_id"], f"class {result['category_id']}"))
        for result in results
    ]


def category_names(s: DetectSettings) -> dict[int, str]:
    """Return a dict from COCO category ids to class names."""
    return {s.category(label): name for label, name in enumerate(s.classes)}


def write_results(path: str | Path, results: Sequence[NamedResult]) -> None:
    """Write a JSON list with one result per line, atomically."""
    lines = ",\n".join(json.dumps(result, ensure_ascii=False) for result in results)
    write_atomically(path, lambda temporary: temporary.write_text(f"[{lines}]\n", encoding="utf-8", errors="replace"))


def image_ids(paths: Sequence[Path]) -> list[int]:
    """Return the numbers in the file names, as in COCO; 1, 2, 3, ... if a name is not a number or two numbers are equal."""
    numbers = [int(path.stem) for path in paths if path.stem.isascii() and path.stem.isdigit() and len(path.stem) < 19]
    return numbers if len(set(numbers)) == len(paths) else list(range(1, len(paths) + 1))


_Coordinate = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]


class _Segmentation(msgspec.Struct):
    size: tuple[int, int]
    counts: str


class _Row(msgspec.Struct):
    """One result in a file. Numbers from which colours and positions are computed have bounds."""

    image_id: int
    category_id: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
    bbox: tuple[_Coordinate, _Coordinate, _Coordinate, _Coordinate]
    score: Annotated[float, msgspec.Meta(ge=0, le=1)]
    file_name: Annotated[str, msgspec.Meta(min_length=1)]
    segmentation: _Segmentation
    category: str = ""


def read_results(path: str | Path) -> list[NamedResult]:
    """Read and check a file written by write_results."""
    try:
        rows = msgspec.json.decode(Path(path).read_bytes(), type=list[_Row])
    except OSError as error:
        raise FqvitError(f"{path}: cannot be read ({error.strerror}). Pass a file from `fqvit detect predict -o`.") from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        reason = str(error).replace("`", "").replace("$", "results")
        raise FqvitError(f"{path}: not COCO results ({reason}). Pass a file from `fqvit detect predict -o`.") from None
    for number, row in enumerate(rows):
        try:
            lengths_of(Runs(size=list(row.segmentation.size), counts=row.segmentation.counts))
        except FqvitError as error:
            raise FqvitError(f"{path}: result {number}: {error} Pass a file from `fqvit detect predict -o`.") from None
    return [
        NamedResult(
            image_id=row.image_id,
            category_id=row.category_id,
            bbox=list(row.bbox),
            score=row.score,
            segmentation=Runs(size=list(row.segmentation.size), counts=row.segmentation.counts),
            file_name=row.file_name,
            category=row.category or f"class {row.category_id}",
        )
        for row in rows
    ]
