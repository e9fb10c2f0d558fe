"""Recipes w4, w6a6, w4a4 and auto on detectors: samples, rounding of convolutions, and the search for bit widths."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fqvit.detect import refine
from fqvit.detect import sample as sample_module
from fqvit.detect.calibrate import DetectorCalibration, ObservedNetworks, _observe_image, calibrate_detector
from fqvit.detect.file import file_size
from fqvit.detect.images import prepare
from fqvit.detect.lower import LoweredDetector
from fqvit.detect.model.float_models import box_model, mask_model, pyramid_model
from fqvit.detect.program import DetectorProgram
from fqvit.detect.sample import DetectorSample
from fqvit.detect.search import DetectorSubject
from fqvit.ir.ops import Linear
from fqvit.models import maps
from fqvit.models.graph import trace
from fqvit.quant.centering import center
from fqvit.quant.methods import compensate, reconstruct
from fqvit.quant.methods.compensate import column_blocks
from fqvit.quant.methods.lockstep import LinearLayer
from fqvit.quant.methods.segments import segments
from fqvit.quant.recipe import RECIPES, Recipe
from fqvit.quant.simulate import Simulation
from tests.cli.command_line import assert_rejected, fqvit
from tests.detect.detectors import CONFIGS, SETTINGS
from tests.detect.saved import write_all
from tests.detect.test_programs import detector_of, sample_images
from tests.factories import assert_same
from tests.factories import few_steps as few_steps
from tests.factories import one_thread as one_thread

AUTO = RECIPES["auto"]


@pytest.fixture(autouse=True, scope="module")
def quick() -> Any:
    """Sample and learn little: the tests check that every step works, not how accurate the result is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_module, "CROPS_PER_IMAGE", 1)
        patch.setattr(sample_module, "BOX_FEATURES", 64)
        patch.setattr(sample_module, "MASK_FEATURES", 16)
        yield


def calibrate(name: str, recipe: Recipe) -> DetectorCalibration:
    detector = detector_of(name)

    def size_of(found: DetectorCalibration) -> int:
        return file_size(DetectorProgram.of(detector, LoweredDetector(detector, found)))

    return calibrate_detector(detector, sample_images()[:2], recipe, size_of=size_of)


@cache
def calibrated(name: str, recipe: str) -> DetectorCalibration:
    return calibrate(name, RECIPES[recipe])


def program_of(name: str, recipe: str) -> DetectorProgram:
    detector = detector_of(name)
    return DetectorProgram.of(detector, LoweredDetector(detector, calibrated(name, recipe)))


@cache
def inputs_of(name: str) -> dict[str, Any]:
    """Sample the inputs of all networks of a detector."""
    detector = detector_of(name)
    taken = DetectorSample(detector.settings, 4)
    networks = ObservedNetworks(detector, [RECIPES["fqvit"]], taken)
    with torch.no_grad():
        for image in sample_images():
            _observe_image(networks, prepare(image, detector.settings, "opencv"))
    return taken.inputs()


@pytest.mark.parametrize(
    "name, recipe",
    [("mask r-cnn", "w4"), ("mask r-cnn", "w6a6"), ("mask r-cnn", "w4a4"), ("cascade of 4conv1fc", "w4"), ("cascade", "auto")],
)
def test_the_program_verifies_and_both_backends_give_the_same_bits(name: str, recipe: str) -> None:
    program = program_of(name, recipe)
    program.verify()
    image = program.prepare(sample_images()[3])
    found = [program.ready(1, backend).detect(image) for backend in ("native", "reference")]
    assert len(found[0].boxes)
    for field in ("boxes", "scores", "labels", "probabilities"):
        assert_same(*(getattr(each, field) for each in found), field)


def test_w4_stores_the_weights_of_all_networks_in_4_bits_and_those_of_the_proposal_head_once() -> None:
    program = program_of("mask r-cnn", "w4")
    for _, part in program.parts():
        for op in part.ops:
            if isinstance(op, Linear):
                end = any(word in op.y for word in ("patch_embed", "objectness", "deltas", "classes", "logits"))
                assert op.weight_bits == (8 if end else 4), op.y
    convs = [op for op in program.pyramid.ops if isinstance(op, Linear) and op.y.startswith("rpn_head.relu")]
    assert len(convs) == 5 and [op.weights_of for op in convs] == [None] + [convs[0].y] * 4
    assert file_size(program) < 0.85 * file_size(program_of("mask r-cnn", "fqvit"))


def test_every_sum_of_the_backbone_ends_a_segment() -> None:
    """Norms between the stages are read by the feature pyramid, and belong to no segment."""
    graph = trace(detector_of("mask r-cnn").module.pyramid)
    found = segments(graph)[:-1]
    sums = [node.name for node in graph.nodes if node.leaf.role == "residual"]
    assert [segment.end.name for segment in found] == sums
    names = {node.name for segment in found for node in segment.nodes}
    assert not names & {f"backbone.norm{i}" for i in range(4)} and "backbone.layers.3.blocks.1.mlp.fc2" in names
    for segment in found:
        inside = {segment.start, *(node.name for node in segment.nodes)}
        assert all(set(node.inputs) <= inside for node in segment.nodes)


def test_w4_learns_the_weights_of_every_stage_of_the_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[str] = []
    real = reconstruct.Reconstruction._learn

    def spy(self: Any, segment: Any, examples: Any) -> None:
        learned.append(segment.end.name)
        real(self, segment, examples)

    monkeypatch.setattr(reconstruct.Reconstruction, "_learn", spy)
    detector = detector_of("mask r-cnn")
    calibrate_detector(detector, sample_images()[:1], RECIPES["w4"])
    for i, blocks in enumerate(CONFIGS["mask r-cnn"].backbone.depths):
        for block in range(blocks):
            assert {f"backbone.layers.{i}.blocks.{block}.add{n}" for n in (1, 2)} <= set(learned)


def test_rows_of_a_convolution_are_those_that_its_weights_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = trace(mask_model(detector_of("mask r-cnn"), 0).module)
    node = next(node for node in graph.nodes if isinstance(node.leaf, maps.Conv2d))
    layer = LinearLayer.of(node, pyramid_model(detector_of("mask r-cnn"), 64, 64).preprocess)
    x = torch.randn(3, 5, 7, 16, generator=torch.Generator().manual_seed(0))
    expected = node.leaf(x).detach().reshape(3, 35, -1)
    for limit, step in ((2048, 1), (40, 3)):
        monkeypatch.setattr("fqvit.quant.methods.lockstep.CONV_ROWS", limit)
        found = layer.rows(x).double() @ torch.from_numpy(layer.weight).T + torch.from_numpy(layer.bias)
        torch.testing.assert_close(found.float(), expected[:, ::step], atol=1e-4, rtol=1e-4)


def test_layers_with_many_inputs_are_compensated_in_equal_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert column_blocks(4608) == [slice(0, 4608)] and column_blocks(1) == [slice(0, 1)]
    assert column_blocks(12544) == [slice(0, 4181), slice(4181, 8362), slice(8362, 12544)]
    model, features = box_model(detector_of("mask r-cnn"), 0), inputs_of("mask r-cnn")["boxes.0"]
    calibration = replace(
        calibrated("mask r-cnn", "fqvit").boxes[0], recipe=Recipe(name="c", weight_bits=3, rounding="compensated")
    )
    errors = {}
    exact = trace(model.module).run_all(torch.from_numpy(features))[0].detach()
    for columns in (1, 100, 10_000):
        monkeypatch.setattr(compensate, "MAX_COLUMNS", columns)
        found = compensate.compensate(model, calibration, features)
        errors[columns] = float((Simulation(model, found).run_features(torch.from_numpy(features))[0] - exact).square().mean())
    nearest = float((Simulation(model, calibration).run_features(torch.from_numpy(features))[0] - exact).square().mean())
    assert errors[10_000] < errors[100] < nearest and errors[1] < nearest


def test_crops_are_parts_of_images_and_smaller_images_are_padded() -> None:
    random = np.random.default_rng(0)
    large, small = (random.integers(0, 256, (*size, 3), np.uint8) for size in ((100, 140), (50, 70)))
    taken = DetectorSample(SETTINGS, 8)
    assert taken.side == 96
    taken.add_image(large)
    taken.add_image(small)
    found = taken.inputs()["pyramid"]
    windows = np.lib.stride_tricks.sliding_window_view(large, (96, 96, 3))[:, :, 0]
    assert found.shape == (2, 96, 96, 3) and (windows == found[0]).all((2, 3, 4)).any()
    assert_same(found[1][:50, :70], small, "pixels")
    assert (found[1][50:] == taken.colour).all() and (found[1][:, 70:] == taken.colour).all()


def test_centered_keys_do_not_change_the_float_pyramid() -> None:
    calibration = calibrated("mask r-cnn", "w4")
    assert calibration.pyramid.centers and not calibration.boxes[0].centers
    module = pyramid_model(detector_of("mask r-cnn"), 96, 128).module
    x = torch.randn(1, 3, 96, 128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for a, b in zip(trace(module).run_all(x), center(trace(module), calibration.pyramid.centers).run_all(x), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def subject(name: str = "cascade") -> DetectorSubject:
    detector, inputs = detector_of(name), inputs_of(name)
    return DetectorSubject(detector, refine.models_of(detector, inputs["pyramid"].shape[1]), inputs)


def test_the_measure_of_a_detector_is_zero_for_equal_networks_and_grows_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    here = subject()
    same = here._compare(here.exact, here.images)
    assert (same.kl, same.agreement, same.loss) == (0, 100, 0)
    fine, coarse = (
        calibrate_detector(detector_of("cascade"), sample_images()[:1], recipe).parts()
        for recipe in (RECIPES["fqvit"], Recipe(name="coarse", weight_bits=3))
    )
    assert 0 < here.measure(fine, 4).kl < here.measure(coarse, 4).kl
    for part in fine:  # every network counts
        assert here.measure({**fine, part: coarse[part]}, 4).kl > here.measure(fine, 4).kl
    made: list[str] = []
    real = Simulation.__init__
    monkeypatch.setattr(
        Simulation, "__init__", lambda self, model, found: (made.append(model.name), real(self, model, found))[1]
    )
    here.measure(fine, 4)
    made.clear()
    here.measure({**fine, "boxes.1": coarse["boxes.1"]}, 4)
    assert made == ["cascade_mask_rcnn box head 1"], "networks that did not change are not simulated again"


def test_kl_is_the_sum_over_classes_regressions_objectness_and_masks() -> None:
    here = subject("mask r-cnn")
    exact = here.exact
    moved = replace(
        exact,
        deltas=exact.deltas + 0.5,
        masks=exact.masks + 1,
        pyramid=replace(exact.pyramid, objectness=exact.pyramid.objectness - 1, deltas=exact.pyramid.deltas + 2),
    )

    def binary(a: torch.Tensor, b: torch.Tensor) -> float:
        p = a.double().sigmoid()
        return float(F.binary_cross_entropy_with_logits(b.double(), p) - F.binary_cross_entropy_with_logits(a.double(), p))

    found = here._compare(moved, here.images)
    expected = 0.5 * 4 * 0.25 + 0.5 * 4 * 4 + binary(exact.masks, moved.masks)
    expected += binary(exact.pyramid.objectness, moved.pyramid.objectness)
    assert found.kl == pytest.approx(expected, rel=1e-5) and found.loss == 0 and found.agreement == 100


def test_auto_narrows_layers_of_all_networks_within_its_limits() -> None:
    quick = msgspec.structs.replace(AUTO, rounding="nearest")
    free = calibrate("mask r-cnn", msgspec.structs.replace(quick, max_loss=100.0))
    assert free.choice is not None and free.choice.reached and free.choice.layers
    layers = {step.layer for step in free.choice.narrowed}
    assert len(layers) == free.choice.layers and {name.partition("/")[0] for name in layers} == {
        "pyramid",
        "boxes.0",
        "masks.0",
    }
    assert "pyramid/rpn_head.conv" in layers and "pyramid/rpn_head.conv@1" not in layers
    bits = free.pyramid.recipe.layer_bits
    assert {bits["rpn_head.conv"], bits["rpn_head.conv@1"], bits["rpn_head.conv@4"]} == {4}
    detector = detector_of("mask r-cnn")
    smallest = file_size(DetectorProgram.of(detector, LoweredDetector(detector, free)))
    largest = file_size(program_of("mask r-cnn", "fqvit"))
    assert free.choice.bytes == smallest < largest
    limit = (smallest + largest) // 2
    fitted = calibrate("mask r-cnn", msgspec.structs.replace(quick, max_size=limit))
    assert fitted.choice is not None and fitted.choice.reached and smallest < fitted.choice.bytes <= limit
    assert 0 < len(fitted.choice.narrowed) < len(free.choice.narrowed)


def test_auto_raises_sites_if_the_loss_is_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from fqvit.quant.methods import auto

    exact = auto.measure
    monkeypatch.setattr(auto, "measure", lambda a, b: msgspec.structs.replace(exact(a, b), loss=1.0))
    detector = detector_of("mask r-cnn")
    found = calibrate_detector(detector, sample_images()[:1], msgspec.structs.replace(AUTO, max_loss=0.0, rounding="nearest"))
    choice = found.choice
    assert choice is not None and not choice.reached and len(choice.raised) == choice.units > 0 and not choice.narrowed
    assert {raised.role for raised in choice.raised} == {"scores", "attention"}
    assert all(raised.unit.startswith("pyramid/backbone.layers.") for raised in choice.raised)
    DetectorProgram.of(detector, LoweredDetector(detector, found)).verify()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    write_all(folder)
    return folder


def test_the_command_takes_the_recipes_and_the_limits_of_auto(home: Path, tmp_path: Path) -> None:
    words = ("detect", "quantize", "--weights", home / "shapes.safetensors", "--calib", home / "train", "--images", 1)
    out = ("-o", tmp_path / "a.fqvit")
    said = fqvit(*words, *out, "--recipe", "auto", "--max-loss", 100)
    assert said.code == 0, said.err
    assert "boxes.0/fcs.0.linear" in said.out and "of classification accuracy on proposals (limit: 100)" in said.out
    size = (tmp_path / "a.fqvit").stat().st_size
    done = fqvit(*words, *out, "--recipe", "auto", "--max-size", size + 20_000, "--json").json
    assert done["choice"]["reached"] and size < done["bytes"] == done["choice"]["bytes"] <= size + 20_000
    bits = fqvit(*words, *out, "--bits", "4/8/4", "--json").json
    assert bits["bits"] == "4/8/4" and bits["choice"] is None
    recipe = DetectorProgram.load(tmp_path / "a.fqvit").pyramid.header.recipe
    assert recipe["rounding"] == "reconstructed" and recipe["weight_group"] == 8
    assert_rejected(fqvit(*words, *out, "--max-loss", 1), "--max-loss 1", "--recipe auto")
    assert_rejected(fqvit(*words, *out, "--recipe", "w4", "--max-size", "1MB"), "--max-size 1MB", "--recipe auto")
    assert_rejected(fqvit(*words, *out, "--recipe", "auto", "--max-size", "small"), "--max-size small", "4.5MB")
    assert fqvit(*words, *out, "--recipe", "embedding").code == 0
    assert DetectorProgram.load(tmp_path / "a.fqvit").pyramid.header.recipe.get("rounding", "nearest") == "nearest"


@pytest.mark.parametrize("name, recipe", [("mask r-cnn", "w4"), ("mask r-cnn", "w4a4"), ("cascade of 4conv1fc", "w4")])
def test_compare_simulates_with_the_weights_of_the_program(name: str, recipe: str) -> None:
    from fqvit.evaluate.compare_detector import DetectorComparer

    comparer = DetectorComparer(program_of(name, recipe), detector_of(name))
    for image in sample_images():  # several, because the smallest maps have few values
        comparer.add(image, "image")
    for part, found in comparer.result().parts.items():
        for row in found.sites:
            assert row.integer_db is not None and row.simulated_db is not None
            assert abs(row.integer_db - row.simulated_db) < 3, (part, row)
