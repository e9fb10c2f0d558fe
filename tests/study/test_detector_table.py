"""`fqvit detect table` equals quantize and eval, lists published results, and continues an interrupted run."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tests.cli.command_line import assert_rejected, fqvit
from tests.factories import one_thread as one_thread

pytest.importorskip("torch")
pytest.importorskip("pycocotools")

from fqvit.detect.calibrate import DetectorCalibration
from fqvit.detect.image_files import ImageFiles
from fqvit.errors import FqvitError
from fqvit.evaluate.coco import open_coco
from fqvit.models.config import DetectorConfig, SwinConfig
from fqvit.quant.recipe import load_recipe
from fqvit.study import detector_cells
from fqvit.study.cells import Cache
from fqvit.study.detector_cells import DetectorBench, DetectorResult
from fqvit.study.detector_table import architecture, markdown, row
from fqvit.study.methods import FLOAT, Method
from fqvit.study.published import BOX_AP, DETECTORS, published_box_ap
from tests.detect.detectors import CONFIGS
from tests.detect.saved import here as here
from tests.detect.saved import home as home
from tests.detect.saved import shape_detector

SCORES = {f"{kind}_{name}": 40.0 for kind in ("box", "mask") for name in ("ap", "ap50", "ap75")}


DATA = ("--calib", "train", "--data", "val", "--annotations", "instances_val.json")
SMALL = ("detect", "table", "--weights", "shapes.safetensors", *DATA, "--images", 2, "--threads", 1)


def bench(folder: Path) -> DetectorBench:
    data = open_coco(Path("val"), Path("instances_val.json"))
    return DetectorBench(
        "shapes", shape_detector(), ImageFiles.in_folder("train").limit, data, Cache(folder), lambda files: None, 1
    )


def test_the_table_has_the_results_of_quantize_and_eval(tmp_path: Path) -> None:
    out = [tmp_path / f"t{suffix}" for suffix in (".md", ".csv", ".json")]
    words = ("--methods", "minmax,fqvit", "--cache", tmp_path / "cells", *(word for path in out for word in ("-o", path)))
    done = fqvit(*SMALL, *words)
    assert done.code == 0 and done.out == out[0].read_text() and done.err == ""
    assert "| MinMax | 8/8/8" in done.out and "published" not in done.out
    saved = json.loads(out[2].read_text())
    rows = saved["rows"]
    assert [row["method"] for row in rows] == ["float", "minmax", "fqvit"] and saved["reused"] == 0
    with out[1].open() as file:
        assert [line["bits"] for line in csv.DictReader(file)] == ["32/32/32", "8/8/8", "8/8/4"]
    made = fqvit(
        *("detect", "quantize", "--weights", "shapes.safetensors", "--calib", "train", "--images", 2),
        *("-o", tmp_path / "a.fqvit", "--json"),
    ).json
    assert rows[2]["fingerprint"] == made["fingerprint"] and rows[2]["file_bytes"] == made["bytes"]
    for target, found in (((tmp_path / "a.fqvit",), rows[2]), (("--weights", "shapes.safetensors"), rows[0])):
        scores = fqvit("detect", "eval", *target, "--data", "val", "--annotations", "instances_val.json", "--json").json
        for name in ("box_ap", "mask_ap", "box_ap50", "mask_ap75"):
            assert found[name] == pytest.approx(scores[name], abs=1e-3)
        assert found["detections"] == scores["detections"] and found["images"] == 4
    again = fqvit(*SMALL, "--methods", "minmax,fqvit", "--cache", tmp_path / "cells", "--json").json
    assert again["reused"] == 3 and again["rows"] == rows
    assert not list((tmp_path / "cells").glob("result-*-*-*")), "the parts of a finished cell are deleted"


def test_a_folder_with_instances_json_needs_no_annotations_option(tmp_path: Path, home: Path) -> None:
    folder = tmp_path / "coco"
    folder.mkdir()
    (folder / "images").symlink_to(home / "val")
    (folder / "instances.json").write_bytes((home / "instances_val.json").read_bytes())
    scores = fqvit("detect", "eval", "shapes.fqvit", "--data", folder, "--json").json
    expected = fqvit("detect", "eval", "shapes.fqvit", "--data", "val", "--annotations", "instances_val.json", "--json").json
    assert scores["box_ap"] == expected["box_ap"] and scores["images"] == 4
    words = ("--data", folder, "--calib", "train", "--methods", "fqvit", "--images", 1, "--limit", 1, "--cache", tmp_path / "c")
    rows = fqvit("detect", "table", "--weights", "mine=shapes.safetensors", *words, "--json").json["rows"]
    assert [(row["model"], row["images"]) for row in rows] == [("mine", 1), ("mine", 1)]


def test_an_interrupted_cell_continues_with_the_first_unfinished_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector_cells, "PART", 1)
    expected, _ = bench(tmp_path / "whole").result(FLOAT)
    here, calls = bench(tmp_path / "cells"), []
    run = detector_cells.detect

    def interrupted(networks: object, image: object, settings: object) -> object:
        calls.append(image)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(networks, image, settings)  # type: ignore[arg-type]

    monkeypatch.setattr(detector_cells, "detect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        here.result(FLOAT)
    found, reused = here.result(FLOAT)
    assert not reused and len(calls) == 5, "two images before the interruption are not repeated"
    assert found.scores == expected.scores and found.detections == expected.detections
    assert here.result(FLOAT) == (found, True) and len(calls) == 5


def test_a_calibration_survives_the_cache_and_damage_is_noticed(tmp_path: Path) -> None:
    method = Method("fqvit", load_recipe("fqvit"))
    here = bench(tmp_path)
    first, _ = here._calibration(method, load_recipe("fqvit"))
    (kept,) = tmp_path.glob("calibration-*")
    again, _ = here._calibration(method, load_recipe("fqvit"))
    assert again.to_json() == first.to_json()
    kept.write_text(kept.read_text()[:-20])
    assert here._calibration(method, load_recipe("fqvit"))[0].to_json() == first.to_json()
    for text in ("", "{}", '{"pyramid": [], "boxes": [], "masks": []}', '{"pyramid": ["x"], "boxes": [], "masks": []}'):
        with pytest.raises(FqvitError, match="calibration"):
            DetectorCalibration.from_json(text)


def result(precision: float) -> DetectorResult:
    return DetectorResult(1000, 1.0, 2.0, 6_000_000, "abc", dict.fromkeys(SCORES, precision), 5000, 9, [])


def test_published_box_ap_is_shown_for_swin_small_with_the_classes_of_coco(tmp_path: Path) -> None:
    assert {len(figures) for figures in BOX_AP.values()} == {len(DETECTORS)}
    assert published_box_ap("mask_rcnn_swin_small", "minmax", "8/8/8") == 32.8
    assert published_box_ap("cascade_mask_rcnn_swin_small", "fq-vit-8", "8/8/8") == 51.4
    assert published_box_ap("mask_rcnn_swin_small", "minmax", "8/8/4") is None
    assert published_box_ap("mask_rcnn_swin_tiny", "minmax", "8/8/8") is None
    swin = SwinConfig((64, 64), 4, 3, 0, 96, (2, 2, 18, 2), (3, 6, 12, 24), 7, fixed_window=True)
    config = replace(CONFIGS["mask r-cnn"], backbone=swin, classes=80)
    assert architecture("mask_rcnn", config) == "mask_rcnn_swin_small"
    assert architecture("mask_rcnn", CONFIGS["mask r-cnn"]) == "mask_rcnn"

    class Module:
        def __init__(self, config: DetectorConfig) -> None:
            self.config = config

    methods = [FLOAT, *(Method(name, load_recipe(name)) for name in ("minmax", "fq-vit"))]
    released = replace(bench(tmp_path), name="released", detector=replace(shape_detector(), module=Module(config)))  # type: ignore[arg-type]
    other = bench(tmp_path)
    rows = [row(each, method, result(47.5), result(48.0)) for each in (released, other) for method in methods]
    assert [row.published for row in rows] == [48.5, 32.8, 47.2, None, None, None]
    assert rows[1].box_against_float == -0.5
    text = markdown(rows)
    first, *rest = text.split("\n\n")
    assert "47.5 / 47.5 (32.8)" in first and "-0.5 / -0.5" in text and "published box AP" in text
    for part in (first, *rest):
        assert len({len(line) for line in part.splitlines() if line.startswith("|")}) <= 1


def test_mistakes_are_reported_in_one_line_before_any_work(tmp_path: Path) -> None:
    weights = ("--weights", "shapes.safetensors")
    cache = ("--cache", tmp_path / "cells")

    def table(*words: object) -> object:
        return fqvit("detect", "table", *words, *cache)

    assert_rejected(table(*DATA), "--weights")
    assert_rejected(table(*weights, "--data", "val"), "--calib")
    assert_rejected(table(*weights, "--calib", "train"), "--data")
    assert_rejected(table(*weights, "--calib", "train", "--data", "val"), "instances.json", "--annotations")
    assert_rejected(table("--weights", "none.pth", *DATA), "none.pth", "no such file")
    assert_rejected(table("--weights", "a=shapes.safetensors,a=shapes.safetensors", *DATA), "a is given twice")
    assert_rejected(table(*weights, *DATA, "--methods", "ptq-vit"), "ptq-vit", "Softmax")
    assert_rejected(table(*weights, *DATA, "--images", 0), "--images 0")
    assert_rejected(table(*weights, *DATA, "--threads", 0), "--threads 0")
    assert_rejected(table(*weights, *DATA, "-o", tmp_path / "t.txt"), "unknown suffix")
    assert_rejected(table(*weights, *DATA, "-o", "instances_val.json"), "would be overwritten")
    assert not (tmp_path / "cells").exists()


def test_a_failed_cell_is_named_and_the_others_are_printed(tmp_path: Path) -> None:
    recipe = tmp_path / "stray.toml"
    recipe.write_text('base = "minmax"\n[sites."no.such.site"]\nbits = 8\n')
    done = fqvit(*SMALL, "--methods", f"{recipe},minmax", "--cache", tmp_path / "cells", "--limit", 1)
    assert done.code == 2 and "| MinMax" in done.out
    assert len(done.err.splitlines()) == 1 and "1 cell failed" in done.err and "no.such.site" in done.err


def test_unreadable_images_are_reported_once(tmp_path: Path, home: Path) -> None:
    truth = json.loads((home / "instances_val.json").read_text())
    image = truth["images"][0]
    Image.new("RGB", (image["width"], image["height"])).save(tmp_path / "same.png")
    damaged = (tmp_path / "same.png").read_bytes()[:-40]
    rows = [{**image, "id": 1000 + i, "file_name": f"{i}.png"} for i in range(120)]
    for row_ in rows:
        (tmp_path / row_["file_name"]).write_bytes(damaged if row_["id"] == 1007 else (tmp_path / "same.png").read_bytes())
    annotations = [{**truth["annotations"][0], "image_id": 1000}]
    (tmp_path / "instances.json").write_text(json.dumps({**truth, "images": rows, "annotations": annotations}))
    (tmp_path / "s.toml").write_text("short = 32\nlong = 32\n")
    words = ("--weights", "shapes.safetensors", "--calib", "train", "--data", tmp_path, "--settings", tmp_path / "s.toml")
    done = fqvit("detect", "table", *words, "--methods", "minmax", "--images", 1, "--cache", tmp_path / "cells")
    assert done.code == 0 and "119 images" in done.out
    assert len(done.err.splitlines()) == 1 and "skipped 1 image of 120" in done.err and "7.png" in done.err
