"""Every case of a small domain, whoever runs it: 256 x 256 requantizations, sums, products, rows of LayerNorm and softmax, and
every code of attention, against definitions in exact integers (tests/ir/exhaustive.py). C exports: tests/export/test_c.py."""

from __future__ import annotations

from functools import cache

import pytest

from fqvit.runtime.native import Engine
from tests.factories import buffers_of
from tests.ir.exhaustive import CASES, IMAGE, Case, check
from tests.runtime.programs import ISAS

BY_CASE = pytest.mark.parametrize("name", CASES)


@cache
def case(name: str) -> Case:
    return CASES[name]()


@BY_CASE
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_reference_is_exact_everywhere(name: str, library: str) -> None:
    found = buffers_of(case(name).program, IMAGE, library)
    check({key: x[0] for key, x in found.items()}, case(name).expected, f"{name}: {library}")


@BY_CASE
@pytest.mark.parametrize("isa", ISAS)
def test_the_engine_is_exact_everywhere(name: str, isa: str) -> None:
    check(Engine(case(name).program, isa=isa, keep=True).buffers(IMAGE[0]), case(name).expected, f"{name}: {isa}")


@BY_CASE
def test_onnx_is_exact_everywhere(name: str) -> None:
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
