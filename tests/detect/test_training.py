"""Tests of the synthetic shapes data set, and of training the small detectors on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fqvit.detect.float.roialign import multiscale_roi_align
from fqvit.detect.masks import from_runs

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "training")
    import make_shapes

    return make_shapes


@pytest.fixture
def losses(shapes: ModuleType) -> ModuleType:
    import detector_losses

    return detector_losses


@pytest.fixture
def trainer(shapes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return train_detector.py, changed to draw images in this process and to save every two steps."""
    import train_detector

    def here(seed: int, steps: range, count: int) -> Iterator[tuple[int, Any]]:
        return ((step, train_detector.draw_batch(seed, step, count)) for step in steps)

    monkeypatch.setattr(train_detector, "batches", here)
    monkeypatch.setattr(train_detector, "SAVE_EVERY", 2)
    return train_detector


def tiny_plan(trainer: ModuleType, name: str) -> Any:
    plan = trainer.PLANS[name]
    swin = replace(plan.config.backbone, width=8, depths=(1, 2, 1, 1), heads=(1, 1, 2, 2))
    config = replace(plan.config, backbone=swin, channels=16, box_width=16, mask_convs=1, mask_channels=8)
    return replace(plan, config=config, steps=4, batch=2, boxes_per_image=16, masks_per_image=3, warm_up=1)


def test_the_same_seed_gives_the_same_bytes(shapes: ModuleType, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shapes.write_split(tmp_path / name, "val", 4, (shapes.VAL_SPLIT, 0))
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(files) == 5
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files)
    shapes.write_split(tmp_path / "c", "val", 4, (shapes.VAL_SPLIT, 1))
    assert (tmp_path / "c" / files[0]).read_bytes() != (tmp_path / "a" / files[0]).read_bytes()


def test_annotations_describe_the_visible_part_of_each_shape(shapes: ModuleType, tmp_path: Path) -> None:
    shapes.write_split(tmp_path, "val", 6, (shapes.VAL_SPLIT, 0))
    content = json.loads((tmp_path / "instances_val.json").read_text())
    assert [c["name"] for c in content["categories"]] == list(shapes.CLASSES)
    seen = {image["id"]: np.zeros((shapes.SIDE, shapes.SIDE), int) for image in content["images"]}
    for annotation in content["annotations"]:
        mask = from_runs(annotation["segmentation"])
        assert mask.sum() == annotation["area"] >= 8
        x, y, w, h = (int(v) for v in annotation["bbox"])
        assert mask[y : y + h, x : x + w].sum() == mask.sum()
        assert mask[y].any()
        assert mask[:, x + w - 1].any()
        seen[annotation["image_id"]] += mask
    assert max(count.max() for count in seen.values()) == 1, "no pixel belongs to two shapes"
    with Image.open(tmp_path / "val" / content["images"][0]["file_name"]) as image:
        assert image.size == (shapes.SIDE, shapes.SIDE)


def test_flipping_moves_boxes_with_masks(shapes: ModuleType) -> None:
    one = shapes.scene((shapes.ON_THE_FLY, 0, 0))
    x1, y1, x2, y2 = one.boxes.T
    assert (one.flipped().boxes == np.stack([shapes.SIDE - x2, y1, shapes.SIDE - x1, y2], 1)).all()


def test_every_shape_gets_an_anchor_and_other_anchors_are_background(losses: ModuleType) -> None:
    start = np.array([[0.0, 0, 10, 10], [0, 0, 11, 10], [40, 40, 50, 50], [70, 70, 90, 90]])
    truth = np.array([[0.0, 0, 10, 10], [74, 74, 90, 90]])
    chosen, matched = losses.match_anchors(start, truth, np.random.default_rng(0))
    assert dict(zip(chosen.tolist(), matched.tolist(), strict=True)) == {0: 0, 1: 0, 2: -1, 3: 1}
    _, matched = losses.match_anchors(start, np.zeros((0, 4)), np.random.default_rng(0))
    assert (matched == -1).all()


def test_roi_features_with_gradients_equal_those_without(losses: ModuleType, trainer: ModuleType) -> None:
    levels = tuple(torch.randn(2, 32 // 2**i, 32 // 2**i, 3) for i in range(4))
    rng = np.random.default_rng(0)
    start = rng.uniform(0, 60, (20, 2))
    boxes = np.concatenate([start, start + rng.uniform(2, 68, (20, 2))], 1)
    image = rng.integers(0, 2, 20)
    found = losses.roi_features(levels, losses.Samples(boxes, image, image, image), 7, trainer.SETTINGS)
    for n in range(2):
        expected = multiscale_roi_align(
            [x[n].numpy() for x in levels], boxes[image == n], 7, trainer.SETTINGS.finest, (4, 8, 16, 32)
        )
        assert found[torch.from_numpy(image == n)].numpy() == pytest.approx(expected, abs=1e-5)


def test_a_mask_fills_its_own_box(losses: ModuleType, shapes: ModuleType) -> None:
    mask = np.zeros((1, shapes.SIDE, shapes.SIDE), bool)
    mask[0, 20:50, 30:70] = True
    one = shapes.Scene(np.zeros((shapes.SIDE, shapes.SIDE, 3), np.uint8), np.zeros(1, np.int64), mask)
    nothing = np.zeros(2, np.int64)
    twice = losses.Samples(np.array([[30.0, 20, 70, 50], [30, 20, 110, 50]]), nothing, nothing, nothing)
    whole, half = losses.mask_targets(twice, [one], 28)
    assert whole.all()
    assert half[:, :14].all()
    assert not half[:, 14:].any()


@pytest.mark.parametrize("name", ["mask_rcnn", "cascade"])
def test_training_reduces_the_losses(trainer: ModuleType, name: str) -> None:
    plan = tiny_plan(trainer, name)
    detector, averaged = trainer.build(plan.config, 0), trainer.build(plan.config, 0)
    parts, scenes = trainer.optimisers(detector, plan), trainer.draw_batch(0, 0, 2)
    plan = replace(plan, steps=1000, warm_up=1)
    totals = []
    for step in range(16):
        found = trainer.train_step(detector, averaged, parts, scenes, trainer.SETTINGS, plan, step, 0)
        assert len(found) == 2 + 3 * plan.config.stages
        totals.append(sum(found.values()))
    assert totals[-1] < 0.8 * totals[0]


@pytest.mark.parametrize("name", ["mask_rcnn", "cascade"])
def test_resumed_training_ends_with_the_same_weights(
    trainer: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pycocotools")
    plan = tiny_plan(trainer, name)
    trainer.write_split(tmp_path, "val", 2, (trainer.VAL_SPLIT, 0))
    trainer.train(name, tmp_path, tmp_path / "whole.safetensors", plan, 0)

    step_once = trainer.train_step

    def stop_at_three(*arguments: Any) -> dict[str, float]:
        if arguments[6] == 3:
            raise KeyboardInterrupt
        return step_once(*arguments)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(trainer, "train_step", stop_at_three)
        trainer.train(name, tmp_path, tmp_path / "parts.safetensors", plan, 0)
    trainer.train(name, tmp_path, tmp_path / "parts.safetensors", plan, 0)
    assert (tmp_path / "parts.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_weights_take_less_than_8_mb(trainer: ModuleType) -> None:
    for plan in trainer.PLANS.values():
        detector = trainer.build(plan.config, 0)
        assert 2 * sum(p.numel() for p in detector.parameters()) < 8e6, "bytes as float16"
