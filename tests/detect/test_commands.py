"""Test `fqvit detect quantize`, `fqvit detect eval` and `fqvit inspect` on small random detectors, with good and bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fqvit.detect.images import Input, prepare
from fqvit.detect.program import DetectorProgram
from fqvit.detect.results import coco_results, named
from tests.cli.command_line import assert_rejected, fqvit
from tests.factories import assert_same
from tests.factories import one_thread as one_thread

pytest.importorskip("torch")

from fqvit.cli.commands.detectors import load_float, load_program
from fqvit.models.config import SwinConfig
from fqvit.models.swin import Swin

from .saved import here as here
from .saved import home as home
from .saved import results_of, shape_program

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "detectors"


def evaluated(*words: object, annotations: object = "instances_val.json") -> Any:
    pytest.importorskip("pycocotools")
    return fqvit("detect", "eval", *words, "--data", "val", "--annotations", annotations)


def test_quantize_writes_a_detector_and_describes_it(tmp_path: Path) -> None:
    out = tmp_path / "made.fqvit"
    words = ("detect", "quantize", "mask_rcnn", "--weights", "shapes.safetensors", "--calib", "train", "-o", out)
    done = fqvit(*words, "--json").json
    assert done["model"] == "mask_rcnn" and done["float_ops"] == 0 and done["calibration_images"] == 3
    assert done["bytes"] == out.stat().st_size < done["float_bytes"] and done["classes"] == 8 and done["bits"] == "8/8/4"
    assert fqvit("inspect", out, "--json").json["fingerprint"] == done["fingerprint"]
    said = fqvit(*words, "--images", 1, "--recipe", "fast", "--bits", "6/8/8")
    assert said.code == 0 and "fast 6/8/8" in said.out and "1 (train)" in said.out and "float32:" in said.out


def test_programs_resize_by_the_rule_in_their_file_and_float_detectors_as_opencv_does(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8))
    for path in sorted(GOLDEN.glob("*_v1.fqvit")):
        program = DetectorProgram.load(path)
        assert program.resize == ("opencv" if path.stem == "opencv_v1" else "rounded")
        expected = coco_results(program.ready(1, "reference").detect(program.prepare(image)), 1, program.settings)
        for backend in ("native", "reference"):
            assert load_program(path, backend, 1).results(image, 1, "image") == named(expected, "image", program.settings)
    seen: list[Input] = []
    monkeypatch.setattr("fqvit.detect.float.pipeline.detect", lambda networks, given, s: seen.append(given))
    loaded = load_float(Path("shapes.safetensors"), None, None)
    loaded.detect(image)
    assert_same(seen[0].pixels, prepare(image, loaded.settings, "opencv").pixels, "seen and expected")


def test_quantize_accepts_settings_files(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        "short = 64\nlong = 64\nscore = 0.25\nclasses = ['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h']\n"
    )
    changes = json.dumps({"short": 64, "long": 64, "score": 0.25, "classes": list("abcdefgh")})
    (tmp_path / "s.json").write_text(changes, encoding="utf-8-sig")  # with a byte order mark, as some editors write it
    fingerprints = set()
    for kind in ("toml", "json"):
        words = ("--weights", "shapes.safetensors", "--calib", "train", "--images", 1, "--settings", tmp_path / f"s.{kind}")
        done = fqvit("detect", "quantize", *words, "-o", tmp_path / "made.fqvit", "--json").json
        fingerprints.add(done["fingerprint"])
    settings = fqvit("inspect", tmp_path / "made.fqvit", "--json").json["settings"]
    assert len(fingerprints) == 1 and settings["short"] == 64 and settings["classes"][0] == "a"
    assert settings["anchor_scale"] == 4, "other settings are those saved with the weights"


BAD_SETTINGS = {
    "s.toml": [("short = 0", "short"), ("shrt = 3", "shrt"), ("short =", "not TOML"), ("mean = [nan, 0.0, 0.0]", "mean")],
    "s.json": [
        ("[1]", "a JSON list, expected an object"),
        ("{", "not JSON"),
        ('{"short": "3"}', "short"),
        ('{"classes": ["a"]}', "1 class names for 8"),
        ('{"classes": ["\\ud800", "b", "c", "d", "e", "f", "g", "h"]}', "not valid Unicode"),
        ('{"categories": [1, 1, 2, 3, 4, 5, 6, 7]}', "a category occurs twice"),
        ('{"strides": [3, 8, 16, 32, 64]}', "a stride of 3"),
        ('{"anchor_scale": 1e308}', "anchor_scale"),
        ('{"anchor_scale": 1e5}', "lower anchor_scale"),
        ('{"mean": [1e308, 0, 0]}', "mean"),
        ('{"finest": 5e6}', "finest"),
        ('{"proposals": 100000}', "proposals"),
        ('{"long": 9000}', "up to 8192"),
    ],
}


@pytest.mark.parametrize("name, text, said", [(name, *pair) for name, pairs in BAD_SETTINGS.items() for pair in pairs])
def test_bad_settings_are_named_in_the_error(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    words = ("--weights", "shapes.safetensors", "--calib", "train", "--settings", tmp_path / name, "-o", tmp_path / "x.fqvit")
    assert_rejected(fqvit("detect", "quantize", *words), said)
    assert not (tmp_path / "x.fqvit").exists()


def test_quantize_reports_one_line_errors(tmp_path: Path) -> None:
    weights, calib = ("--weights", "shapes.safetensors"), ("--calib", "train")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.safetensors").write_text("hello")

    def quantize(*words: object) -> Any:
        return fqvit("detect", "quantize", *words)

    assert_rejected(quantize(*calib), "--weights")
    assert_rejected(quantize(*weights), "--calib")
    assert_rejected(quantize("resnet", *weights, *calib), "resnet", "mask_rcnn")
    assert_rejected(quantize("cascade_mask_rcnn", *weights, *calib), "is a mask_rcnn")
    assert_rejected(quantize(*weights, "--calib", tmp_path / "empty"), "empty", "no images found")
    assert_rejected(quantize(*weights, "--calib", tmp_path / "none"), "no such folder")
    assert_rejected(quantize("--weights", tmp_path / "none.pth", *calib), "none.pth", "no such file")
    assert_rejected(quantize("--weights", tmp_path / "text.safetensors", *calib), "text.safetensors")
    assert_rejected(quantize("--weights", "shapes.fqvit", *calib), "shapes.fqvit")
    assert_rejected(quantize(*weights, *calib, "--recipe", "partial"), "partial", "float")
    assert_rejected(quantize(*weights, *calib, "--images", 0), "--images 0")
    assert_rejected(quantize(*weights, *calib, "-o", tmp_path / "no" / "x.fqvit"), "no such folder")
    assert not list(Path().glob("*rcnn*"))


def test_classifier_weights_are_rejected(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(Swin(SwinConfig((32, 32), 4, 3, 5, 8, (1, 1), (1, 2), 4)).state_dict(), tmp_path / "swin.safetensors")
    done = fqvit(
        "detect", "quantize", "--weights", tmp_path / "swin.safetensors", "--calib", "train", "-o", tmp_path / "x.fqvit"
    )
    assert_rejected(done, "swin.safetensors", "weights of a classifier", "fqvit quantize")
    assert_rejected(
        fqvit("quantize", "swin_tiny", "--weights", "shapes.safetensors", "--calib", "train"), "fqvit detect quantize"
    )
    assert not (tmp_path / "x.fqvit").exists()


def test_unreadable_calibration_images_are_named(tmp_path: Path) -> None:
    shutil.copytree("train", tmp_path / "train")
    (tmp_path / "train" / "bad.jpg").write_bytes(b"no image")
    words = ("--weights", "shapes.safetensors", "--calib", tmp_path / "train", "-o", tmp_path / "x.fqvit")
    assert_rejected(fqvit("detect", "quantize", *words), "bad.jpg", "1 of 4 images")
    assert [path.name for path in tmp_path.iterdir()] == ["train"]
    for number in range(120):
        shutil.copy("train/000001.jpg", tmp_path / "train" / f"{number}.jpg")
    # Only one of 124 files is unreadable, which is few enough to skip it.
    from fqvit.detect.image_files import ImageFiles

    files = ImageFiles.in_folder(tmp_path / "train")
    assert len(list(files)) == 123 and files.skipped[0][0].endswith("bad.jpg")


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_eval_measures_boxes_and_masks(backend: str, tmp_path: Path) -> None:
    done = evaluated("shapes.fqvit", "--backend", backend, "--threads", 1, "-o", tmp_path / "r.json", "--json").json
    assert done["backend"] == backend and done["images"] == 4 and done["skipped"] == 0
    for kind in ("box", "mask"):
        for name in ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large"):
            value = done[f"{kind}_{name}"]
            assert value is None or 0 <= value <= 100
    results = results_of(tmp_path / "r.json")
    assert len(results) == done["detections"] > 0
    assert {r["file_name"] for r in results} <= {path.name for path in Path("val").iterdir()}


def test_eval_accepts_float_detectors_and_a_limit() -> None:
    done = evaluated("--weights", "shapes.safetensors", "--limit", 2, "--json").json
    assert done["backend"] == "float" and done["images"] == 2
    table = evaluated("shapes.fqvit", "--limit", 1)
    assert table.code == 0 and "AP50" in table.out and "mask" in table.out


def test_perfect_results_have_an_average_precision_of_100() -> None:
    pytest.importorskip("pycocotools")
    from fqvit.detect.annotations import read_annotations
    from fqvit.evaluate.coco import average_precision

    truth = read_annotations("instances_val.json")
    rows = results_of_truth()
    ids = sorted(truth.images)
    scores = average_precision(truth, rows, ids)
    assert {scores[f"{kind}_{name}"] for kind in ("box", "mask") for name in ("ap", "ap50", "ap75")} == {100.0}
    assert average_precision(truth, [], ids)["box_ap"] == 0 and average_precision(truth, [], ids)["mask_ap50"] == 0
    some = average_precision(truth, [r for r in rows if r["image_id"] == ids[0]], ids[:1])
    assert some["box_ap"] == 100


def results_of_truth() -> list[Any]:
    content = json.loads(Path("instances_val.json").read_text())
    return [
        {key: a[key] for key in ("image_id", "category_id", "bbox", "segmentation")} | {"score": 0.9}
        for a in content["annotations"]
    ]


Break = Callable[[dict[str, Any]], object]
BROKEN: dict[str, tuple[Break, str]] = {
    "no images field": (lambda c: c.pop("images"), "images"),
    "no annotations field": (lambda c: c.pop("annotations"), "annotations"),
    "no categories field": (lambda c: c.pop("categories"), "categories"),
    "no images at all": (lambda c: (c["images"].clear(), c["annotations"].clear()), "no images"),
    "an annotation without a box": (lambda c: c["annotations"][3].pop("bbox"), "annotations[3]"),
    "an annotation without an image": (lambda c: c["annotations"][0].pop("image_id"), "image_id"),
    "an image without a name": (lambda c: c["images"][0].pop("file_name"), "file_name"),
    "a negative width": (
        lambda c: c["annotations"][2].update(bbox=[1, 2, -3, 4]),
        "annotation 3: bbox is 1, 2, -3, 4",
    ),
    "a box of three numbers": (lambda c: c["annotations"][2].update(bbox=[1, 2, 3]), "bbox"),
    "a box that is a string": (lambda c: c["annotations"][2].update(bbox="large"), "bbox"),
    "an unknown category": (lambda c: c["annotations"][1].update(category_id=99), "annotation 2: category 99"),
    "an unknown image": (lambda c: c["annotations"][1].update(image_id=99), "annotation 2: image 99"),
    "a duplicate annotation": (lambda c: c["annotations"].append(c["annotations"][0]), "annotation id 1 occurs twice"),
    "a duplicate image": (lambda c: c["images"].append(c["images"][0]), "image id 1 occurs twice"),
    "a duplicate category": (lambda c: c["categories"].append(c["categories"][0]), "category id 1 occurs twice"),
    "other categories": (
        lambda c: [d.update(id=d["id"] + 1) for d in c["categories"]] and c["annotations"].clear(),
        "category 1",
    ),
    "a missing image file": (lambda c: c["images"][1].update(file_name="none.jpg"), "none.jpg"),
    "a different image size": (lambda c: (c["images"][0].update(height=64), c["annotations"].clear()), "annotated as 64 x 128"),
    "a different mask size": (
        lambda c: c["annotations"][0]["segmentation"].update(size=[9, 9]),
        "annotation 1: the mask is 9 x 9",
    ),
    "a truncated mask": (lambda c: c["annotations"][0]["segmentation"].update(counts="02"), "annotation 1: run lengths"),
    "a polygon of two points": (lambda c: c["annotations"][0].update(segmentation=[[1, 2, 3, 4]]), "a polygon has 4 numbers"),
    "a missing mask": (lambda c: c["annotations"][0].pop("segmentation"), "annotation 1: no segmentation"),
    "a negative area": (lambda c: c["annotations"][0].update(area=-1), "area is -1"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_errors_name_the_fault_in_the_annotations(case: str, tmp_path: Path) -> None:
    change, said = BROKEN[case]
    content = json.loads(Path("instances_val.json").read_text())
    change(content)
    (tmp_path / "broken.json").write_text(json.dumps(content))
    done = evaluated("shapes.fqvit", "-o", tmp_path / "r.json", annotations=tmp_path / "broken.json")
    assert_rejected(done, "broken.json", said)
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize("text", ["", "hello", "[1]", '{"images": [', "[" * 100_000, '{"images": NaN}', "\x00\x01"])
def test_the_error_for_annotations_that_are_not_json_names_the_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    assert_rejected(evaluated("shapes.fqvit", annotations=tmp_path / "a.json"), "a.json")
    assert_rejected(evaluated("shapes.fqvit", annotations=tmp_path / "none.json"), "none.json", "cannot be read")


def test_polygons_crowds_and_boxes_without_masks_are_accepted(tmp_path: Path) -> None:
    content = json.loads(Path("instances_val.json").read_text())
    for number, annotation in enumerate(content["annotations"]):
        x, y, w, h = annotation["bbox"]
        annotation["segmentation"] = [[x, y, x + w, y, x + w, y + h]]
        annotation["iscrowd"] = number % 2
        annotation.pop("area")
        if number % 2:
            counts = [0, 128 * 128]
            annotation["segmentation"] = {"size": [128, 128], "counts": counts}
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert evaluated("shapes.fqvit", "--json", annotations=tmp_path / "a.json").json["mask_ap"] is not None
    for annotation in content["annotations"]:
        annotation.pop("segmentation")
    (tmp_path / "a.json").write_text(json.dumps(content))
    done = evaluated("shapes.fqvit", "--json", annotations=tmp_path / "a.json").json
    assert done["mask_ap"] is None and done["box_ap"] is not None
    content["annotations"].clear()
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert evaluated("shapes.fqvit", "--json", annotations=tmp_path / "a.json").json["box_ap"] is None


def test_different_category_names_are_reported(tmp_path: Path) -> None:
    content = json.loads(Path("instances_val.json").read_text())
    content["categories"][0]["name"] = "Disk"
    (tmp_path / "a.json").write_text(json.dumps(content))
    done = evaluated("shapes.fqvit", "--limit", 1, annotations=tmp_path / "a.json")
    assert done.code == 0 and "category 1 is 'disc' in the detector and 'Disk'" in done.err


def test_objects_of_unknown_categories_do_not_change_the_scores(tmp_path: Path) -> None:
    content = json.loads(Path("instances_val.json").read_text())
    before = evaluated("shapes.fqvit", "--json").json
    content["categories"].append({"id": 99, "name": "kite"})
    content["annotations"] += [a | {"id": a["id"] + 1000, "category_id": 99} for a in content["annotations"][:2]]
    (tmp_path / "a.json").write_text(json.dumps(content))
    done = evaluated("shapes.fqvit", "--json", annotations=tmp_path / "a.json")
    assert "that the detector does not know are left out of the scores: 2 (99 'kite')." in done.err
    assert {key: done.json[key] for key in done.json if "ap" in key} == {key: before[key] for key in before if "ap" in key}
    for annotation in content["annotations"]:
        annotation["category_id"] = 99
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert_rejected(evaluated("shapes.fqvit", annotations=tmp_path / "a.json"), "a.json", "no annotated object")


def test_eval_names_unreadable_images(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    shutil.copytree("val", tmp_path / "val")
    (tmp_path / "val" / "000002.jpg").write_bytes(b"no image")
    words = ("--data", tmp_path / "val", "--annotations", "instances_val.json", "-o", tmp_path / "r.json")
    assert_rejected(fqvit("detect", "eval", "shapes.fqvit", *words), "000002.jpg", "1 of 4 images")
    assert not (tmp_path / "r.json").exists()


def test_eval_reports_one_line_errors(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    assert_rejected(evaluated(), "FILE.fqvit")
    assert_rejected(evaluated("shapes.fqvit", "--weights", "shapes.safetensors"), "either")
    assert_rejected(evaluated("--weights", "shapes.safetensors", "--backend", "native"), "--backend", "no backends")
    assert_rejected(evaluated("shapes.fqvit", "--settings", "x.toml"), "--settings", "contains its settings")
    assert_rejected(evaluated("shapes.fqvit", "--threads", 0), "--threads 0")
    assert_rejected(evaluated("shapes.fqvit", "--limit", 0), "limit: 0")
    assert_rejected(evaluated("shapes.fqvit", "-o", tmp_path), "is a folder")
    assert_rejected(fqvit("detect", "eval", "shapes.fqvit", "--data", "val"), "--annotations")
    assert_rejected(
        fqvit("detect", "eval", "shapes.fqvit", "--data", "train", "--annotations", "instances_val.json"), "1 of 4 images"
    )
    (tmp_path / "empty").mkdir()
    words = ("--data", tmp_path / "empty", "--annotations", "instances_val.json")
    assert_rejected(fqvit("detect", "eval", "shapes.fqvit", *words), "4 of 4 images")


def test_classifiers_and_detectors_are_not_confused(tmp_path: Path) -> None:
    assert fqvit("quantize", "fmnist_vit", "--images", 4, "-o", tmp_path / "vit.fqvit").code == 0
    for words in (
        ("detect", "predict", tmp_path / "vit.fqvit", "val/000001.jpg"),
        ("detect", "draw", tmp_path / "vit.fqvit", "val/000001.jpg", "-o", tmp_path / "x"),
    ):
        assert_rejected(fqvit(*words), "vit.fqvit", "holds a classifier", "fqvit classify")
    assert_rejected(evaluated(tmp_path / "vit.fqvit"), "holds a classifier")
    for words in (
        ("classify", "shapes.fqvit", "val/000001.jpg"),
        ("eval", "shapes.fqvit", "--data", "val"),
        ("eval", "shapes.fqvit", "--backend", "reference"),
    ):
        assert_rejected(fqvit(*words), "shapes.fqvit", "holds a detector", "fqvit detect eval")
    assert_rejected(fqvit("detect", "predict", "none.fqvit", "val/000001.jpg"), "none.fqvit", "fqvit detect quantize")
    assert_rejected(
        fqvit("detect", "predict", "shapes.safetensors", "val/000001.jpg"), "not a quantized program", "fqvit detect quantize"
    )


def test_inspect_shows_parts_proofs_and_steps_outside_integer_arithmetic() -> None:
    done = fqvit("inspect", "shapes.fqvit", "--json").json
    assert done["kind"] == "detector" and done["float_ops"] == 0 and "decoding" in done["outside"]
    assert done["resize"] == "opencv" and "interpolation weights" in done["outside"]
    assert list(done["parts"]) == ["pyramid", "boxes.0", "masks.0"] and done["fingerprint"] == shape_program().fingerprint()
    assert all(part["proof_count"] > 0 and part["op_count"] > 0 for part in done["parts"].values())
    assert all(proof["bound"] < 2 ** proof["bits"] for proof in done["between"])
    text = fqvit("inspect", "shapes.fqvit", "--sites", "--ops", "--proofs")
    assert text.code == 0
    for words in (
        "outside",
        "decoding of image files",
        "0 floating-point ops",
        "bilinear, bit-exact with OpenCV",
        "Ops of masks.0",
        "Sites of pyramid",
        "roialign",
    ):
        assert words in text.out
