"""Test hand-made annotation files: correct scores, and errors for files that need too much memory or give wrong scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fqvit.detect.annotations import GroundTruth, check_categories, read_annotations
from fqvit.detect.masks import to_runs
from fqvit.errors import FqvitError
from fqvit.evaluate.coco import average_precision

SIDE = 40


def square(number: int, **other: Any) -> dict[str, Any]:
    """Return the annotation of a square of 10 x 10 pixels in image 1."""
    x = 12 * (number % 3)
    mask = np.zeros((SIDE, SIDE), bool)
    mask[5:15, x : x + 10] = True
    made = {"id": number, "image_id": 1, "category_id": 1, "bbox": [x, 5, 10, 10], "segmentation": to_runs(mask)}
    return made | other


def read(folder: Path, *annotations: dict[str, Any], categories: int = 1) -> GroundTruth:
    content = {
        "images": [{"id": 1, "file_name": "a.png", "height": SIDE, "width": SIDE}],
        "annotations": annotations,
        "categories": [{"id": number, "name": f"c{number}"} for number in range(1, categories + 1)],
    }
    (folder / "a.json").write_text(json.dumps(content))
    return read_annotations(folder / "a.json")


def found(*annotations: dict[str, Any]) -> list[Any]:
    """Return results that equal the annotated objects."""
    return [{key: a[key] for key in a if key != "id"} | {"score": 0.9} for a in annotations]


@pytest.mark.parametrize("ids", [(0,), (0, 1, 2), (-1, 0, 7), (10**400, 1, -(10**400)), (2**53, 2**53 + 1, 2**63)])
def test_annotation_ids_do_not_change_scores(ids: tuple[int, ...], tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    squares = [square(number, id=id) for number, id in enumerate(ids)]
    scores = average_precision(read(tmp_path, *squares), found(*squares), [1])
    assert (scores["box_ap"], scores["mask_ap"]) == pytest.approx((100, 100))


@pytest.mark.parametrize("counts", ["o" * 4000 + "0", [10**4000, 1], [-(10**4000), 1], [SIDE * SIDE + 1], [1] * 3])
def test_run_lengths_that_do_not_cover_the_image_are_rejected(counts: object, tmp_path: Path) -> None:
    with pytest.raises(FqvitError, match="annotation 3: run lengths") as caught:
        read(tmp_path, square(3, segmentation={"size": [SIDE, SIDE], "counts": counts}))
    assert len(str(caught.value)) < 300


FAR = 1e6
# Lengths of these outlines in pixels: 4e6; 1.2e6, half of it in the closing edge; 1.2e6 in two polygons; 1.6e6 in a zigzag of
# close points.
LONG = {
    "far corners": [[-FAR, 0, FAR, 0, FAR, 1]],
    "a closing edge": [[0, 0, 300_000, 0, 600_000, 1]],
    "two polygons": [[0, 0, 300_000, 0, 300_000, 1]] * 2,
    "a zigzag": [[x for i in range(20_000) for x in (80 * (i % 2), i % 7)]],
}


@pytest.mark.parametrize("case", LONG)
def test_outlines_that_would_need_too_much_memory_are_rejected(case: str, tmp_path: Path) -> None:
    with pytest.raises(FqvitError, match="annotation 5: the outlines of the polygons are .* pixels long"):
        read(tmp_path, square(5, segmentation=LONG[case]))


def test_the_error_about_a_distant_point_shows_its_coordinate(tmp_path: Path) -> None:
    for far in (1.1e6, -1e300):
        with pytest.raises(FqvitError, match="annotation 5: a polygon has a coordinate of ") as caught:
            read(tmp_path, square(5, segmentation=[[0, 0, 9, 0, 9, far]]))
        assert f"{far:g}" in str(caught.value)


def test_the_longest_allowed_outline_is_evaluated(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    largest = square(5, segmentation=[[0, 0, 499_990, 0, 499_990, 10, 0, 10]])
    truth = read(tmp_path, largest)
    assert average_precision(truth, found(square(5)), [1])["mask_ap"] is not None
    assert read(tmp_path, square(5, segmentation=[[0, 0, 9, 0, 9, 9]])).masks


def test_only_the_categories_of_the_detector_are_scored(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    squares = [square(0), square(1, category_id=3), square(2, category_id=3), square(3, category_id=2)]
    truth = read(tmp_path, *squares, categories=4)
    rows = found(*squares[:1])
    assert average_precision(truth, rows, [1])["box_ap"] == pytest.approx(100 / 3)
    for ids in ([1], [1, 4]):
        scores = average_precision(truth, rows, [1], ids)
        assert (scores["box_ap"], scores["mask_ap"]) == pytest.approx((100, 100)), (
            "a category without objects does not count as 0"
        )
    (warning,) = check_categories(truth, [1, 4], ["c1", "c4"])
    assert "left out of the scores: 3 (2 'c2', 3 'c3')." in warning
    assert check_categories(truth, [1, 2, 3], []) == []
    assert len(check_categories(truth, [1, 2], ["d1", "d2"])) == 2, (
        "one warning about unknown categories, one about the first different name"
    )


def test_annotations_without_the_detectors_categories_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(FqvitError, match="no annotated object belongs to a category of the detector"):
        check_categories(read(tmp_path, square(0), square(1), categories=2), [2], [])
    with pytest.raises(FqvitError, match="has no category 7"):
        check_categories(read(tmp_path, square(0), categories=2), [1, 7], [])
    assert check_categories(read(tmp_path, categories=3), [2], []) == []


def test_the_warning_about_many_unknown_categories_is_short(tmp_path: Path) -> None:
    truth = read(tmp_path, *(square(number, category_id=number) for number in range(1, 60)), categories=60)
    (warning,) = check_categories(truth, [1], [])
    assert ": 58 (2 'c2', " in warning and "6 'c6' and 53 more)." in warning
