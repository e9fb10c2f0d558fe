"""Tests of ONNX exports with QuantizeLinear and DequantizeLinear (QDQ): codes equal those of the program up to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

import msgspec  # noqa: E402
import onnx  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from fqvit.errors import FqvitError  # noqa: E402
from fqvit.export.qdq import build, export  # noqa: E402
from fqvit.ir.program import Program  # noqa: E402
from fqvit.lowering.lower import lower  # noqa: E402
from fqvit.quant.recipe import Recipe, load_recipe, with_bits, with_profile  # noqa: E402
from fqvit.runtime.reference import run  # noqa: E402
from tests.factories import MODELS, calibration_of, float_model, images_for  # noqa: E402
from tests.golden.cosine import cosine  # noqa: E402
from tests.golden.fraction import fraction  # noqa: E402
from tests.golden.test_golden import HERE  # noqa: E402

TARGETS = ("ort", "openvino", "tensorrt")
STANDARD = {
    "Add", "Cast", "Clip", "Concat", "DequantizeLinear", "Div", "Exp", "Expand", "Floor", "Gather", "Gelu", "Greater",
    "Identity", "LayerNormalization", "Less", "Log", "MatMul", "Max", "Min", "Mul", "Pow", "QuantizeLinear", "ReduceMax",
    "ReduceMean", "ReduceSum", "Reshape", "Round", "Shape", "Softmax", "Sub", "Transpose", "Where",
}  # fmt: skip


def recipe(name: str) -> Recipe:
    plain, _, bits = name.partition("@")
    found = load_recipe(plain)
    return with_bits(found, bits) if bits else found


def made(kind: str, name: str | Recipe, **options: Any) -> tuple[Program, NDArray[np.uint8], NDArray[np.float64]]:
    """Return a program, images and the program's dequantized logits."""
    model = float_model(kind)
    program = lower(model, calibration_of(model, recipe(name) if isinstance(name, str) else name, **options))
    images = images_for(model.preprocess, 16, 3)
    return program, images, run(program, images) * program.header.output.scale


def logits(model: Any, images: NDArray[np.uint8], plain: bool = True) -> NDArray[np.float32]:
    """Run the model. plain: run every op as ONNX defines it; otherwise ONNX Runtime fuses ops into integer kernels"""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if plain:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: NDArray[np.float32] = session.run(None, {"pixels": images})[0]
    return found


def correlation(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", ["fqvit@8/8/8", "fq-vit-8", "minmax"])
def test_exports_of_8_bit_programs_reproduce_their_logits(kind: str, name: str) -> None:
    program, images, expected = made(kind, name)
    model, notes = build(program)
    onnx.checker.check_model(model, full_check=True)
    found = logits(model, images)
    assert correlation(found, expected) > 0.9995 and len(notes) == 1
    # Codes that round differently at a tie change a few logits; most logits are equal up to rounding.
    assert np.median(np.abs(found - expected)) < 0.01 * expected.std()


@pytest.mark.parametrize("target", TARGETS)
def test_uncentered_norms_and_multipliers_per_head_reproduce_the_logits(target: Any) -> None:
    program = cosine()
    images = images_for(program.header.preprocess, 16, 3)
    model, _ = build(program, target)
    onnx.checker.check_model(model, full_check=True)
    assert {node.op_type for node in model.graph.node} <= STANDARD | {"Sqrt"}
    expected = run(program, images) * program.header.output.scale
    assert correlation(logits(model, images), expected) > 0.999


@pytest.mark.parametrize("target", TARGETS)
def test_norms_with_fewer_fraction_bits_reproduce_the_logits(target: Any) -> None:
    program = fraction()
    images = images_for(program.header.preprocess, 16, 3)
    model, _ = build(program, target)
    expected = run(program, images) * program.header.output.scale
    found = logits(model, images)
    assert correlation(found, expected) > 0.999
    assert np.median(np.abs(found - expected)) < 0.01 * expected.std()


@pytest.mark.parametrize("kind", ["vit", "padded swin"])
@pytest.mark.parametrize("name", ["fqvit", "fq-vit", "fq-vit-original", "w4"])
def test_log2_attention_reproduces_the_codes_of_a_4_bit_program(kind: str, name: str) -> None:
    program, images, expected = made(kind, name)
    model, notes = build(program, "ort", "log2")
    found = logits(model, images)
    assert correlation(found, expected) > 0.999 and any("table" in note for note in notes)


@pytest.mark.parametrize("kind", ["vit", "swin"])
@pytest.mark.parametrize("target", TARGETS)
def test_every_target_approximates_the_program(kind: str, target: Any) -> None:
    program, images, expected = made(kind, "fqvit")
    model, _ = build(program, target)
    onnx.checker.check_model(model, full_check=True)
    assert correlation(logits(model, images), expected) > 0.97


def test_products_rotations_convolutions_and_pooling_reproduce_the_program() -> None:
    program = Program.load(HERE / "elementwise_v1.fqvit")
    images = images_for(program.header.preprocess, 16, 3)
    expected = run(program, images) * program.header.output.scale
    # tensorrt keeps most sites in float, where nothing is clipped.
    for target, least in (("ort", 0.9995), ("openvino", 0.9995), ("tensorrt", 0.95)):
        model, _ = build(program, target)  # type: ignore[arg-type]
        onnx.checker.check_model(model, full_check=True)
        assert {node.op_type for node in model.graph.node} <= STANDARD
        assert correlation(logits(model, images), expected) > least


@pytest.mark.parametrize("name", ["fqvit@8/8/8", "minmax"])
def test_integer_kernels_of_onnx_runtime_approximate_the_program(name: str) -> None:
    program, images, expected = made("distilled", name)
    assert correlation(logits(build(program)[0], images, plain=False), expected) > 0.99


@pytest.mark.parametrize("target", TARGETS)
def test_only_standard_ops_of_the_opset_are_used(target: Any) -> None:
    for kind, name in (("vit", "fqvit"), ("padded swin", "fq-vit")):
        model, _ = build(made(kind, name)[0], target, "log2")
        assert {node.op_type for node in model.graph.node} <= STANDARD
        assert {node.domain for node in model.graph.node} == {""} and len(model.functions) == 0
        assert [(one.domain, one.version) for one in model.opset_import] == [("", 21 if target == "ort" else 20)]


def test_target_tensorrt_uses_symmetric_int8_with_one_scale_per_activation() -> None:
    model, _ = build(made("vit", "fqvit")[0], "tensorrt")
    constants = {one.name: onnx.numpy_helper.to_array(one) for one in model.graph.initializer}
    quantizers = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert quantizers and all(constants[node.input[1]].shape == () for node in quantizers)
    zeros = [constants[node.input[2]] for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert all(zero.dtype == np.int8 and not zero.any() for zero in zeros)


def test_a_program_of_the_npu_profile_needs_no_coarser_scales_for_tensorrt() -> None:
    program, images, expected = made("vit", with_bits(with_profile(load_recipe("fqvit"), "npu"), "8/8/8"))
    model, notes = build(program, "tensorrt")
    assert not any("coarser" in note for note in notes)
    assert correlation(logits(model, images), expected) > 0.995


def test_weight_codes_equal_those_of_the_program() -> None:
    program = made("vit", "fqvit")[0]
    for target, middle in (("ort", 128), ("openvino", 0)):
        model, _ = build(program, target)  # type: ignore[arg-type]
        constants = {one.name: onnx.numpy_helper.to_array(one) for one in model.graph.initializer}
        codes = constants["blocks.0.mlp.fc1.w"].astype(int) - middle
        assert (codes.T == program.constants["blocks.0.mlp.fc1.w"]).all()
        assert constants["blocks.0.mlp.fc1.w.scale"].shape == (40,)


def test_feature_outputs_are_dequantized() -> None:
    model = float_model("vit")
    for kind in ("pooled", "tokens"):
        program = lower(model, calibration_of(model, "fqvit", features=kind))
        images = images_for(model.preprocess, 4, 3)
        output = program.header.output
        expected = (run(program, images).astype(float) - output.zero) * output.scale
        exported, _ = build(program, "ort", "log2")
        assert np.median(np.abs(logits(exported, images) - expected)) < output.scale / 100


def test_an_exported_file_accepts_any_batch_size(tmp_path: Path) -> None:
    program, images, _ = made("swin", "fqvit@8/8/8")
    notes = export(program, tmp_path / "model.onnx")
    assert "sites" in notes[0]
    model = onnx.load(tmp_path / "model.onnx")
    one_by_one = np.concatenate([logits(model, image[None]) for image in images[:3]])
    np.testing.assert_allclose(one_by_one, logits(model, images[:3]), atol=1e-4)
    assert {one.key: one.value for one in model.metadata_props}["fqvit.fingerprint"] == program.fingerprint()


def test_unknown_targets_attention_kinds_and_tables_are_rejected() -> None:
    program = made("mean", "fqvit")[0]
    with pytest.raises(FqvitError, match="expected one of ort, openvino, tensorrt"):
        build(program, "qnn")  # type: ignore[arg-type]
    with pytest.raises(FqvitError, match="expected auto, log2 or uniform"):
        build(program, "ort", "linear")  # type: ignore[arg-type]
    bare = Program(msgspec.structs.replace(program.header, sites={}), program.constants)
    with pytest.raises(FqvitError, match="lookup table of an unknown function"):
        build(bare)
