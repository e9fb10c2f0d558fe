"""Open annotated images, and compute COCO's average precision of boxes and masks.

Precisions come from pycocotools, whose printed output is suppressed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fqvit.data.images import existing_folder, spread
from fqvit.detect.annotations import GroundTruth, check_categories, image_paths, read_annotations
from fqvit.detect.image_files import ImageFiles
from fqvit.detect.results import Result
from fqvit.detect.settings import DetectSettings
from fqvit.errors import FqvitError

# The first six numbers of pycocotools' summary: the average precision over thresholds of the intersection over union (IoU) from
# 0.5 to 0.95, at IoU 0.5, at IoU 0.75, and over all thresholds for small, medium and large objects.
NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")

ANNOTATIONS = "instances.json"  # the default name of annotations


@dataclass(frozen=True)
class CocoImages:
    """Annotated images. ids: image ids, in the order of `files`   annotations: the annotation file"""

    truth: GroundTruth
    ids: list[int]
    files: ImageFiles
    annotations: Path

    def file_name(self, index: int) -> str:
        """Return the name of an image in the annotations."""
        return self.truth.images[self.ids[index]].file_name


def open_coco(data: Path, annotations: Path | None = None, limit: int | None = None) -> CocoImages:
    """Open the images in the folder `data`, at most `limit` of them, evenly spaced. Everything is checked before slow work.

    annotations: None is the file instances.json in the folder; the images may then also be in its sub-folder `images`
    """
    root = existing_folder(data)
    if annotations is None:
        annotations = root / ANNOTATIONS
        if not annotations.is_file():
            raise FqvitError(f"{data}: has no {ANNOTATIONS}. Pass the annotations of its images (--annotations FILE.json).")
        root = root / "images" if (root / "images").is_dir() else root
    truth = read_annotations(annotations)
    ids = sorted(truth.images)
    ids = ids if limit is None else [ids[i] for i in spread(len(ids), limit)]
    return CocoImages(truth, ids, ImageFiles(image_paths(truth, root, ids)), annotations)


def categories_of(data: CocoImages, settings: DetectSettings, classes: int) -> tuple[list[int], list[str]]:
    """Return the category ids of a detector, and warnings about differences from those of the annotations."""
    found = [settings.category(label) for label in range(classes)]
    return found, check_categories(data.truth, found, settings.classes)


def require_pycocotools() -> None:
    """Raise FqvitError if pycocotools is not installed."""
    if importlib.util.find_spec("pycocotools") is None:
        raise FqvitError('average precision: needs pycocotools, which is not installed. Run `pip install "fqvit[detect]"`.')


def average_precision(
    truth: GroundTruth, results: Sequence[Result], image_ids: Sequence[int], categories: Sequence[int] | None = None
) -> dict[str, float | None]:
    """Return average precisions in percent: box_ap, box_ap50, box_ap75, box_ap_small, ..., mask_ap, ...

    They cover the given images and categories (None: all categories). A value is None if the ground truth has no such objects
    or no masks.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    scores: dict[str, float | None] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        annotated = _coco(COCO, truth.to_coco())
        for name, kind in (("box", "bbox"), ("mask", "segm")):
            scores |= {f"{name}_{key}": None for key in NAMES}
            if kind == "segm" and not truth.masks:
                continue
            # Without bbox, pycocotools uses the area of the mask, not of the box, to tell small, medium and large apart.
            found = [{key: value for key, value in r.items() if kind != "segm" or key != "bbox"} for r in results]
            empty = {**annotated.dataset, "annotations": []}
            evaluation = COCOeval(annotated, annotated.loadRes(found) if found else _coco(COCO, empty), kind)
            evaluation.params.imgIds = list(image_ids)
            evaluation.params.catIds = list(truth.categories if categories is None else categories)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            for key, value in zip(NAMES, evaluation.stats, strict=False):
                scores[f"{name}_{key}"] = None if value < 0 else 100 * float(value)
    return scores


def _coco(kind: Any, dataset: Mapping[str, Any]) -> Any:
    made = kind()
    made.dataset = dict(dataset)
    made.createIndex()
    return made
