"""Read and check COCO annotation files.

The reader rejects everything that makes pycocotools fail or compute wrong scores, and ignores fields that evaluation does not
use.
See also: evaluate/coco.py (average precision), coco.py (the 80 categories).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from PIL import ExifTags, Image

from fqvit.data.images import existing_folder, plain
from fqvit.detect.masks import Runs, check_lengths, lengths_of
from fqvit.errors import FqvitError

Side = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap height and width
MAX_COORDINATE = 1e6  # pixels, largest magnitude
MAX_PIXELS = 2**31 - 1  # per image; pycocotools counts them in 32 bits
MAX_OUTLINE = 1e6  # pixels, all polygons of an annotation together; pycocotools stores five points per pixel: 40 MB
OTHER_CATEGORIES = "Pass annotations of the detector's classes, or quantize with this file's ids as `categories` (--settings)."


class ImageRow(msgspec.Struct, frozen=True):
    id: int
    file_name: Annotated[str, msgspec.Meta(min_length=1)]
    height: Side
    width: Side


class Category(msgspec.Struct, frozen=True):
    id: int
    name: str


class RunLengths(msgspec.Struct, frozen=True):
    """A mask as run lengths. size: height, width   counts: the lengths, as numbers or in COCO's compressed form"""

    size: tuple[int, int]
    counts: str | list[int]


class Annotation(msgspec.Struct, frozen=True):
    """An annotated object. bbox: x, y, width, height   segmentation: polygons x, y, x, y, ..., or run lengths"""

    id: int
    image_id: int
    category_id: int
    bbox: tuple[float, float, float, float]
    segmentation: list[list[float]] | RunLengths | None = None
    area: float | None = None
    iscrowd: Literal[0, 1] = 0


class AnnotationFile(msgspec.Struct, frozen=True):
    images: list[ImageRow]
    annotations: list[Annotation]
    categories: list[Category]


@dataclass(frozen=True)
class GroundTruth:
    """The checked content of an annotation file.

    where: the file's path, for messages   masks: whether the objects have masks (all of them or none)
    """

    where: str
    images: dict[int, ImageRow]
    annotations: list[Annotation]
    categories: dict[int, str]
    masks: bool

    def to_coco(self) -> dict[str, Any]:
        """Return the dataset for pycocotools.

        Annotations are renumbered from 1, because pycocotools stores matched ids as floats, and 0 means unmatched.
        """
        return {
            "images": [msgspec.to_builtins(row) for row in self.images.values()],
            "annotations": [{**_plain(annotation), "id": number} for number, annotation in enumerate(self.annotations, 1)],
            "categories": [{"id": id, "name": name} for id, name in self.categories.items()],
        }


def read_annotations(path: str | Path) -> GroundTruth:
    """Read and check an annotation file; raises FqvitError with its path and the first fault."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise FqvitError(
            f"{path}: cannot be read ({reason}). Pass an annotation file such as instances_val2017.json."
        ) from None
    try:
        file = msgspec.json.decode(data, type=AnnotationFile)
    except msgspec.ValidationError as error:
        message, _, location = str(error).replace("`", "").partition(" - at ")
        problem = f"{location.removeprefix('$.').removeprefix('$') or 'the file'}: {message[:1].lower()}{message[1:]}"
        raise FqvitError(f"{path}: {problem}. Expected COCO's format: images, annotations, categories.") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FqvitError(f"{path}: not JSON ({error}). Expected COCO's format: images, annotations, categories.") from None
    try:
        return _checked(str(path), file)
    except FqvitError as error:
        raise FqvitError(f"{path}: {error} Correct the file.") from None


def _checked(where: str, file: AnnotationFile) -> GroundTruth:
    _check_unique("image id", (row.id for row in file.images))
    _check_unique("annotation id", (a.id for a in file.annotations))
    _check_unique("category id", (c.id for c in file.categories))
    images, categories = {row.id: row for row in file.images}, {c.id: c.name for c in file.categories}
    if not images:
        raise FqvitError("no images.")
    for row in file.images:
        if row.height * row.width > MAX_PIXELS:
            raise FqvitError(f"image {row.id}: {row.height} x {row.width} pixels, expected at most {MAX_PIXELS}.")
    for a in file.annotations:
        if a.image_id not in images:
            raise FqvitError(f"annotation {a.id}: image {a.image_id} is not listed under images.")
        if a.category_id not in categories:
            raise FqvitError(f"annotation {a.id}: category {a.category_id} is not listed under categories.")
        if min(a.bbox[2:]) < 0 or max(map(abs, a.bbox)) > MAX_COORDINATE:
            expected = f"x, y, width >= 0, height >= 0, at most {MAX_COORDINATE:g} pixels each"
            raise FqvitError(f"annotation {a.id}: bbox is {_numbers(a.bbox)}, expected {expected}.")
        if a.area is not None and a.area < 0:
            raise FqvitError(f"annotation {a.id}: area is {a.area:g}, expected 0 or more.")
        _check_mask(a, images[a.image_id])
    with_masks = [a for a in file.annotations if a.segmentation]
    if with_masks and len(with_masks) < len(file.annotations):
        without = next(a for a in file.annotations if not a.segmentation)
        raise FqvitError(f"annotation {without.id}: no segmentation, but other annotations have one.")
    return GroundTruth(where, images, file.annotations, categories, bool(with_masks))


def _check_unique(what: str, ids: Iterable[int]) -> None:
    seen: set[int] = set()
    for id in ids:
        if id in seen:
            raise FqvitError(f"{what} {id} occurs twice.")
        seen.add(id)


def _check_mask(a: Annotation, image: ImageRow) -> None:
    if isinstance(a.segmentation, RunLengths):
        if a.segmentation.size != (image.height, image.width):
            size = " x ".join(map(str, a.segmentation.size))
            raise FqvitError(f"annotation {a.id}: the mask is {size}, but the image is {image.height} x {image.width}.")
        counts = a.segmentation.counts
        try:
            if isinstance(counts, str):
                lengths_of(Runs(size=list(a.segmentation.size), counts=counts))
            else:
                check_lengths(counts, a.segmentation.size)
        except FqvitError as error:
            raise FqvitError(f"annotation {a.id}: {error}") from None
        return
    outline = 0.0
    for polygon in a.segmentation or ():
        if len(polygon) < 6 or len(polygon) % 2:
            raise FqvitError(f"annotation {a.id}: a polygon has {len(polygon)} numbers, expected x and y of at least 3 points.")
        farthest = max(polygon, key=abs)
        if abs(farthest) > MAX_COORDINATE:
            problem = f"a polygon has a coordinate of {farthest:g} pixels, expected at most {MAX_COORDINATE:g}"
            raise FqvitError(f"annotation {a.id}: {problem}.")
        # Distance |dx| + |dy| from each point's predecessor; the predecessor of the first point is the last one.
        outline += sum(abs(here - before) for before, here in zip(polygon[-2:] + polygon[:-2], polygon, strict=True))
    if outline > MAX_OUTLINE:
        problem = f"the outlines of the polygons are {outline:g} pixels long, expected at most {MAX_OUTLINE:g}"
        raise FqvitError(f"annotation {a.id}: {problem}.")


def _plain(a: Annotation) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(a)
    found["bbox"] = list(a.bbox)
    found["area"] = a.bbox[2] * a.bbox[3] if a.area is None else a.area
    if isinstance(a.segmentation, RunLengths):
        found["segmentation"] = {"size": list(a.segmentation.size), "counts": a.segmentation.counts}
    return found


def check_categories(truth: GroundTruth, ids: Sequence[int], names: Sequence[str]) -> list[str]:
    """Check that the file has all categories of the detector.

    ids: category ids of the detector   names: their names; empty if the detector has no class names
    Returns warnings about annotated categories that the detector does not know, and about names that differ.
    """
    missing = [id for id in ids if id not in truth.categories]
    if missing:
        problem = (
            f"{truth.where}: has no category {missing[0]}, which the detector finds ({len(missing)} of {len(ids)} are missing)"
        )
        raise FqvitError(f"{problem}. {OTHER_CATEGORIES}")
    warnings = []
    counts = Counter(a.category_id for a in truth.annotations)
    unknown = [id for id in truth.categories if id in counts and id not in ids]
    if unknown:
        if len(unknown) == len(counts):
            raise FqvitError(f"{truth.where}: no annotated object belongs to a category of the detector. {OTHER_CATEGORIES}")
        which = ", ".join(f"{id} '{truth.categories[id]}'" for id in unknown[:5])
        which += f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        text = "objects of categories that the detector does not know are left out of the scores"
        warnings.append(f"{truth.where}: {text}: {sum(counts[id] for id in unknown)} ({which}).")
    for id, name in zip(ids, names, strict=False):
        if plain(name) != plain(truth.categories[id]):
            warnings.append(f"category {id} is '{name}' in the detector and '{truth.categories[id]}' in {truth.where}.")
            break
    return warnings


def image_paths(truth: GroundTruth, folder: str | Path, ids: Sequence[int]) -> list[Path]:
    """Return the paths of these images. All files must exist and, if they can be opened, have the annotated size."""
    root = existing_folder(folder)
    paths = [root / truth.images[id].file_name for id in ids]
    absent = [path for path in paths if not path.is_file()]
    if absent:
        problem = f"{root}: {len(absent)} of {len(paths)} images of {truth.where} are missing (the first is {absent[0].name})"
        raise FqvitError(f"{problem}. Pass the folder that holds them (--data DIR).")
    for id, path in zip(ids, paths, strict=True):
        row, size = truth.images[id], _size(path)
        if size is not None and size != (row.height, row.width):
            problem = f"{path}: {size[0]} x {size[1]} pixels, annotated as {row.height} x {row.width}"
            raise FqvitError(f"{problem}. Pass the images that {truth.where} annotates.")
    return paths


def _size(path: Path) -> tuple[int, int] | None:
    """Return height and width as displayed, from the file's header; None if it is unreadable; evaluation reports that."""
    try:
        with Image.open(path) as image:
            width, height = image.size
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) in SIDEWAYS
    except Exception:  # Pillow raises many kinds of exceptions on damaged files
        return None
    return (width, height) if turned else (height, width)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
