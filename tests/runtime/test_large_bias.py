"""A bias of more than 65,536 rows, which needs an i32 index, gives the same scores in the engine and in exported ONNX."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fqvit.ir.attention import LogSoftmax, MatMul, ShiftMatMul
from fqvit.ir.program import Program
from tests.ir.draw import Draw
from tests.runtime.programs import compare_with_reference, program_with

ROWS = 2**16 + 3


@pytest.fixture
def case() -> tuple[Program, NDArray[np.uint8]]:
    draw = Draw(np.random.default_rng(3), "random")
    draw.buffer("q", (2, 5, 8))
    draw.buffer("k", (2, 7, 8))
    draw.buffer("v", (2, 7, 6))
    draw.constants["index"] = draw.rng.integers(ROWS - 9, ROWS - 1, (5, 7), endpoint=True).astype(np.int32)
    draw.constants["s.bias"] = np.zeros((ROWS, 2), np.int32)
    draw.constants["s.bias"][-9:] = draw.rng.integers(-(2**17), 2**17, (9, 2))
    draw.constants["a.table"] = np.round(2.0**16 * np.exp(-np.arange(256) / 40)).astype(np.int32)
    return program_with(
        draw,
        MatMul(y="s", a="q", b="k", mult=2**30, shift=40, a_zero=128, b_zero=128, index="index", y_zero=128),
        LogSoftmax(y="a", x="s"),
        ShiftMatMul(y="c", a="a", v="v", mult=2**30, shift=45, v_zero=128, y_zero=128),
    )


def test_the_engine_matches_the_reference(case: tuple[Program, NDArray[np.uint8]]) -> None:
    compare_with_reference(*case, "large bias")


def test_the_onnx_export_matches_the_reference(case: tuple[Program, NDArray[np.uint8]]) -> None:
    pytest.importorskip("onnxruntime", reason="needs the package onnxruntime")
    from tests.export.test_onnx import compare

    compare(*case, "large bias")
