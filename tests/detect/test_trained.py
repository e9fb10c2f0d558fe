"""Test the trained Mask R-CNN of training/weights.

Both backends give the same bits, and quantization loses less than one point of average precision.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from fqvit.detect.program import DetectorProgram
from tests.cli.command_line import fqvit
from tests.factories import assert_same
from tests.factories import one_thread as one_thread

pytest.importorskip("torch")
pytest.importorskip("pycocotools")

TRAINING = Path(__file__).resolve().parents[2] / "training"
WEIGHTS = TRAINING / "weights" / "mask_rcnn.safetensors"


@pytest.mark.skipif(not WEIGHTS.is_file(), reason="the training folder is not in source distributions")
def test_the_trained_detector_has_the_same_bits_on_both_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TRAINING)
    import make_shapes

    make_shapes.write_split(tmp_path, "train", 4, (make_shapes.TRAIN_SPLIT, 0))
    file = tmp_path / "shapes.fqvit"
    assert fqvit("detect", "quantize", "--weights", WEIGHTS, "--calib", tmp_path / "train", "-o", file).code == 0
    program = DetectorProgram.load(file)
    slow, fast = program.ready(1, "reference"), program.ready(2)
    for path in sorted((tmp_path / "train").glob("*.jpg"))[:2]:
        image = program.prepare(Image.open(path))
        found, expected = fast.detect(image), slow.detect(image)
        assert len(expected.boxes) > 0
        for part in ("boxes", "scores", "labels", "probabilities"):
            assert_same(getattr(found, part), getattr(expected, part), f"{path.name}: {part}, native and reference")


@pytest.mark.skipif(not WEIGHTS.is_file(), reason="the training folder is not in source distributions")
def test_the_trained_detector_keeps_its_precision_in_integers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TRAINING)
    import make_shapes

    make_shapes.write_split(tmp_path, "train", 32, (make_shapes.TRAIN_SPLIT, 0))
    make_shapes.write_split(tmp_path, "val", 100, (make_shapes.VAL_SPLIT, 0))
    file = tmp_path / "shapes.fqvit"
    assert fqvit("detect", "quantize", "--weights", WEIGHTS, "--calib", tmp_path / "train", "-o", file).code == 0
    data = ("--data", tmp_path / "val", "--annotations", tmp_path / "instances_val.json", "--threads", 1, "--json")
    in_float = fqvit("detect", "eval", "--weights", WEIGHTS, *data).json
    in_integers = fqvit("detect", "eval", file, *data).json
    assert in_float["box_ap"] > 45
    for name in ("box_ap", "mask_ap"):
        assert in_integers[name] > in_float[name] - 1.0, f"{name}: {in_integers[name]} in integers, {in_float[name]} in float"
