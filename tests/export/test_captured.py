"""Tests of exports of captured programs: integer ONNX and C are bit-exact.

Exports with QuantizeLinear and DequantizeLinear (QDQ) recognise the functions of lookup tables.
"""

from __future__ import annotations

import numpy as np
import pytest

from fqvit.export.onnx import model as onnx_model
from fqvit.export.qdq.functions import FUNCTIONS, Function, recognised
from fqvit.export.qdq.writer import build
from fqvit.runtime.native import Engine
from fqvit.runtime.onnx import Session
from fqvit.runtime.reference import run as reference
from tests.captured import captured_program
from tests.export.compiled import Builder
from tests.export.test_qdq import logits
from tests.factories import assert_same, images_for

KINDS = ("features", "classifier", "hybrid")


@pytest.mark.parametrize("kind", KINDS)
def test_integer_exports_are_bit_exact(kind: str, builder: Builder) -> None:
    program = captured_program(kind)
    images = images_for(program.header.preprocess, 4, 1)
    wanted = reference(program, images)
    assert_same(Engine(program).run(images), wanted, f"{kind}, native")
    assert_same(Session(onnx_model(program).SerializeToString()).run(images), wanted, f"{kind}, ONNX")
    assert_same(builder.outputs(program, images), wanted, f"{kind}, C")


@pytest.mark.parametrize("kind", KINDS)
def test_qdq_models_agree_with_the_program(kind: str) -> None:
    """The classifier uses quick GELU and the hybrid uses SiLU. Exporting either of them as GELU would give large errors."""
    program = captured_program(kind)
    images, output = images_for(program.header.preprocess, 4, 1), program.header.output
    scale = output.scale * (1.0 if output.alpha is None else np.exp2(program.constants[output.alpha].astype(float)))
    wanted = (reference(program, images).astype(float) - output.zero) * scale
    found = logits(build(program)[0], images)
    assert np.square(found - wanted).sum() < 0.01 * np.square(wanted).sum()


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_the_table_of_every_function_is_recognised(function: Function) -> None:
    x = (np.arange(256) - 128) * 0.05
    y = function.value(x)
    unit = float(y.max() - y.min()) / 4095  # 12 bits are enough to tell GELU from its tanh approximation
    zero = round(-float(y.min()) / unit)
    table = np.clip(np.floor(y / unit + 0.5).astype(np.int64) + zero, 0, 4095)
    assert recognised(table, x, unit, zero, 4095) is function
    assert recognised(4095 - table, x, unit, 4095 - zero, 4095) is None
