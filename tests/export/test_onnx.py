"""Tests of exported ONNX graphs: they contain no floats and match the reference bit for bit, per op and per network."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

onnx = pytest.importorskip("onnx", reason="needs the package onnx")
ort = pytest.importorskip("onnxruntime", reason="needs the package onnxruntime")

from fqvit.errors import FqvitError  # noqa: E402
from fqvit.export.onnx.writer import EMITTERS, export, model  # noqa: E402
from fqvit.ir.ops import LayerNorm, Mean  # noqa: E402
from fqvit.ir.program import AnyOp, Program  # noqa: E402
from fqvit.ir.value import Scope  # noqa: E402
from fqvit.lowering.lower import lower  # noqa: E402
from tests.factories import assert_same, buffers_of, calibration_of, float_model, images_for, one_thread  # noqa: E402, F401
from tests.ir.draw import STYLES, Draw  # noqa: E402
from tests.ir.test_ops import CASES  # noqa: E402
from tests.runtime.programs import program_with  # noqa: E402
from tests.runtime.wide import WIDE, accepted  # noqa: E402
from tests.runtime.wide_attention import WIDE_ATTENTION  # noqa: E402
from tests.runtime.wide_elementwise import ELEMENTWISE  # noqa: E402

INTEGERS = {"BOOL", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "UINT64"}
RECIPES = ("fq-vit", "fq-vit-8", "fqvit", "w4", "embedding", "minmax")
NETWORKS = [(kind, recipe) for kind in ("vit", "padded swin") for recipe in RECIPES]
NETWORKS += [("distilled", "fq-vit"), ("mean", "fqvit"), ("no class token", "fq-vit"), ("swin", "fqvit")]


def session(proto: Any) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def compare(program: Program, images: NDArray[np.uint8], name: str) -> None:
    """Compare all buffers and their types in ONNX Runtime with the reference."""
    expected = buffers_of(program, images)
    found = dict(zip(expected, session(model(program, buffers=True)).run(None, {"pixels": images}), strict=True))
    assert_same(found, expected, f"{name}: ONNX Runtime,")
    assert {key: x.dtype for key, x in found.items()} == {key: x.dtype for key, x in expected.items()}


@pytest.fixture(scope="module")
def programs() -> dict[tuple[str, str], Program]:
    made: dict[tuple[str, str], Program] = {}
    for kind, recipe in NETWORKS:
        source = float_model(kind)
        made[kind, recipe] = lower(source, calibration_of(source, recipe))
    return made


def test_every_op_has_an_emitter() -> None:
    missing = [op.__name__ for op in get_args(AnyOp) if op not in EMITTERS]
    assert missing == [], f"no ONNX emitter for {missing}. Add them to EMITTERS in export/onnx/writer.py."


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), style=st.sampled_from(STYLES))
@example(seed=162433, style="random")  # Linear with large negative accumulators: the offset exceeds int32
def test_every_op_matches_the_reference(kind: type, seed: int, style: str) -> None:
    draw = Draw(np.random.default_rng(seed), style)
    op = CASES[kind](draw)
    if all(proof.holds for proof in op.infer(Scope(draw.values, draw.constants, op.y))[1]):
        compare(*program_with(draw, op), f"{op}")


@pytest.mark.parametrize("kind", WIDE | WIDE_ATTENTION | ELEMENTWISE)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), style=st.sampled_from(STYLES))
def test_wide_ops_match_the_reference(kind: str, seed: int, style: str) -> None:
    draw = Draw(np.random.default_rng(seed), style)
    ops = (WIDE | WIDE_ATTENTION | ELEMENTWISE)[kind](draw)
    if accepted(draw, ops):
        compare(*program_with(draw, *ops), f"{ops}")


@pytest.mark.parametrize(("kind", "recipe"), NETWORKS)
def test_networks_match_the_reference_in_every_buffer_for_any_batch(
    programs: dict[tuple[str, str], Program], kind: str, recipe: str
) -> None:
    program = programs[kind, recipe]
    images = images_for(program.header.preprocess, 3)
    compare(program, images, f"{kind} {recipe}")
    run = session(model(program))
    for count in (1, 3):
        (logits,) = run.run(["logits"], {"pixels": images[:count]})
        assert_same(logits, buffers_of(program, images[:count])[program.header.output.buffer], f"{kind} {recipe}")


@pytest.mark.parametrize("features", ["tokens", "pooled"])
@pytest.mark.parametrize("recipe", ["fq-vit", "fqvit"])
def test_features_are_codes_in_an_output_named_after_their_kind(features: str, recipe: str) -> None:
    source = float_model("vit")
    program = lower(source, calibration_of(source, recipe, features=features))
    images = images_for(program.header.preprocess, 2)
    (codes,) = session(model(program)).run([features], {"pixels": images})
    expected = buffers_of(program, images)[program.header.output.buffer]
    assert_same(codes, expected, f"{features} {recipe}")
    assert codes.dtype == expected.dtype


def element_types(proto: Any) -> list[tuple[str, str]]:
    """Return the name and element type of every tensor, initializer and Cast attribute."""
    assert not proto.functions, "functions are not checked"
    name_of = onnx.TensorProto.DataType.Name
    found = []
    graph = proto.graph
    for info in (*graph.input, *graph.output, *graph.value_info):
        found.append((info.name, name_of(info.type.tensor_type.elem_type)))
    for tensor in graph.initializer:
        found.append((tensor.name, name_of(tensor.data_type)))
    assert not graph.sparse_initializer
    for node in graph.node:
        assert node.domain == "", f"{node.name}: domain {node.domain}"
        for attribute in node.attribute:
            kind = onnx.AttributeProto.AttributeType.Name(attribute.type)
            assert kind in ("INT", "INTS", "STRING"), f"{node.name}: attribute {attribute.name} is {kind}"
            if node.op_type == "Cast":
                found.append((f"{node.name} {attribute.name}", name_of(attribute.i)))
    return found


@pytest.mark.parametrize(("kind", "recipe"), NETWORKS)
def test_the_graph_contains_no_floats(programs: dict[tuple[str, str], Program], kind: str, recipe: str) -> None:
    proto = onnx.shape_inference.infer_shapes(model(programs[kind, recipe]), check_type=True, strict_mode=True, data_prop=True)
    types = element_types(proto)
    assert [(name, dtype) for name, dtype in types if dtype not in INTEGERS] == []
    known = {name for name, _ in types}
    unknown = [output for node in proto.graph.node for output in node.output if output not in known]
    assert unknown == [], f"no type was inferred for {unknown[:5]}"


def test_the_float_check_finds_floats() -> None:
    helper = onnx.helper
    node = helper.make_node("Cast", ["x"], ["y"], to=onnx.TensorProto.FLOAT)
    ends = [helper.make_tensor_value_info("x", onnx.TensorProto.INT32, [1])], [helper.make_empty_tensor_value_info("y")]
    proto = onnx.shape_inference.infer_shapes(helper.make_model(helper.make_graph([node], "g", *ends)), strict_mode=True)
    assert {name for name, dtype in element_types(proto) if dtype == "FLOAT"} == {"y", " to"}


@pytest.mark.parametrize(("kind", "recipe"), [("vit", "fq-vit"), ("padded swin", "fqvit")])
def test_the_evaluator_of_the_onnx_package_matches_the_reference(
    programs: dict[tuple[str, str], Program], kind: str, recipe: str
) -> None:
    from onnx.reference import ReferenceEvaluator

    program = programs[kind, recipe]
    images = images_for(program.header.preprocess, 2)
    expected = buffers_of(program, images)
    found = ReferenceEvaluator(model(program, buffers=True, plain_tables=True)).run(None, {"pixels": images})
    assert_same(dict(zip(expected, found, strict=True)), expected, f"{kind} {recipe}: ReferenceEvaluator,")


def test_buffers_keep_their_names_and_shapes(programs: dict[tuple[str, str], Program]) -> None:
    program = programs["vit", "fqvit"]
    graph = model(program).graph
    assert [x.name for x in graph.input] == ["pixels"] and [x.name for x in graph.output] == ["logits"]
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N"
    written = {output for node in graph.node for output in node.output}
    assert {op.y for op in program.ops} <= written
    assert {op.y for op in program.ops} <= {info.name for info in graph.value_info}


def test_a_file_has_the_documented_versions_and_write_errors_are_reported(
    programs: dict[tuple[str, str], Program], tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    export(programs["vit", "fqvit"], path)
    proto = onnx.load(path)
    assert (proto.opset_import[0].version, proto.ir_version) == (21, 10)
    with pytest.raises(FqvitError, match="cannot be written"):
        export(programs["vit", "fqvit"], tmp_path / "none" / "m.onnx")


def test_the_widest_layernorm_that_verifies_does_not_overflow() -> None:
    channels = 127 * 127 - 1
    op = LayerNorm(y="y", x="x", epsilon=1, shift=30, b_shift=0, zero=15)
    draw = Draw(np.random.default_rng(0), "random")
    draw.buffer("x", (4, channels), 4)
    draw.buffers["x"][:, :2] = np.arange(channels) == 7  # rows 0 and 1: the largest t (see LayerNorm)
    draw.buffers["x"][:, 1] *= 15
    draw.buffers["x"][:, 2] = (np.arange(channels) % 2) * 15  # the largest variance
    draw.constants["y.affine"] = np.stack([np.full(channels, 64), np.full(channels, 2**30)]).astype(np.int32)
    compare(*program_with(draw, op), "widest layernorm")


def test_a_mean_near_the_largest_product_is_exact() -> None:
    draw = Draw(np.random.default_rng(0), "mixed")
    draw.buffer("x", (3, 3), 16)
    draw.constants["alpha"] = np.full(3, 14, np.uint8)
    for mult, shift, y_zero in ((2**31 - 1, 54, 128), (2**31 - 1, 62, 0), (2**30, 53, 255)):
        op = Mean(y="y", x="x", mult=mult, shift=shift, zero=2**15, alpha="alpha", y_zero=y_zero)
        compare(*program_with(draw, op), f"{op}")


def test_isqrt_is_exact_around_squares() -> None:
    from onnx import TensorProto, helper

    from fqvit.export.onnx.fixed import isqrt
    from fqvit.export.onnx.graph import OnnxGraph
    from fqvit.ir.program import Verified

    graph = OnnxGraph(Program(None, {}), Verified({}, ()))  # type: ignore[arg-type]
    ends = [helper.make_tensor_value_info("x", TensorProto.INT64, ["n"])]
    out = [helper.make_tensor_value_info(isqrt(graph, "x"), TensorProto.INT64, ["n"])]
    proto = helper.make_graph(graph.nodes, "isqrt", ends, out, list(graph.initializers.values()))
    run = session(helper.make_model(proto, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    rng = np.random.default_rng(0)
    roots = np.concatenate([rng.integers(2**30, 2**31, 200_000), 2**30 + np.arange(1000), 2**31 - 1 - np.arange(1000)])
    for offset in (0, -1, 1, "last"):
        x = roots * roots + (2 * roots if offset == "last" else offset)
        x, expected = x[x >= 2**60], (roots - (offset == -1))[x >= 2**60]
        assert_same(run.run(None, {"x": x})[0], expected, f"isqrt of squares {offset}")
