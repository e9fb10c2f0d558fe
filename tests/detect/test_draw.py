"""Labels of drawn boxes do not cover each other as long as there is room."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from PIL import Image

from fqvit.detect.draw import Area, draw, place
from fqvit.detect.masks import to_runs
from fqvit.detect.results import NamedResult

SIZE = (640, 480)


def overlap(a: Area, b: Area) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def places(boxes: list[Area], wide: int = 90, high: int = 20) -> list[Area]:
    taken: list[Area] = []
    for box in boxes:
        taken.append(place(box, wide, high, SIZE, taken))
    return taken


@pytest.mark.parametrize(
    "boxes",
    [
        [(100, 100, 200, 200)] * 12,
        [(100 + 3 * i, 100 + 2 * i, 200, 220) for i in range(10)],
        [(0, 0, 30, 30)] * 8,
        [(600, 460, 639, 479)] * 8,
        [(5 * i, 0, 639, 479) for i in range(20)],
    ],
    ids=["equal", "shifted", "corner", "other corner", "large"],
)
def test_labels_of_crowded_boxes_do_not_overlap(boxes: list[Area]) -> None:
    found = places(boxes)
    assert not any(overlap(a, b) for a, b in itertools.combinations(found, 2))
    for left, top, right, bottom in found:
        assert left >= 0 and top >= 0 and right <= SIZE[0] and bottom <= SIZE[1]


def test_a_single_label_is_above_its_box_or_inside_at_the_top() -> None:
    assert places([(100, 100, 200, 200)]) == [(100, 80, 190, 100)]
    assert places([(100, 5, 200, 200)]) == [(100, 5, 190, 25)]


def test_labels_without_room_stay_next_to_their_box() -> None:
    assert places([(10, 10, 30, 30)] * 500)[-1] == (10, 10, 100, 30)


def test_the_best_result_keeps_the_place_next_to_its_box() -> None:
    pixels = Image.new("RGB", SIZE)
    empty = to_runs(np.zeros((SIZE[1], SIZE[0]), bool))

    def result(score: float, category: int) -> NamedResult:
        found = {"image_id": 1, "file_name": "a", "category_id": category, "category": "cat", "score": score}
        return {**found, "bbox": [100.0, 100.0, 80.0, 60.0], "segmentation": empty}  # type: ignore[typeddict-item,return-value]

    one, both = draw(pixels, [result(0.9, 1)], "a"), draw(pixels, [result(0.5, 2), result(0.9, 1)], "a")
    above = (100, 70, 160, 99)
    assert np.array_equal(np.asarray(one.crop(above)), np.asarray(both.crop(above)))
