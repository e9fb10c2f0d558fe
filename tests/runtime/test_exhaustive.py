"""Tests of every runtime on all pairs of bytes: sums, products, means, tables, LayerNorm, softmax and attention.

The expected results are exact integers (tests/ir/exhaustive.py). See also: tests/export/test_c_exhaustive.py (C exports).
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.factories import buffers_of
from tests.ir.exhaustive import CASES, IMAGE, Case, check
from tests.runtime.programs import ISAS, engine_of

BY_CASE = pytest.mark.parametrize("name", CASES)


@cache
def case(name: str) -> Case:
    return CASES[name]()


@BY_CASE
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_reference_is_exact(name: str, library: str) -> None:
    found = buffers_of(case(name).program, IMAGE, library)
    check({key: x[0] for key, x in found.items()}, case(name).expected, f"{name}: {library}")


@BY_CASE
@pytest.mark.parametrize("isa", ISAS)
def test_the_engine_is_exact(name: str, isa: str) -> None:
    check(engine_of(case(name).program, isa=isa, keep=True).buffers(IMAGE[0]), case(name).expected, f"{name}: {isa}")


@BY_CASE
def test_onnx_runtime_is_exact(name: str) -> None:
    pytest.importorskip("onnx", reason="needs the package onnx")
    ort = pytest.importorskip("onnxruntime", reason="needs the package onnxruntime")
    from fqvit.export.onnx.writer import model

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    proto = model(case(name).program, buffers=True)
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    check(dict(zip(names, session.run(None, {"pixels": IMAGE}), strict=True)), case(name).expected, f"{name}: ONNX Runtime")
