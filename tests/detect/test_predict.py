"""Test `fqvit detect predict` and `draw` on a small random detector and synthetic shapes, with good and bad input."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fqvit.detect.masks import from_runs, to_runs
from fqvit.detect.results import read_results
from tests.cli.command_line import assert_rejected, fqvit
from tests.factories import one_thread as one_thread

pytest.importorskip("torch")

from .saved import here as here
from .saved import home as home
from .saved import results_of, shapes


def test_predict_shows_a_table_or_writes_results(tmp_path: Path) -> None:
    shown = fqvit("detect", "predict", "shapes.fqvit", "val/000001.jpg", "val/000002.jpg")
    assert shown.code == 0 and shown.out.count("class") == 2 and "val/000002.jpg (128 x 128)" in shown.out
    done = fqvit("detect", "predict", "shapes.fqvit", "val", "-o", tmp_path / "r.json", "--json").json
    results = results_of(tmp_path / "r.json")
    assert done["images"] == 4 and done["detections"] == len(results) > 0
    for r in results:
        assert r["file_name"] == f"val/{r['image_id']:06}.jpg", "image ids are the numbers in the file names"
        assert r["category"] == shapes().CLASSES[r["category_id"] - 1] and 0.15 <= r["score"] <= 1
        mask, (x, y, w, h) = from_runs(r["segmentation"]), r["bbox"]
        assert mask.shape == (128, 128) and 0 <= x <= x + w <= 128.001 and 0 <= y <= y + h <= 128.001
    high = fqvit("detect", "predict", "shapes.fqvit", "val", "--score", 0.25, "--json").json["results"]
    assert [r for r in results if r["score"] >= 0.25] == high
    nothing = fqvit("detect", "predict", "shapes.fqvit", "val/000001.jpg", "--score", 1)
    assert nothing.code == 0 and "nothing found" in nothing.out
    empty = fqvit("detect", "predict", "shapes.fqvit", "val/000001.jpg", "--score", 1, "-o", tmp_path / "none.json")
    assert empty.code == 0 and results_of(tmp_path / "none.json") == []


def test_images_of_several_formats_and_extreme_sizes_are_accepted(tmp_path: Path) -> None:
    sizes = {"dot": (1, 1), "line": (600, 1), "column": (2, 400), "large": (6000, 4000)}
    for name, size in sizes.items():
        Image.effect_noise((16, 16), 90).resize(size).save(tmp_path / f"{name}.png")
    Image.effect_noise((90, 60), 50).convert("P").save(tmp_path / "palette.gif")
    Image.fromarray(np.full((40, 50), 40_000, np.uint16)).save(tmp_path / "deep.png")
    done = fqvit("detect", "predict", "shapes.fqvit", tmp_path, "-o", tmp_path / "r.json", "--json").json
    assert done["images"] == 6
    for r in results_of(tmp_path / "r.json"):
        width, height = sizes.get(Path(r["file_name"]).stem, (90, 60))
        if Path(r["file_name"]).stem in sizes:
            assert r["segmentation"]["size"] == [height, width]
    (tmp_path / "large.png").unlink()
    drawn = fqvit("detect", "draw", "shapes.fqvit", tmp_path, "-o", tmp_path / "pictures", "--score", 0.15)
    assert drawn.code == 0 and len(list((tmp_path / "pictures").iterdir())) == 5


def test_unreadable_images_are_named_and_the_other_images_are_processed(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(Path("val/000001.jpg").read_bytes()[:100])
    words = ("shapes.fqvit", "val/000001.jpg", tmp_path / "bad.png", tmp_path / "none.jpg")
    done = fqvit("detect", "predict", *words, "-o", tmp_path / "r.json")
    assert done.code == 2 and "bad.png" in done.err and "none.jpg" in done.err and "2 of 3 images" in done.err
    assert {r["file_name"] for r in results_of(tmp_path / "r.json")} == {"val/000001.jpg"}
    done = fqvit("detect", "draw", *words, "-o", tmp_path / "pictures")
    assert done.code == 2 and [path.name for path in (tmp_path / "pictures").iterdir()] == ["000001.png"]
    for command in (("predict",), ("draw", "-o", tmp_path / "none")):  # one image gives a one-line error
        assert_rejected(fqvit("detect", *command, "shapes.fqvit", tmp_path / "none.jpg"), "none.jpg: no such file")


def test_no_results_are_written_if_no_image_is_readable(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"not an image")
    out = tmp_path / "results.json"
    out.write_text("older")
    for images in (["bad.png"], ["bad.png", "missing.png"]):
        done = fqvit("detect", "predict", "shapes.fqvit", *(tmp_path / name for name in images), "-o", out)
        assert done.code == 2 and done.out == "" and len(done.err.splitlines()) == (1 if len(images) == 1 else 3)
    assert out.read_text() == "older"


def test_draw_marks_detections(tmp_path: Path) -> None:
    done = fqvit("detect", "draw", "shapes.fqvit", "val/000001.jpg", "-o", tmp_path / "a" / "b", "--score", 0.15, "--json").json
    assert done["pictures"] == 1 and done["objects"] > 0
    fqvit("detect", "predict", "shapes.fqvit", "val", "-o", tmp_path / "r.json")
    moved = fqvit("detect", "draw", "--results", tmp_path / "r.json", "--data", "val", "-o", tmp_path / "c", "--score", 0.15)
    assert moved.code == 0, moved.err
    with Image.open(tmp_path / "a" / "b" / "000001.png") as one, Image.open(tmp_path / "c" / "000001.png") as other:
        assert one.size == (512, 512) and (np.asarray(one) == np.asarray(other)).all()
        plain = Image.open("val/000001.jpg").resize((512, 512), Image.Resampling.BICUBIC)
        assert (np.asarray(one) != np.asarray(plain)).any(-1).mean() > 0.02
    (tmp_path / "again").mkdir()
    shutil.copy("val/000001.jpg", tmp_path / "again")
    fqvit("detect", "draw", "shapes.fqvit", "val/000001.jpg", tmp_path / "again", "-o", tmp_path / "d")
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["000001-2.png", "000001.png"]


def test_draw_reports_one_line_errors(tmp_path: Path) -> None:
    def draw(*words: object) -> Any:
        return fqvit("detect", "draw", *words)

    fqvit("detect", "predict", "shapes.fqvit", "val", "-o", tmp_path / "r.json")
    results = results_of(tmp_path / "r.json")
    assert_rejected(draw("-o", tmp_path / "x"), "--results")
    assert_rejected(draw("shapes.fqvit", "-o", tmp_path / "x"), "images")
    assert_rejected(draw("shapes.fqvit", "val"), "-o DIR")
    assert_rejected(draw("shapes.fqvit", "val", "-o", tmp_path / "r.json"), "a file, expected a folder")
    assert_rejected(draw("--results", tmp_path / "r.json", "-o", tmp_path / "x"), "--data")
    assert_rejected(draw("--results", tmp_path / "none.json", "--data", "val", "-o", tmp_path / "x"), "none.json")
    assert_rejected(draw("--results", "instances_val.json", "--data", "val", "-o", tmp_path / "x"), "not COCO results")
    for text, said in (("[]", "empty"), ("[{}]", "missing"), ("x", "not COCO results")):
        (tmp_path / "bad.json").write_text(text)
        assert_rejected(draw("--results", tmp_path / "bad.json", "--data", "val", "-o", tmp_path / "x"), said)
    results[0]["segmentation"]["size"] = [64, 256]
    (tmp_path / "bad.json").write_text(json.dumps(results))
    assert_rejected(draw("--results", tmp_path / "bad.json", "--data", "val", "-o", tmp_path / "x", "--score", 0), "64 x 256")
    results[0]["segmentation"] = {"size": [128, 128], "counts": "zz"}
    (tmp_path / "bad.json").write_text(json.dumps(results))
    assert_rejected(
        draw("--results", tmp_path / "bad.json", "--data", "val", "-o", tmp_path / "x", "--score", 0), "run lengths"
    )
    assert not (tmp_path / "x").exists()


def test_results_for_file_names_that_are_not_utf8_can_be_read(tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jpg")
    try:
        shutil.copy("val/000001.jpg", name)
    except OSError:
        pytest.skip("this file system accepts only UTF-8 names")
    for words in ((name,), (tmp_path,)):
        done = fqvit("detect", "predict", "shapes.fqvit", *words, "-o", tmp_path / "r.json")
        assert done.code == 0, done.err
        assert {Path(r["file_name"]).name for r in read_results(tmp_path / "r.json")} == {"caf?.jpg"}
    # The error is about the missing file, not about damaged results.
    done = fqvit("detect", "draw", "--results", tmp_path / "r.json", "--data", tmp_path, "-o", tmp_path / "x")
    assert done.code == 2 and "caf?.jpg" in done.err and "not COCO results" not in done.err
    assert fqvit("detect", "draw", "shapes.fqvit", name, "-o", tmp_path / "x").code == 0


@pytest.mark.parametrize("field, value", [("category_id", 10**400), ("category_id", -(2**40)), ("bbox", [-1e308, 0, 1e308, 1])])
def test_results_with_numbers_out_of_range_are_rejected(field: str, value: object, tmp_path: Path) -> None:
    segmentation = {"size": [128, 128], "counts": to_runs(np.ones((128, 128), bool))["counts"]}
    row = {"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 0.9, "segmentation": segmentation}
    words = ("--results", tmp_path / "r.json", "--data", "val", "-o", tmp_path / "x")
    (tmp_path / "r.json").write_text(json.dumps([row | {"file_name": "000001.jpg"}]))
    assert fqvit("detect", "draw", *words).code == 0
    (tmp_path / "r.json").write_text(json.dumps([row | {"file_name": "000001.jpg", field: value}]))
    assert_rejected(fqvit("detect", "draw", *words), "r.json", "not COCO results", field)


def test_draw_never_overwrites_the_images_it_reads(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for name in ("a.png", "b.png"):
        Image.open("val/000001.jpg").save(photos / name)
    shutil.copy("val/000002.jpg", photos / "z.jpg")
    before = {path.name: path.read_bytes() for path in photos.iterdir()}
    (tmp_path / "link").symlink_to(photos)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a.png").symlink_to(photos / "a.png")
    fqvit("detect", "predict", "shapes.fqvit", photos, "-o", tmp_path / "r.json")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.png").write_bytes(b"no image")
    for words, said in (
        (("shapes.fqvit", photos, "-o", photos), "a.png"),
        (("shapes.fqvit", photos / "z.jpg", photos / "b.png", "-o", photos / ".." / "photos"), "b.png"),
        (("shapes.fqvit", tmp_path / "link", "-o", photos), "a.png"),
        (("shapes.fqvit", photos, "-o", tmp_path / "links"), "a.png"),
        (("--results", tmp_path / "r.json", "--data", photos, "-o", photos), "a.png"),
        (("--results", tmp_path / "r.json", "--data", photos, "-o", tmp_path / "link"), "a.png"),
        (("shapes.fqvit", tmp_path / "b" / "a.png", "-o", tmp_path / "b"), "a.png"),
    ):
        assert_rejected(fqvit("detect", "draw", *words), said, "would be overwritten", "-o DIR")
    assert {path.name: path.read_bytes() for path in photos.iterdir()} == before
    # An output may be in the folder of its input unless an input has the same name; earlier outputs are replaced.
    for _ in range(2):
        assert fqvit("detect", "draw", "shapes.fqvit", photos / "z.jpg", "-o", photos).code == 0
        assert fqvit("detect", "draw", "shapes.fqvit", photos / "a.png", photos / "a.png", "-o", tmp_path / "out").code == 0
    assert {path.name for path in photos.iterdir()} == {*before, "z.png"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"a.png", "a-2.png"}


def test_names_that_differ_only_in_case_give_two_files(tmp_path: Path) -> None:
    for name in ("a", "A"):
        shutil.copy("val/000001.jpg", tmp_path / f"{name}.jpg")
    done = fqvit("detect", "draw", "shapes.fqvit", tmp_path / "a.jpg", tmp_path / "A.jpg", "-o", tmp_path / "out")
    assert done.code == 0 and {path.name for path in (tmp_path / "out").iterdir()} == {"a.png", "A-2.png"}
