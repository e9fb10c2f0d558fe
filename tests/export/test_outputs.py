"""Tests of programs with several outputs, and of outputs of every kind, in every export."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

onnx = pytest.importorskip("onnx", reason="needs the package onnx")
ort = pytest.importorskip("onnxruntime", reason="needs the package onnxruntime")

from fqvit.errors import FqvitError  # noqa: E402
from fqvit.export import c, qdq, vectors  # noqa: E402
from fqvit.export.c.plan import plan  # noqa: E402
from fqvit.export.onnx import export as onnx_export  # noqa: E402
from fqvit.export.onnx import model as onnx_model  # noqa: E402
from fqvit.ir.attention import Attend, LogSoftmax, RowCodes  # noqa: E402
from fqvit.ir.program import KINDS, CodeInput, Output, Program  # noqa: E402
from fqvit.lowering.lower import lower  # noqa: E402
from fqvit.quant.calibrate import calibrate  # noqa: E402
from fqvit.quant.recipe import load_recipe, with_bits  # noqa: E402
from fqvit.runtime.onnx import Session  # noqa: E402
from fqvit.runtime.outputs import unique_names  # noqa: E402
from fqvit.runtime.reference import Reference  # noqa: E402
from tests.captured import captured_program  # noqa: E402
from tests.export.backends import compare_backends, extended, possible_outputs, with_outputs, with_random_outputs  # noqa: E402
from tests.export.compiled import STRICT, Builder, outputs_of, sources  # noqa: E402
from tests.factories import assert_same, float_model, images_for, one_thread  # noqa: E402, F401
from tests.native.compilers import run, tool  # noqa: E402
from tests.runtime.test_networks import lowered  # noqa: E402
from tests.runtime.test_outputs import made  # noqa: E402
from tests.runtime.test_outputs import outputs_of as named_outputs  # noqa: E402

CAPTURED = ("features", "classifier", "hybrid")
TARGETS = ("ort", "openvino", "tensorrt")


def small(kind: str) -> Program:
    """Return a captured program, or the program of a small model made of leaf modules."""
    return captured_program(kind) if kind in CAPTURED else lowered(kind, "fqvit")[2]


def dequantized(program: Program, images: NDArray[np.uint8]) -> list[NDArray[np.float64]]:
    """Return the dequantized values of all outputs."""
    values = []
    for output, codes in zip(program.header.outputs, Reference(program).run_all(images), strict=True):
        alpha = 0 if output.alpha is None else program.constants[output.alpha].astype(np.float64)
        values.append((codes.astype(np.float64) - output.zero) * output.scale * np.exp2(alpha))
    return values


@pytest.mark.parametrize("kind", [*CAPTURED, "vit", "padded swin"])
@pytest.mark.parametrize("seed", range(4))
def test_random_outputs_have_the_same_bits_on_every_backend(kind: str, seed: int, builder: Builder, tmp_path: Path) -> None:
    program = with_random_outputs(extended(small(kind)), seed)
    images = images_for(program.header.preprocess, 2, 1)
    compare_backends(program, images, f"{kind} {seed}", builder, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_every_kind_and_type_have_the_same_bits_on_every_backend(
    kind: str, builder: Builder, tmp_path: Path
) -> None:
    program = extended(small("classifier"))
    images, buffers = images_for(program.header.preprocess, 3, 2), program.verify().buffers
    found = {buffers[one.buffer].dtype: one for one in possible_outputs(program) if one.kind == kind}
    assert set(found) == set(KINDS[kind][0])  # type: ignore[index]
    for dtype, one in found.items():
        compare_backends(with_outputs(program, one), images, f"{kind} {dtype}", builder, tmp_path)


@pytest.mark.parametrize("kind", ["vit", "padded swin", "features", "classifier"])
def test_named_outputs_have_the_same_bits_on_every_backend(kind: str, builder: Builder, tmp_path: Path) -> None:
    model, _, program = made(kind, "fqvit", named_outputs(kind))
    compare_backends(program, images_for(model.preprocess, 2, 1), kind, builder, tmp_path)


@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_8_bit_attention_with_curve_levels_has_the_same_bits_on_every_backend(
    kind: str, builder: Builder, tmp_path: Path
) -> None:
    model = float_model(kind)
    images = images_for(model.preprocess, 4)
    program = lower(model, calibrate(model, [images], with_bits(load_recipe("embedding"), "8/8/8")))
    levels = [op.levels for op in program.ops if isinstance(op, Attend)]
    assert levels and all(len(each) == 256 for each in levels)
    compare_backends(program, images[:2], kind, builder, tmp_path)


@pytest.mark.parametrize("name", ["embedding:l2", "embedding:sign", "tokens@0", "class@0:u8"])
@pytest.mark.parametrize("kind", ["vit", "features"])
def test_a_single_named_output_has_the_same_bits_on_every_backend(
    kind: str, name: str, builder: Builder, tmp_path: Path
) -> None:
    model, _, program = made(kind, "fqvit", (name,))
    compare_backends(program, images_for(model.preprocess, 2, 1), f"{kind} {name}", builder, tmp_path)


def test_a_program_whose_output_is_its_input_is_exported(builder: Builder, tmp_path: Path) -> None:
    program = captured_program("hybrid")
    header = msgspec.structs.replace(program.header, ops=(), sites={}, output=Output("pixels", "map", 1.0))
    images = images_for(program.header.preprocess, 2, 1)
    compare_backends(Program(header, {}), images, "pixels", builder, tmp_path)


def test_repeated_output_names_are_numbered() -> None:
    assert unique_names(["tokens", "embedding", "tokens", "tokens"]) == ("tokens", "embedding", "tokens.2", "tokens.3")
    assert unique_names(["tokens", "tokens.2", "tokens"]) == ("tokens", "tokens.2", "tokens.3")
    assert unique_names(["tokens", "tokens", "tokens.2"]) == ("tokens", "tokens.3", "tokens.2")


def test_onnx_outputs_are_named_and_described() -> None:
    program = captured_program("classifier")
    outputs = program.header.output, Output("norm", "tokens", 0.5, 3), Output("head.input", "embedding", 0.25, 7, name="class")
    model = onnx_model(with_outputs(program, *outputs))
    assert [one.name for one in model.graph.output] == ["logits", "tokens", "class"]
    assert [[d.dim_value for d in one.type.tensor_type.shape.dim[1:]] for one in model.graph.output] == [[5], [17, 24], [24]]
    facts = {one.key: one.value for one in model.metadata_props}
    assert json.loads(facts["fqvit.outputs"])[2] == {
        "name": "class", "kind": "embedding", "scale": 0.25, "zero": 7, "dtype": "u8", "shape": [24], "alpha": []
    }  # fmt: skip
    assert json.loads(facts["fqvit.output"])["kind"] == "logits"
    session = Session(model.SerializeToString())
    assert [one.name for one in session.outputs] == ["logits", "tokens", "class"] and session.output_shape == (5,)
    empty = session.run_all(images_for(program.header.preprocess, 1)[:0])
    assert [x.shape for x in empty] == [(0, 5), (0, 17, 24), (0, 24)]


def test_an_onnx_output_whose_name_is_taken_has_the_name_of_its_buffer() -> None:
    program = captured_program("classifier")
    swapped = Output("norm", "tokens", 0.5, name="head.input"), Output("head.input", "embedding", 0.5, name="norm")
    constant = Output("head", "embedding", 0.5, name="u8.0")
    model = onnx_model(with_outputs(program, *swapped, constant))
    assert [one.name for one in model.graph.output][:2] == ["norm", "head.input"]
    images = images_for(program.header.preprocess, 2, 1)
    session = Session(model.SerializeToString())
    assert [one.name for one in session.outputs] == ["head.input", "norm", "u8.0"]
    for found, wanted in zip(session.run_all(images), Reference(with_outputs(program, *swapped, constant)).run_all(images)):
        assert_same(found, wanted, "outputs")


def test_a_session_reads_files_of_version_0_1_0(tmp_path: Path) -> None:
    model = onnx_model(lowered("vit", "fqvit", "pooled")[2])
    kept = [one for one in model.metadata_props if one.key != "fqvit.outputs"]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    (found,) = Session(model.SerializeToString()).outputs
    assert (found.name, found.kind, found.dtype, found.shape) == ("pooled", "pooled", "u8", (24,))
    model.metadata_props.add(key="fqvit.outputs", value="[]")
    with pytest.raises(FqvitError, match="has no fqvit metadata"):
        Session(model.SerializeToString())


def qdq_outputs(model: Any, images: NDArray[np.uint8]) -> list[NDArray[np.float32]]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {"pixels": images}))


@pytest.mark.parametrize("kind", [*CAPTURED, "vit", "padded swin"])
@pytest.mark.parametrize("target", TARGETS)
def test_qdq_outputs_are_the_values_of_the_program(kind: str, target: Any) -> None:
    """Every buffer that can be an output is made an output. Most values differ only by float rounding."""
    program = small(kind)
    skipped = {op.y for op in program.ops if isinstance(op, LogSoftmax | RowCodes)}
    buffers = {one.buffer: one for one in possible_outputs(program) if one.buffer not in skipped}
    program = with_outputs(program, *buffers.values())
    images = images_for(program.header.preprocess, 4, 1)
    model, _ = qdq.build(program, target, "log2")
    onnx.checker.check_model(model, full_check=True)
    found, wanted = qdq_outputs(model, images), dequantized(program, images)
    for one, x, y in zip(program.header.outputs, found, wanted, strict=True):
        assert x.dtype == np.float32 and x.shape == y.shape
        agreement = np.corrcoef(x.ravel(), y.ravel())[0, 1]
        # Float rounding moves a few codes by one step. openvino and tensorrt keep 16-bit sites in float, where nothing is
        # rounded or clipped.
        assert agreement > (0.9995 if target == "ort" else 0.99), f"{one.buffer}: correlation {agreement}"


@pytest.mark.parametrize("kind", ["vit", "padded swin", "features"])
@pytest.mark.parametrize("target", TARGETS)
def test_qdq_named_outputs_are_the_values_of_the_program(kind: str, target: Any) -> None:
    model, _, program = made(kind, "fqvit", named_outputs(kind))
    images = images_for(model.preprocess, 4, 1)
    exported, _ = qdq.build(program, target, "log2")
    onnx.checker.check_model(exported, full_check=True)
    for one, x, y in zip(program.header.outputs, qdq_outputs(exported, images), dequantized(program, images), strict=True):
        if one.kind == "signs":
            assert np.array_equal(x, np.rint(x)) and x.min() >= 0 and x.max() <= 255
            same = np.unpackbits(x.astype(np.uint8)) == np.unpackbits(y.astype(np.uint8))
            assert same.mean() > (0.99 if target == "ort" else 0.95), one.name
        else:
            agreement = np.corrcoef(x.ravel(), y.ravel())[0, 1]
            assert agreement > (0.9995 if target == "ort" else 0.99), f"{one.name}: correlation {agreement}"


def test_qdq_outputs_are_named_like_those_of_the_program() -> None:
    program = captured_program("classifier")
    outputs = program.header.output, Output("norm", "tokens", 0.5, 3), Output("head.input", "embedding", 0.25, 7, name="class")
    model, _ = qdq.build(with_outputs(program, *outputs))
    assert [one.name for one in model.graph.output] == ["logits", "tokens", "class"]
    facts = {one.key: one.value for one in model.metadata_props}
    assert json.loads(facts["fqvit.outputs"])[2] == {"name": "class", "kind": "embedding"}
    assert [one.name for one in qdq.build(lowered("vit", "fqvit", "pooled")[2])[0].graph.output] == ["features"]
    taken = with_outputs(
        program, Output("norm", "tokens", 0.5, 3, name="head.input"), Output("head", "logits", 0.5, name="head")
    )
    model, _ = qdq.build(taken)
    onnx.checker.check_model(model, full_check=True)
    assert [one.name for one in model.graph.output] == ["head.input.output", "head"]


def test_qdq_rejects_attention_codes_as_an_output() -> None:
    program = small("vit")
    codes = next(op.y for op in program.ops if isinstance(op, LogSoftmax | RowCodes))
    with pytest.raises(FqvitError, match=f"^{codes}: attention codes as an output, .* Export with --to onnx instead"):
        qdq.build(with_outputs(program, program.header.output, Output(codes, "map", 1.0)))


def test_every_export_rejects_programs_that_read_codes(tmp_path: Path) -> None:
    program = captured_program("hybrid")
    header = msgspec.structs.replace(program.header, input=CodeInput(program.input_shape, 1.0, 0))
    head = Program(header, program.constants)
    for export in (onnx_export, qdq.export, c.export, vectors.export):
        with pytest.raises(FqvitError, match=r"reads codes \(part of a detector\), which export .* does not support\.$"):
            export(head, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_c_header_describes_every_output(tmp_path: Path) -> None:
    program = small("vit")
    norm = next(one for one in possible_outputs(lowered("vit", "fq-vit")[2]) if one.alpha is not None)
    program = with_outputs(lowered("vit", "fq-vit")[2], program.header.output, norm, named("pool", "embedding", "class"))
    c.export(program, tmp_path / "c")
    text, code = (tmp_path / "c" / "model.h").read_text(), (tmp_path / "c" / "model.c").read_text()
    assert "void model_run(const uint8_t *pixels, uint8_t *arena, int32_t *out_logits, " in text
    assert "uint8_t *out_class);" in text and "FQVIT_OUTPUTS " not in text
    assert "#define FQVIT_OUTPUT_COUNT 3\n" in text and "#define FQVIT_OUTPUT_0_SIZE 5\n" in text
    assert f"#define FQVIT_OUTPUT_1_SCALE {norm.scale!r}\n" in text and f"_1_ZERO {norm.zero}\n" in text
    assert "/* output 2: class, embedding, u8 [24]; value = (code - 3) * 0.5 */" in text
    alpha = re.search(r"#define FQVIT_OUTPUT_1_ALPHA (\w+) ", text)
    assert alpha is not None and f"const uint8_t {alpha[1]}[24]" in (tmp_path / "c" / "weights.h").read_text()
    assert "if (out_class != NULL)" in code
    readme = (tmp_path / "c" / "README.txt").read_text()
    assert "logits, 5, then " in readme and "class (embedding): value = (code - 3) * 0.5" in readme


def named(buffer: str, kind: Any, name: str) -> Output:
    return Output(buffer, kind, 0.5, 3, name=name)


def test_make_builds_a_program_that_prints_all_outputs(builder: Builder, tmp_path: Path) -> None:
    program = with_outputs(small("vit"), small("vit").header.output, named("norm", "tokens", "tokens@1"))
    c.export(program, tmp_path / "c", prefix="mine")
    run(tool("make"), "-s", "-C", tmp_path / "c", f"CC={builder.command}", "CFLAGS=-O1")
    image = images_for(program.header.preprocess, 1, 1)
    (tmp_path / "image.rgb").write_bytes(image.tobytes())
    wanted = np.concatenate([x.ravel() for x in Reference(program).run_all(image)])
    assert run(tmp_path / "c" / "classify", tmp_path / "image.rgb").split() == [str(x) for x in wanted]
    sizes = run(tmp_path / "c" / "classify", "--sizes")
    assert "MINE_OUTPUT_0_SIZE 5\nMINE_OUTPUT_1_SIZE 240\n" in sizes


SOME = """\
#include <stdio.h>
#include <stddef.h>
#include "model.h"
static uint8_t pixels[FQVIT_PIXELS], arena[FQVIT_ARENA_BYTES], tokens[FQVIT_OUTPUT_1_SIZE];
int main(void)
{
    if (fread(pixels, 1, sizeof pixels, stdin) != sizeof pixels) return 1;
    model_run(pixels, arena, NULL, tokens);
    for (int i = 0; i < FQVIT_OUTPUT_1_SIZE; ++i) printf("%d\\n", tokens[i]);
    return 0;
}
"""


def test_outputs_that_a_caller_does_not_need_may_be_null(builder: Builder, tmp_path: Path) -> None:
    program = with_outputs(small("vit"), small("vit").header.output, named("norm", "tokens", "tokens"))
    c.export(program, tmp_path / "c")
    (tmp_path / "some.c").write_text(SOME)
    files = [tmp_path / "some.c", *sources(tmp_path / "c")]
    run(builder.command, *STRICT, *builder.sanitizers, "-I", tmp_path / "c", *files, "-o", tmp_path / "some")
    image = images_for(program.header.preprocess, 1, 1)
    assert_same(outputs_of([tmp_path / "some"], image)[0], Reference(program).run_all(image)[1].ravel(), "tokens")


def test_outputs_need_no_memory_of_their_own_in_the_arena(fmnist_vit: Program) -> None:
    """The residual stream stays at one offset although each block outputs it: it is copied before it is overwritten."""
    blocks = [op.y for op in fmnist_vit.ops if op.y.endswith(".add2")]
    several = with_outputs(fmnist_vit, fmnist_vit.header.output, *(Output(y, "tokens", 0.5) for y in blocks))
    alone, planned = (plan(one, one.verify()) for one in (fmnist_vit, several))
    assert len(blocks) > 2 and len({planned.allocations[y].offset for y in blocks}) == 1
    assert planned.arena_bytes == alone.arena_bytes
