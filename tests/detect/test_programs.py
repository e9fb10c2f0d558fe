"""Tests of detectors as integer programs: the pyramid at several sizes, box heads and mask heads."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fqvit.detect.images import normalise_and_pad, pad_pixels, prepare
from fqvit.errors import FqvitError
from fqvit.ir.program import Output, Program
from fqvit.runtime.native import Engine
from fqvit.runtime.reference import Reference

pytest.importorskip("torch")

import torch

from fqvit.detect.calibrate import DetectorCalibration, calibrate_detector
from fqvit.detect.lower import LoweredDetector
from fqvit.detect.model.detector import FloatDetector
from fqvit.detect.model.float_models import box_model, mask_model, pyramid_model
from fqvit.ir.ops import Linear
from fqvit.lowering.lower import lower_with_values
from fqvit.models.load import FloatModel
from fqvit.quant.calibration import Calibration
from fqvit.quant.recipe import RECIPES, Recipe, SiteRule, load_recipe
from tests.factories import assert_same, buffers_of
from tests.factories import one_thread as one_thread

from .detectors import CONFIGS, SETTINGS, random_detector
from .sites import compared_sites

SIZES = ((60, 90), (80, 60), (40, 100), (70, 70))
SOME_RECIPES = ("fq-vit", "fqvit", "npu", "fq-vit-original")
SUPPORTED = [name for name, r in RECIPES.items() if r.integer and r.rounding == "nearest" and r.max_loss is None]
every_pair = pytest.mark.parametrize(
    "name, recipe",
    [("mask r-cnn", recipe) for recipe in SOME_RECIPES] + [(name, "fqvit") for name in CONFIGS if name != "mask r-cnn"],
)


def sample_images() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    made = []
    for height, width in SIZES:
        y, x = np.mgrid[0:height, 0:width]
        waves = np.sin(y[..., None] * rng.normal(size=3) / 6 + x[..., None] * rng.normal(size=3) / 6)
        noisy = 128 + 100 * waves + rng.normal(0, 20, (height, width, 3))
        made.append(Image.fromarray(noisy.clip(0, 255).astype(np.uint8)))
    return made


@cache
def detector_of(name: str) -> FloatDetector:
    return random_detector(name)


@cache
def calibrated(name: str, recipe: str) -> DetectorCalibration:
    return calibrate_detector(detector_of(name), sample_images(), load_recipe(recipe))


@cache
def lowered(name: str, recipe: str) -> LoweredDetector:
    return LoweredDetector(detector_of(name), calibrated(name, recipe))


@cache
def packed() -> LoweredDetector:
    """Return a Mask R-CNN with 4-bit weights, packed two per byte."""
    detector, recipe = detector_of("mask r-cnn"), msgspec.structs.replace(RECIPES["fqvit"], weight_bits=4, weight_group=16)
    return LoweredDetector(detector, calibrate_detector(detector, sample_images()[:1], recipe))


def padded_pixels(number: int = 0) -> NDArray[np.uint8]:
    return pad_pixels(prepare(sample_images()[number], SETTINGS).pixels, SETTINGS)


def some_codes(program: Program, count: int = 3) -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 256, (count, *program.input_shape)).astype(np.uint8)


def parts(name: str, recipe: str) -> list[tuple[FloatModel, Calibration, NDArray[np.uint8]]]:
    """Return every network with its calibration and an input."""
    detector, found = detector_of(name), calibrated(name, recipe)
    pixels = padded_pixels()
    made = [(pyramid_model(detector, *pixels.shape[:2]), found.pyramid, pixels[None])]
    low = lowered(name, recipe)
    for stage in range(len(low.boxes)):
        made.append((box_model(detector, stage), found.boxes[stage], some_codes(low.boxes[stage])))
        made.append((mask_model(detector, stage), found.masks[stage], some_codes(low.masks[stage])))
    return made


def programs(name: str, recipe: str) -> list[tuple[Program, NDArray[np.uint8]]]:
    low, pixels = lowered(name, recipe), padded_pixels()
    heads = [(program, some_codes(program)) for program in (*low.boxes, *low.masks)]
    return [(low.pyramid(*pixels.shape[:2]), pixels[None]), *heads]


@every_pair
def test_engine_equals_reference_in_every_output(name: str, recipe: str) -> None:
    for program, x in programs(name, recipe):
        exact = Reference(program).run_all(x)
        assert len(exact) == len(program.header.outputs)
        for threads in (1, 2):
            engine = Engine(program, threads)
            for output, a, b in zip(program.header.outputs, engine.run_all(x), exact, strict=True):
                assert a.dtype == b.dtype
                assert_same(a, b, f"{program.header.model}, {threads} threads, {output.buffer}")
            assert_same(engine.run(x), exact[0], "run() returns the first output")


def test_engine_equals_reference_in_every_buffer() -> None:
    for program, x in programs("mask r-cnn", "fqvit"):
        engine = Engine(program, 1, keep=True)
        assert_same(engine.buffers(x[0]), {key: y[0] for key, y in buffers_of(program, x[:1]).items()}, program.header.model)


def test_convolutions_gather_neighbours_without_a_buffer() -> None:
    for program, x in programs("mask r-cnn", "fqvit"):
        ran = {time.buffer: time.op for time in Engine(program, 1).profile(x[0], 1)}
        assert not [name for name in ran if name.partition("@")[0].endswith((".rows", ".squares")) and "conv" in name]
        if program.header.input is None:
            assert ran["rpn_head.relu"] == ran["neck.output.2"] == "take + linear"


def test_outputs_inside_fused_ops_are_still_returned() -> None:
    program, x = programs("mask r-cnn", "fqvit")[0]
    kinds: dict[str, Any] = {"neck.lateral.0": "scores", "neck.lateral.3": "map", "neck.add.1": "map", "rpn_head.relu": "map"}
    others = tuple(Output(name, kind, 1.0) for name, kind in kinds.items())
    more = Program(msgspec.structs.replace(program.header, others=(*program.header.others, *others)), program.constants)
    buffers = buffers_of(program, x)
    for output, y in zip(more.header.outputs, Engine(more, 1).run_all(x), strict=True):
        assert_same(y, buffers[output.buffer], output.buffer)


@every_pair
def test_buffers_stay_in_proved_ranges_and_torch_gives_the_same_bits(name: str, recipe: str) -> None:
    for program, x in programs(name, recipe):
        verified, buffers = program.verify(), buffers_of(program, x)
        assert all(proof.holds for proof in verified.proofs) and verified.proofs
        for key, y in buffers.items():
            value = verified.buffers[key]
            assert y.shape[1:] == value.shape and value.lo <= y.min() and y.max() <= value.hi, key
        assert_same(buffers_of(program, x, "torch"), buffers, program.header.model)


@every_pair
def test_simulation_and_program_have_equal_codes_at_every_site(name: str, recipe: str) -> None:
    for model, calibration, x in parts(name, recipe):
        program, values = lower_with_values(model, calibration)
        for site in compared_sites(model, calibration, values, buffers_of(program, x), x):
            if site.q is None and calibration.recipe.mult == "short":
                continue  # accumulators have a finer unit than 16-bit multipliers can reproduce
            wrong = site.codes != site.found
            if site.q is not None and calibration.recipe.mult == "short" and site.node.leaf.role == "context":
                # A few tokens with equal weights make many ties, which 16-bit multipliers break differently.
                fraction = (site.real / torch.from_numpy(site.q.channel_scales(site.real.shape[-1]))).numpy() % 1
                wrong &= np.abs(fraction - 0.5) > 1e-3
            assert wrong.sum() <= max(1, 0.01 * wrong.size), f"{model.name} {site.node.name}: {wrong.sum()} of {wrong.size}"
            assert np.abs(site.codes - site.found).max() <= 1, site.node.name


@pytest.mark.parametrize("recipe", SUPPORTED)
def test_programs_of_every_recipe_correlate_with_the_float_networks(recipe: str) -> None:
    detector, low = detector_of("mask r-cnn"), lowered("mask r-cnn", recipe)
    pixels = prepare(sample_images()[0], SETTINGS).pixels
    with torch.no_grad():
        images = torch.from_numpy(normalise_and_pad(pixels, SETTINGS))[None]
        exact = pyramid_model(detector, *images.shape[2:]).module(images)
    program = low.pyramid(*images.shape[2:])
    found = Reference(program).run_all(pad_pixels(pixels, SETTINGS)[None])
    for output, a, b in zip(program.header.outputs, found, exact, strict=True):
        real = (a.astype(np.float64) - output.zero) * output.scale
        assert real.shape == tuple(b.shape)
        assert np.corrcoef(real.ravel(), b.numpy().ravel())[0, 1] > (0.97 if recipe == "fqvit" else 0.8), output.buffer


def test_outputs_are_in_the_order_of_the_modules() -> None:
    low = lowered("mask r-cnn", "fqvit")
    pyramid = low.pyramid(64, 96).header
    assert [output.kind for output in pyramid.outputs] == ["map"] * 4 + ["scores"] * 5 + ["deltas"] * 5
    assert [output.buffer for output in pyramid.outputs[:4]] == [f"neck.output.{i}" for i in range(4)]
    assert [output.kind for output in low.boxes[0].header.outputs] == ["logits", "deltas"]
    assert [output.kind for output in low.masks[0].header.outputs] == ["scores"]
    assert pyramid.input is None and low.masks[0].input_shape == (14, 14, 16)


@pytest.mark.parametrize("recipe", ["fqvit", "npu"])
def test_a_relu_is_the_clamp_of_the_preceding_linear_op(recipe: str) -> None:
    for program, _ in programs("mask r-cnn", recipe):
        relus = [name for name, site in program.header.sites.items() if site.role == "relu"]
        assert relus and all(program.header.sites[name].zero == (0,) for name in relus)
        writers = {op.y: op for op in program.ops if isinstance(op, Linear)}
        for name in relus:
            assert (writers.get(name) or writers[f"{name}.four"]).y_zero == 0
        assert not any(site.role == "inner" for site in program.header.sites.values())


def test_padding_normalises_to_nearly_zero() -> None:
    pixels = np.full((40, 33, 3), 7, np.uint8)
    padded = pad_pixels(pixels, SETTINGS)
    assert padded.shape == (64, 64, 3) and (padded[:40, :33] == 7).all()
    assert padded[40:].reshape(-1, 3).min(0).tolist() == padded[:, 33:].reshape(-1, 3).max(0).tolist() == [124, 116, 104]
    assert np.abs(normalise_and_pad(padded, SETTINGS)[:, 40:]).max() < 0.01


def test_programs_survive_saving(tmp_path: Path) -> None:
    for i, (program, x) in enumerate(programs("cascade", "fqvit")):
        program.save(tmp_path / f"{i}.fqvit")
        again = Program.load(tmp_path / f"{i}.fqvit")
        assert again.fingerprint() == program.fingerprint() and again.header == program.header
        for a, b in zip(Engine(tmp_path / f"{i}.fqvit", 1).run_all(x), Reference(again).run_all(x), strict=True):
            assert_same(a, b, again.header.model)


def test_calibrations_survive_saving() -> None:
    found = calibrated("mask r-cnn", "fqvit")
    for one in (found.pyramid, *found.boxes, *found.masks):
        assert Calibration.from_json(one.to_json()).to_json() == one.to_json()
        assert (Calibration.from_json(one.to_json()).square is None) == (one is found.pyramid)


def head() -> Program:
    return lowered("mask r-cnn", "fqvit").boxes[0]


def with_outputs(*outputs: Any) -> Program:
    program = head()
    return Program(msgspec.structs.replace(program.header, others=outputs), program.constants)


def test_invalid_outputs_are_rejected() -> None:
    program = head()
    (deltas,) = program.header.others
    with pytest.raises(FqvitError, match="'deltas' is listed as an output twice"):
        with_outputs(deltas, deltas).verify()
    with pytest.raises(FqvitError, match="output: no op writes 'nothing'"):
        with_outputs(msgspec.structs.replace(deltas, buffer="nothing")).verify()
    with pytest.raises(FqvitError, match="'deltas' is i32, expected u8"):
        with_outputs(msgspec.structs.replace(deltas, kind="map")).verify()
    with pytest.raises(FqvitError, match=r"scores of shape \[20\], expected 3 axes"):
        with_outputs(msgspec.structs.replace(deltas, kind="scores")).verify()
    with pytest.raises(FqvitError, match="deltas with a zero point or alpha, expected neither"):
        with_outputs(msgspec.structs.replace(deltas, zero=3)).verify()


def test_inputs_of_another_shape_are_rejected() -> None:
    for run in (Reference(head()).run, Engine(head(), 1).run):
        with pytest.raises(FqvitError, match=r"expected uint8 \[N, 7, 7, 16\]"):
            run(np.zeros((1, 7, 8, 16), np.uint8))
    impossible = msgspec.structs.replace(head().header.input, shape=(7, 0, 16))  # type: ignore[type-var]
    with pytest.raises(FqvitError, match="empty or too large"):
        Program(msgspec.structs.replace(head().header, input=impossible), head().constants).verify()


def test_an_empty_batch_of_boxes_gives_empty_outputs() -> None:
    empty = np.zeros((0, 7, 7, 16), np.uint8)
    for outputs in (Reference(head()).run_all(empty), Engine(head(), 2).run_all(empty)):
        assert [x.shape for x in outputs] == [(0, 6), (0, 20)]


def test_exporters_reject_programs_that_read_codes(tmp_path: Path) -> None:
    from fqvit.export import c, vectors

    for export in (c.export, vectors.export):
        with pytest.raises(FqvitError, match=r"part of a detector.*does not support"):
            export(head(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    pytest.importorskip("onnx")
    from fqvit.export import onnx, qdq

    for export_file in (onnx.export, qdq.export):
        with pytest.raises(FqvitError, match=r"part of a detector.*does not support"):
            export_file(head(), tmp_path / "out.onnx")


@pytest.mark.parametrize(
    "recipe, found",
    [
        (load_recipe("ptq-vit"), "there is no integer program"),
        (msgspec.structs.replace(load_recipe("auto"), max_size=1000), "max_size needs the argument size_of"),
        (Recipe(name="mine", layer_bits={"no.such.layer": 4}), "'no.such.layer' matches no layer with weights"),
        (Recipe(name="mine", sites={"no.such.site": SiteRule(bits=8)}), "'no.such.site'"),
        (Recipe(name="mine", sites={"relu": SiteRule(range=(-1.0, 1.0))}), "but relu is never negative"),
        (Recipe(name="mine", sites={"pyramid": SiteRule(bits=10)}), "expected at most 8"),
    ],
)
def test_unsupported_recipes_are_rejected(recipe: Recipe, found: str) -> None:
    with pytest.raises(FqvitError, match=found):
        calibrate_detector(detector_of("mask r-cnn"), sample_images(), recipe)


def test_site_rules_apply_to_the_networks_that_have_such_sites() -> None:
    recipe = Recipe(name="mine", sites={"residual": SiteRule(bits=6), "relu": SiteRule(bits=7), "upsample*": SiteRule(bits=8)})
    # upsample writes the codes of the ReLU that follows it, so it has no site.
    with pytest.raises(FqvitError, match="'upsample"):
        calibrate_detector(detector_of("mask r-cnn"), sample_images(), recipe)
    recipe = msgspec.structs.replace(recipe, sites={"residual": SiteRule(bits=6), "relu": SiteRule(bits=7)})
    found = calibrate_detector(detector_of("mask r-cnn"), sample_images()[:1], recipe)
    assert list(found.pyramid.recipe.sites) == ["residual", "relu"] and list(found.boxes[0].recipe.sites) == ["relu"]
    assert all(q.bits == 7 for q in found.masks[0].sites.values())


def test_calibration_without_images_is_rejected() -> None:
    with pytest.raises(FqvitError, match="no calibration images"):
        calibrate_detector(detector_of("mask r-cnn"), [], load_recipe("fqvit"))


def test_the_calibration_of_a_head_is_rejected_for_a_pyramid() -> None:
    found = calibrated("mask r-cnn", "fqvit")
    with pytest.raises(FqvitError, match="calibrated for RoI features, expected images"):
        LoweredDetector(detector_of("mask r-cnn"), DetectorCalibration(found.boxes[0], found.boxes, found.masks))
