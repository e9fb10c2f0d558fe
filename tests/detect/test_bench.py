"""Test `fqvit bench` of detectors: the structure of its output, the parts, the float detector and errors, not the times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fqvit.bench.detector import parts_of, parts_text
from fqvit.bench.detector_runs import BETWEEN, NETWORKS, by_part, part_of
from fqvit.bench.rounds import Timing
from fqvit.errors import FqvitError
from fqvit.runtime.native import OpTime, instruction_sets
from tests.cli.command_line import assert_rejected, fqvit
from tests.factories import assert_same

pytest.importorskip("torch")

from fqvit.bench.detector_floats import float_detector, float_run
from fqvit.detect.model.load import random_release
from fqvit.detect.model.rebuild import config_of_program

from .detectors import CONFIGS
from .saved import here as here
from .saved import home as home
from .saved import program, shape_program
from .test_programs import sample_images

QUICK = ("--rounds", 1)


def test_bench_measures_a_detector_and_its_parts_next_to_torch() -> None:
    result = fqvit("bench", "shapes.fqvit", *QUICK, "--json").json
    (setting,) = result["settings"]
    assert [row["name"] for row in setting["results"]] == ["fqvit", "torch fp32"] and setting["batch"] == 1
    assert result["kind"] == "detector" and result["model"] == "mask_rcnn" and result["recipe"] == "fqvit"
    assert result["size"] == [96, 160] and result["image"] is None and result["peer_weights"] == "random weights"
    assert result["instruction_set"] == instruction_sets()[0] and result["macs"]["fqvit"] > 1_000_000
    (parts,) = result["parts_ms"]
    assert set(parts["fqvit"]) == {*NETWORKS, *BETWEEN, "between the networks"}
    assert set(parts["torch fp32"]) == {*NETWORKS, "between the networks"}
    assert all(ms > 0 for own in parts.values() for part, ms in own.items() if part != "input")
    assert result["detections"] == {"fqvit": result["detections"]["fqvit"]} and result["detections"]["fqvit"] > 0


def test_bench_with_weights_an_image_and_threads_prints_tables() -> None:
    words = ("--weights", "shapes.safetensors", "--image", "val/000001.jpg", "--ops")
    done = fqvit("bench", "shapes.fqvit", *QUICK, *words)
    assert done.code == 0, done.err
    assert (
        "Image: val/000001.jpg, 96 x 96 after resizing" in done.out and "Weights of the peers: shapes.safetensors" in done.out
    )
    assert "1 thread, batch 1" in done.out and "Wall time by part" in done.out
    assert f", {instruction_sets()[0]}; 1 round." in done.out and "between the networks" in done.out
    assert "roi_align" in done.out and "masks.0" in done.out, "the time per op includes heads and steps between networks"


def test_bench_of_a_detector_runs_without_torch_if_no_peer_is_wanted() -> None:
    result = fqvit("bench", "shapes.fqvit", *QUICK, "--against", "none", "--threads", 2, "--json").json
    assert [row["name"] for row in result["settings"][0]["results"]] == ["fqvit"] and result["peer_weights"] is None
    assert result["settings"][0]["threads"] == 2
    result = fqvit("bench", "shapes.fqvit", *QUICK, "--against", "openvino", "--json").json
    assert result["skipped"] == [{"peer": "openvino", "reason": "detectors are compared with torch only"}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--batch", "2"), "--batch 2"),
        (("--heads", "3"), "--heads"),
        (("--image", "nowhere.jpg"), "nowhere.jpg"),
        (("--weights", "nowhere.pth"), "nowhere.pth"),
        (("--against", "abacus"), "abacus"),
    ],
)
def test_wrong_input_is_rejected_in_one_line(words: tuple[str, ...], said: str) -> None:
    assert_rejected(fqvit("bench", "shapes.fqvit", *QUICK, *words), said)


def test_an_image_is_rejected_for_a_classifier(tmp_path: Path) -> None:
    path = tmp_path / "vit.fqvit"
    assert fqvit("quantize", "fmnist_vit", "--images", 4, "-o", path).code == 0
    assert_rejected(fqvit("bench", path, "--image", "val/000001.jpg"), "--image", "only for detectors")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_configuration_of_a_program_is_that_of_its_float_detector(name: str) -> None:
    assert config_of_program(program(name)) == CONFIGS[name]


def test_weights_of_another_detector_are_rejected(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "other.safetensors"
    save_file(random_release(CONFIGS["mask r-cnn"], "mmdetection"), path)
    with pytest.raises(FqvitError, match=r"other\.safetensors: classes is 5, expected 8 as in the program.*--weights"):
        float_detector(shape_program(), str(path))
    assert_rejected(fqvit("bench", "shapes.fqvit", *QUICK, "--weights", path), "classes is 5")


def test_a_profiled_run_gives_the_detections_of_a_plain_run() -> None:
    for name in CONFIGS:
        ready = program(name).ready(1)
        image = program(name).prepare(next(iter(sample_images())))
        expected = ready.detect(image)
        found, steps = ready.profile(image)
        for field in ("boxes", "scores", "labels", "probabilities"):
            assert_same(getattr(found, field), getattr(expected, field), field)
        heads = [step.buffer for step in steps if step.op == "head"]
        stages = range(program(name).stages)
        assert heads == [f"boxes.{i}" for i in stages] + [f"masks.{i}" for i in stages]
        assert {part_of(step) for step in steps} == {*NETWORKS, *BETWEEN}
        assert all(step.seconds >= 0 for step in steps)
    with pytest.raises(FqvitError, match="native backend"):
        program(name).ready(1, "reference").profile(image)


def test_mask_heads_with_random_weights_run_on_as_many_boxes_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asked.json").write_text(f'{{"program": "{Path("shapes.fqvit").resolve()}", "weights": null, "boxes": 7}}')
    run = float_run(str(tmp_path / "asked.json"), np.zeros((96, 96, 3), np.uint8), 1)
    seen: list[int] = []
    head = run.networks.module.mask_heads[0]
    head.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    run()
    assert sum(seen) == 7 and set(run.parts) == set(NETWORKS) and all(seconds > 0 for seconds in run.parts.values())


def test_times_by_part_are_medians_and_the_rest_is_between_the_networks() -> None:
    networks = {part: [0.001, 0.002, 0.009] for part in NETWORKS}
    timing = Timing("torch fp32", 1, 1, wall=[0.006, 0.012, 0.046], parts=networks)
    assert parts_of(timing) == pytest.approx(dict.fromkeys(NETWORKS, 2.0) | {"between the networks": 1.0})
    own = Timing("fqvit", 1, 1, wall=[1.0], parts=networks | {part: [0.004, 0.001, 0.002] for part in BETWEEN})
    assert parts_of(own)["RoIAlign"] == pytest.approx(2.0) and parts_of(own)["between the networks"] == pytest.approx(8.0)
    text = parts_text([own, timing])
    assert "median in ms per image, 1 thread" in text and "  RoIAlign" in text and "11.1 %" in text


def test_steps_are_assigned_to_parts() -> None:
    steps = [
        OpTime("neck.lateral.0", "linear", 1.0, 5),
        OpTime("boxes.2", "roi_align", 2.0, 0),
        OpTime("masks.1", "head", 4.0, 9),
    ]
    sums = by_part(steps)
    assert (sums["FPN"], sums["RoIAlign"], sums["mask heads"], sums["backbone"]) == (1.0, 2.0, 4.0, 0.0)
