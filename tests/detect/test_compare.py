"""Test `fqvit compare` of detectors: matched detections, signal-to-noise ratios of all networks, output and errors."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from fqvit.detect.masks import to_runs
from fqvit.detect.results import Result
from fqvit.errors import FqvitError
from fqvit.evaluate.detections import Match, agreement, agreements, mask_iou, match
from tests.cli.command_line import assert_rejected, fqvit
from tests.factories import one_thread as one_thread

pytest.importorskip("torch")

from fqvit.detect.model.load import random_release
from fqvit.evaluate.compare_detector import ROI_FEATURES, DetectorComparer

from .detectors import CONFIGS
from .saved import here as here
from .saved import home as home
from .saved import program, shape_detector, shape_program
from .test_programs import detector_of, sample_images

DATA = ("--data", "val", "--limit", 2)
WEIGHTS = ("--weights", "shapes.safetensors")


def result(box: tuple[float, float, float, float], score: float, kind: int = 1) -> Result:
    """Make a detection whose mask fills its box, x1, y1, x2, y2, in an image of 20 x 30 pixels."""
    x1, y1, x2, y2 = box
    mask = np.zeros((20, 30), bool)
    mask[int(y1) : int(y2), int(x1) : int(x2)] = True
    return Result(image_id=1, category_id=kind, bbox=[x1, y1, x2 - x1, y2 - y1], score=score, segmentation=to_runs(mask))


def test_detections_are_matched_by_class_and_overlap_best_float_score_first() -> None:
    floats = [
        result((0, 0, 10, 10), 0.6),
        result((0, 0, 10, 9), 0.9),
        result((20, 0, 30, 10), 0.8, 2),
        result((0, 10, 4, 20), 0.4),
    ]
    integers = [
        result((0, 0, 10, 9), 0.85),
        result((20, 0, 30, 10), 0.7, 3),
        result((0, 1, 10, 10), 0.5),
        result((9, 9, 12, 12), 0.2),
    ]
    found = match(floats, integers)
    assert [pair.numbers for pair in found.pairs] == [(1, 0), (0, 2)], "the class of the third detection differs"
    assert found.float_only == [2, 3] and found.integer_only == [1, 3]
    first, second = found.pairs
    assert first.box_iou == first.mask_iou == 1.0 and first.scores == (0.9, 0.85)
    assert second.box_iou == pytest.approx(0.9) and second.mask_iou == pytest.approx(0.9)


def test_agreement_counts_detections_from_a_smallest_score() -> None:
    floats = [result((0, 0, 10, 10), 0.9), result((10, 0, 20, 10), 0.2), result((0, 10, 9, 20), 0.4)]
    integers = [result((0, 0, 10, 10), 0.8), result((10, 0, 20, 6), 0.3), result((20, 10, 30, 20), 0.1)]
    found = match(floats, integers)
    every, high = agreement([found], 0.0), agreement([found], 0.35)
    assert (every.float_count, every.integer_count, every.matched, every.close) == (3, 3, 2, 1)
    assert (every.missing, every.extra) == (1, 1) and every.box_iou == pytest.approx(0.8)
    assert every.score_difference == pytest.approx(0.1) and every.score_bias == pytest.approx(0.0)
    assert (high.float_count, high.integer_count, high.matched, high.missing, high.extra) == (2, 1, 1, 1, 0)
    assert high.largest_score_difference == pytest.approx(0.1) and high.score_bias == pytest.approx(-0.1)
    assert [row.score for row in agreements([found], 0.4)] == [0.4, 0.5], "the detector gives no lower scores"


def test_means_are_none_if_no_detections_match() -> None:
    nothing, one = match([], []), match([], [result((0, 0, 5, 5), 0.5)])
    assert isinstance(nothing, Match) and nothing.pairs == [] and one.integer_only == [0]
    summary = agreement([nothing, one, match([result((0, 0, 5, 5), 0.5)], [])], 0.0)
    assert (summary.matched, summary.missing, summary.extra) == (0, 1, 1)
    assert summary.box_iou is summary.mask_iou is summary.score_difference is summary.score_bias is None


def test_empty_masks_are_equal() -> None:
    empty, full = (to_runs(np.full((3, 4), value)) for value in (False, True))
    assert (mask_iou(empty, empty), mask_iou(empty, full), mask_iou(full, full)) == (1.0, 0.0, 1.0)


def test_float_detections_match_themselves() -> None:
    comparer = DetectorComparer(shape_program(), shape_detector())
    image = comparer.add(next(iter(sample_images())), "image")
    same = match(image.floats, image.floats)
    assert len(same.pairs) == len(image.floats) > 0 and all(pair.box_iou == pair.mask_iou == 1.0 for pair in same.pairs)
    assert {row["file_name"] for row in (*image.floats, *image.integers)} == {"image"}


def test_all_networks_are_compared_and_simulations_are_close_to_the_integers() -> None:
    comparer = DetectorComparer(program("cascade"), detector_of("cascade"))
    images = list(sample_images())[:2]
    for number, image in enumerate(images):
        comparer.add(image, str(number))
    found = comparer.result()
    assert found.images == 2 and list(found.parts) == [
        "pyramid",
        *(f"{kind}.{i}" for kind in ("boxes", "masks") for i in range(3)),
    ]
    for name, part in found.parts.items():
        own = dict(comparer.program.parts())[name].header
        sites = {row.site for row in part.sites}
        assert set(own.sites) <= sites, "every site of the program"
        assert {output.buffer for output in own.outputs} <= sites, "and every output"
        assert (ROI_FEATURES in sites) == (name != "pyramid")
        for row in part.sites:
            assert row.integer_db is not None and row.simulated_db is not None and row.integer_db > 10, row
            assert abs(row.integer_db - row.simulated_db) < 3, row
            assert row.alone_db is None or row.alone_db > row.integer_db - 1, row


def test_the_sums_of_images_of_different_sizes_are_added() -> None:
    images = list(sample_images())[:2]
    sizes = {shape_program().prepare(image).padded for image in images}
    assert len(sizes) > 1
    comparer = DetectorComparer(shape_program(), shape_detector())
    signal = 0.0
    for number, image in enumerate(images):
        alone = DetectorComparer(shape_program(), shape_detector())
        alone.add(image, str(number))
        comparer.add(image, str(number))
        assert alone.pyramid_power is not None and comparer.pyramid_power is not None
        signal += alone.pyramid_power["neck.output.0"].signal
        assert comparer.pyramid_power["neck.output.0"].signal == pytest.approx(signal)


def test_compare_prints_detections_and_one_table_per_network() -> None:
    done = fqvit("compare", "shapes.fqvit", *WEIGHTS, *DATA)
    assert done.code == 0, done.err
    assert "compared with the float detector mask_rcnn on 2 images (val)" in done.out and ">= 0.15" in done.out
    assert all(f"\n{name}: " in done.out for name in ("pyramid", "boxes.0", "masks.0"))
    assert "roi features" in done.out and "neck.output.0" in done.out and "mask IoU" in done.out


def test_compare_prints_the_program_and_a_baseline_as_json(tmp_path: Path) -> None:
    shutil.copy("shapes.fqvit", tmp_path / "same.fqvit")
    found = fqvit("compare", "shapes.fqvit", *WEIGHTS, *DATA, "--baseline", tmp_path / "same.fqvit", "--json").json
    assert found["kind"] == "detector" and found["images"] == 2 and found["skipped"] == 0
    assert list(found["parts"]) == ["pyramid", "boxes.0", "masks.0"] and found["parts"]["pyramid"]["inputs"] == 2
    first = found["detections"][0]
    assert first["matched"] + first["missing"] == first["float_count"] > 0 and 0.5 <= first["box_iou"] <= 1
    assert found["baseline"]["detections"] == found["detections"] and found["baseline"]["parts"] == found["parts"]


def test_wrong_input_is_rejected_in_one_line(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    other = tmp_path / "other.safetensors"
    save_file(random_release(CONFIGS["mask r-cnn"], "mmdetection"), other)
    program("cascade").save(tmp_path / "cascade.fqvit")
    for words, said in (
        (("--data", "val"), "--weights FILE"),
        (WEIGHTS, "--data DIR"),
        ((*WEIGHTS, "--data", "nowhere"), "nowhere"),
        (("--weights", "nowhere.pth", "--data", "val"), "nowhere.pth"),
        (("--weights", other, "--data", "val"), "classes is 5, expected 8"),
        ((*WEIGHTS, "--data", "val", "--pool", "avg"), "--pool"),
        ((*WEIGHTS, "--data", "val", "--baseline", tmp_path / "cascade.fqvit"), "differ"),
    ):
        assert_rejected(fqvit("compare", "shapes.fqvit", *words), said)


def test_other_weights_of_the_same_sizes_cause_a_warning(tmp_path: Path) -> None:
    from fqvit.detect.model.load import load_detector, save_detector

    from .saved import replace

    release = random_release(replace(CONFIGS["mask r-cnn"], classes=8), "mmdetection", seed=5)
    path = tmp_path / "other.safetensors"
    save_detector(path, load_detector(release).module, shape_detector().settings)
    done = fqvit("compare", "shapes.fqvit", "--weights", path, "--data", "val", "--limit", 1)
    assert done.code == 0 and "not from the given weights" in done.err


def test_a_comparison_without_images_is_an_error() -> None:
    with pytest.raises(FqvitError, match="no images were read"):
        DetectorComparer(shape_program(), shape_detector()).result()
