"""Exports of programs with split MLPs, whose smaller part has layers with a single input or output, are bit-exact."""

from __future__ import annotations

from fqvit.export.onnx import model as onnx_model
from fqvit.lowering.lower import lower
from fqvit.quant.calibrate import calibrate
from fqvit.quant.recipe import RECIPES
from fqvit.runtime.onnx import Session
from fqvit.runtime.reference import run as reference
from tests.export.compiled import Builder
from tests.factories import assert_same, images_for
from tests.factories import one_thread as one_thread
from tests.quant.test_splitting import COUNT, model_with_outlier


def test_integer_exports_are_bit_exact(builder: Builder) -> None:
    model, _ = model_with_outlier()
    images = images_for(model.preprocess, COUNT)
    calibration = calibrate(model, [images], RECIPES["fqvit"])
    assert calibration.recipe.outliers
    program, few = lower(model, calibration), images[:4]
    wanted = reference(program, few)
    assert_same(Session(onnx_model(program).SerializeToString()).run(few), wanted, "ONNX")
    assert_same(builder.outputs(program, few), wanted, "C")
