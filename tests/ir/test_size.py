"""Tests of the file size without class names: at most 7 % (tiny) or 3.5 % (small) above the size of the int8 weights."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from fqvit.lowering.lower import lower
from fqvit.models.config import ViTConfig
from fqvit.quant.calibrate import calibrate
from fqvit.quant.recipe import load_recipe
from tests.factories import model_of


def overhead(width: int, heads: int, folder: Path) -> float:
    """Return (size of the file) / (size of its int8 weights) - 1."""
    config = ViTConfig((224, 224), 16, 3, 1000, width, 12, heads, 4 * width)
    model = model_of(config, "vit", gain=0.5)
    images = np.random.default_rng(0).integers(0, 256, (2, 224, 224, 3), dtype=np.uint8)
    recipe = msgspec.structs.replace(load_recipe("fq-vit"), batch=2)
    program = lower(model, calibrate(model, [images], recipe))
    program.save(folder / "p.fqvit")
    weights = sum(array.nbytes for array in program.constants.values() if array.dtype == np.int8)
    return (folder / "p.fqvit").stat().st_size / weights - 1


@pytest.mark.slow
@pytest.mark.parametrize("name, width, heads, limit", [("tiny", 192, 3, 0.07), ("small", 384, 6, 0.035)])
def test_a_file_is_barely_larger_than_its_weights(name: str, width: int, heads: int, limit: float, tmp_path: Path) -> None:
    found = overhead(width, heads, tmp_path)
    assert found <= limit, f"{name}: {found:.2%}"
