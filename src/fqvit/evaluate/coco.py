"""Compute COCO's average precision of boxes and masks with pycocotools, whose printed output is suppressed."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Mapping, Sequence
from typing import Any

from fqvit.detect.annotations import GroundTruth
from fqvit.detect.results import Result
from fqvit.errors import FqvitError

# The first six numbers of pycocotools' summary: the average precision over thresholds of the intersection over union (IoU) from
# 0.5 to 0.95, at IoU 0.5, at IoU 0.75, and over all thresholds for small, medium and large objects.
NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


def require_pycocotools() -> None:
    """Raise FqvitError if pycocotools is not installed."""
    if importlib.util.find_spec("pycocotools") is None:
        raise FqvitError('detect eval: needs pycocotools, which is not installed. Run `pip install "fqvit[detect]"`.')


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
