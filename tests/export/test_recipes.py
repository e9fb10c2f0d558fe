"""Recipes below 8 bits give the same bits on every backend: engine, ONNX Runtime, compiled C and golden vectors."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fqvit.lowering.lower import lower
from fqvit.quant.recipe import RECIPES, Recipe, with_bits, with_methods
from tests.export.backends import compare_backends
from tests.export.compiled import Builder
from tests.factories import calibration_of, float_model, images_for
from tests.factories import one_thread as one_thread

LOW = {
    "w6a6": RECIPES["w6a6"],
    "w4a4": RECIPES["w4a4"],
    "w4": RECIPES["w4"],
    # 6-bit attention codes whose levels lie on a curve, and GELU outputs that use 2^3 unevenly spaced values of a byte.
    "w6a6 5/3/6": with_methods(with_bits(RECIPES["w6a6"], "5/3/6")),
    # A different weight width per layer, as recipe auto chooses.
    "mixed": msgspec.structs.replace(RECIPES["w4"], layer_bits={"*.fc1": 6, "*.proj": 8, "*.qkv": 3}),
}


@pytest.mark.parametrize("kind", ["vit", "padded swin"])
@pytest.mark.parametrize("recipe", LOW.values(), ids=LOW)
def test_every_backend_gives_the_same_bits(kind: str, recipe: Recipe, builder: Builder, tmp_path: Path) -> None:
    model = float_model(kind)
    program = lower(model, calibration_of(model, recipe))
    compare_backends(program, images_for(model.preprocess, 4), f"{kind}, {recipe.name}", builder, tmp_path)
