"""Both loaders check every op: its inputs, its integers, its constants, and that nothing can overflow.

Accepted programs run, stay inside their code range, and give the same bits on every instruction set, fused or not.
See also: test_loader_fields.py (types of fields), tests/ir/test_verify.py (messages of Python's loader).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from fqvit.errors import FqvitError
from fqvit.ir.program import AnyOp
from tests.robustness.fuzz.oracle import verdicts
from tests.robustness.hostile import elementwise_limits, linear_limits
from tests.robustness.hostile.containers import Json
from tests.robustness.hostile.small_programs import (
    BEFORE,
    CASES,
    CODES,
    EXPONENTIALS,
    FAR,
    IMAGE,
    NORM,
    PARTS,
    SHARED,
    Array,
    C,
    Constants,
    file_of,
    header_of,
    i32,
    program_of,
    u8,
    with_op,
)
from tests.runtime.programs import compare_with_reference

IMAGES = np.full((2, *IMAGE), 77, np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.fqvit"


def assert_rejected(path: Path, name: str, changes: Json, constants: Constants | None = None, without: str = "") -> None:
    """Assert that both loaders reject a case with these changes, with a one-line error that names its op."""
    case = CASES[name]
    op = case.op | changes
    arrays = {key: array for key, array in (case.constants | (constants or {})).items() if key != without}
    path.write_bytes(with_op(op, arrays, case))
    found = verdicts(path)
    for error in (found.python, found.native):
        assert isinstance(error, FqvitError), (name, changes, constants)
        assert re.search(rf"x\.fqvit: (y:|ops\[{len(BEFORE)}\]|constant 'y|acc: constant 'acc.w' is)", str(error)), error


def test_every_op_has_a_program_that_is_accepted_and_runs() -> None:
    assert {case.op["op"] for case in CASES.values()} == {op.__struct_config__.tag for op in get_args(AnyOp)}
    for name, case in CASES.items():
        compare_with_reference(program_of(case), IMAGES, name, 2)


@pytest.mark.parametrize("name", CASES)
def test_missing_inputs_and_inputs_of_another_kind_are_rejected(name: str, path: Path) -> None:
    op = CASES[name].op
    for field in ("x", "a", "b", "v"):
        for value in ("none", "y", "flat", "", "row", "region", "y.table", "Pixels"):
            if field in op:
                assert_rejected(path, name, {field: value})
        if field in op and name not in ("take", "permute"):
            assert_rejected(path, name, {field: "acc"})
            assert_rejected(path, name, {field: "token"})
    for value in ("none", "y", "flat", "", "y.w"):
        if name == "concat":
            assert_rejected(path, name, {"xs": ["x", value]})
        if name == "add":
            for i in range(2):
                terms = [*op["terms"]]
                terms[i] = terms[i] | {"x": value}
                assert_rejected(path, name, {"terms": terms})


# {case: {field: integers outside its range}}
SHIFTS, BITS, ZERO = (0, 63, 64, 255, *FAR), (0, 17, 64, *FAR), (256, 2**16, *FAR)
SIDE, MULT = (2**16, *FAR), (2**31, *FAR)
RANGES: dict[str, dict[str, tuple[int, ...]]] = {
    "lookup": {"bits": BITS},
    "linear": {"bits": BITS, "y_zero": ZERO, "group": (1, 65537, *FAR), "codebooks": (1, 16, 17, *FAR)},
    "layernorm": {"epsilon": (0, 2**61 + 2**60 + 2**60, *FAR), "shift": SHIFTS, "b_shift": (33, 64, *FAR), "bits": BITS},
    "add": {"shift": (61, *SHIFTS), "bits": BITS, "y_zero": ZERO},
    "mean": {"mult": MULT, "shift": SHIFTS, "skip": (4, *FAR), "y_zero": ZERO, "bits": BITS, "zero": SIDE},
    "take": {"fill": ZERO},
    "matmul, per head": {"shift": SHIFTS, "a_zero": SIDE, "b_zero": SIDE, "y_zero": ZERO, "bits": BITS},
    "layernorm, uncentered": {"epsilon": (0, 2**62, *FAR), "shift": SHIFTS, "b_shift": (33, 64, *FAR), "bits": BITS},
    "matmul": {"mult": MULT, "shift": SHIFTS, "a_zero": SIDE, "b_zero": SIDE, "y_zero": ZERO, "bits": BITS},
    "log_softmax": {"bits": (0, 1, 5, *FAR)},
    "softmax": {"mult": (0, 2**58, *FAR), "shift": (0, 53, 63, *FAR), "bits": BITS},
    "shift_matmul": {"mult": MULT, "shift": SHIFTS, "v_zero": SIDE, "a_bits": (0, 1, 2, 3, 5, *FAR), "y_zero": ZERO}
    | {"bits": BITS},
    "attend": {"mult": (2**29, *FAR), "shift": SHIFTS, "v_zero": SIDE, "y_zero": ZERO, "bits": BITS},
    "multiply": {"mult": MULT, "shift": SHIFTS, "a_zero": SIDE, "b_zero": SIDE, "y_zero": ZERO, "bits": BITS},
    "rotary": {"mult": MULT, "shift": SHIFTS, "zero": SIDE, "y_zero": ZERO, "bits": BITS},
    "depthwise": {"fill": ZERO, "y_zero": ZERO, "bits": BITS},
    **linear_limits.RANGES,
}


@pytest.mark.parametrize("name", RANGES)
def test_integers_out_of_range_are_rejected(name: str, path: Path) -> None:
    for field, values in RANGES[name].items():
        for value in values:
            assert_rejected(path, name, {field: value})


NONE = np.zeros(0, np.uint8)
TWO = np.zeros((2, 2), np.int32)
# {op: {constant: arrays with a wrong type, shape or content}}
TABLES = (i32(0, 1), i32(1, -1), i32(2**31 - 1), EXPONENTIALS.astype(np.int64), CODES, TWO, NONE, np.array(1, np.int32))
ARRAYS: dict[str, dict[str, tuple[Array, ...]]] = {
    "lookup": {
        "y.table": (
            np.zeros(255, np.int16),
            np.zeros(257, np.int16),
            np.zeros((1, 256), np.int16),
            np.zeros(256, np.int8),
            i32(*[2**31 - 1] * 256),
            i32(*[-(2**31)] * 256),
        )
    },
    "lookup of codes": {"y.table": (np.zeros(255, np.uint8), np.zeros(256, np.int8), np.zeros(256, np.int16), NONE)},
    "linear": {
        "y.w": (np.zeros((5, C + 1), np.int8), np.zeros((0, C), np.int8), np.zeros(C, np.int8), np.zeros((5, C), np.uint8)),
        "y.bias": (
            np.ones(4, np.int32),
            np.ones(5, np.int64),
            np.full(5, 2**31 - 1, np.int32),
            np.full(5, -(2**31), np.int32),
            TWO,
        ),
        "y.mult": (np.ones(4, np.int32), np.full(5, -1, np.int32), np.full(5, 2**31, np.int64), np.ones(5, np.int16), NONE),
        "y.shift": (np.zeros(5, np.uint8), np.full(5, 63, np.uint8), np.full(5, -1, np.int8), np.ones(6, np.uint8), NONE),
    },
    "layernorm": {
        "y.affine": (
            np.ones((2, C + 1), np.int32),
            np.ones((1, C), np.int32),
            np.ones(2 * C, np.int32),
            np.ones((2, C), np.int64),
        )
    },
    "add": {"mults": (np.full(C, 2**30, np.int32), np.full(C, -1, np.int32), np.ones(C + 1, np.int32), np.ones(C, np.int64))},
    "take": {
        "index": (
            i32(4),
            i32(-2),
            i32(2**31 - 1),
            i32(-(2**31)),
            np.zeros(1, np.int64),
            np.zeros((0, 3), np.int32),
            np.zeros((1,) * 8, np.int32),
            NONE,
        )
    },
    "matmul": {
        "y.bias": (
            np.ones((3, 3), np.int32),
            np.ones((2, 2), np.int32),
            np.ones((0, 2), np.int32),
            np.ones(6, np.int32),
            np.full((3, 2), 2**31 - 1, np.int32),
            np.full((3, 2), -(2**31), np.int32),
        ),
        "places": (
            np.full((2, 2), 3, np.uint16),
            np.full((2, 3), 1, np.uint16),
            np.ones((2, 2), np.int16),
            np.ones((2, 2), np.int64),
            np.ones(4, np.uint16),
        ),
    },
    "matmul, per head": {
        "mults": (i32(1), i32(1, 2, 3), i32(1, -1), TWO, np.ones(2, np.int64), np.ones(2, np.uint16), NONE),
        "places": (np.full((2, 2), 3, np.int32), np.full((2, 2), -1, np.int32), np.full((2, 2), 2**31 - 1, np.int32)),
    },
    "log_softmax": {"y.table": TABLES},
    "softmax": {"y.table": TABLES},
    "row_codes": {"y.table": (EXPONENTIALS, CODES.astype(np.int8), CODES[None], NONE)},
    **linear_limits.ARRAYS,
    **elementwise_limits.ARRAYS,
}


@pytest.mark.parametrize("name", ARRAYS)
def test_constants_with_a_wrong_type_shape_or_content_are_rejected(name: str, path: Path) -> None:
    for constant, arrays in ARRAYS[name].items():
        for array in arrays:
            assert_rejected(path, name, {}, {constant: array})
        assert_rejected(path, name, {}, without=constant)


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("dtype", [np.float32, np.uint32, np.bool_])
def test_constants_that_are_not_integers_of_the_format_are_rejected(name: str, dtype: Any, path: Path) -> None:
    case = CASES[name]
    for constant in ARRAYS[name]:
        path.write_bytes(with_op(case.op, case.constants | {constant: case.constants[constant].astype(dtype)}, case))
        found = verdicts(path)
        assert "only integers may be in a program" in str(found.python) and "only integers" in str(found.native)


LISTS = ([1, 2, 3, 4, 5, 6, 7], [], [-1], [65536] * 3, "none", "region", "row", "y.w")
ALPHAS = {
    "high": np.full(C, 16, np.uint8),
    "long": np.zeros(C + 1, np.uint8),
    "signed": np.zeros(C, np.int8),
    "far": u8(*[255] * C),
}
REGIONS = {"a": np.zeros((2, 3), np.uint8), "b": np.zeros((3, 2), np.uint8), "c": np.zeros(4, np.uint8), "d": TWO}


def test_zero_points_and_multipliers_of_a_wrong_type_length_or_range_are_rejected(path: Path) -> None:
    for name, field in (("linear", "y_zero"), ("layernorm", "zero"), ("mean", "zero"), ("add", "y_zero"), ("take", "fill"),
                        ("depthwise", "fill"), ("depthwise", "y_zero")):  # fmt: skip
        for value in (*LISTS, "signed", "far"):
            more = {"signed": np.zeros(C, np.int8), "far": np.full(5 if name == "linear" else C, 256, np.uint16)}
            if (name, value) not in (("layernorm", "far"), ("mean", "far")):  # zero points of inputs may have 16 bits
                assert_rejected(path, name, {field: value}, more)
    for value in ([1, 2], [1, 2, 3, 4], [1, 2, 256], [-1, 2, 3], []):
        assert_rejected(path, "lookup", {"y_zero": value})
    terms = CASES["add"].op["terms"]
    for i in range(2):
        for field, values in (("zero", LISTS), ("mult", (2**30, -1, "none", "alpha", [1], "region"))):
            for value in values:
                changed = [*terms]
                changed[i] = terms[i] | {field: value}
                assert_rejected(path, "add", {"terms": changed})


def test_power_of_two_factors_and_regions_of_a_wrong_type_shape_or_content_are_rejected(path: Path) -> None:
    for alpha in (*ALPHAS, "none", "row", ""):
        for name, field in (("lookup", "alpha"), ("layernorm", "alpha"), ("mean", "alpha"), ("add", "y_alpha")):
            assert_rejected(path, name, {field: alpha}, ALPHAS)
        first, second = CASES["add"].op["terms"]
        assert_rejected(path, "add", {"terms": [first, second | {"alpha": alpha}]}, ALPHAS)
    for region in (*REGIONS, "none", ""):
        for name in ("log_softmax", "softmax", "row_codes"):
            assert_rejected(path, name, {"region": region}, REGIONS)


LEVELS = ([*range(15)], [*range(257)], [0] * 16, [2**15 + 1] * 16, [-1] * 16, [5] * 16, [*range(16, 0, -1)], [2**62] * 16)
VIEWS = ([2, 2, 5], [-2, -2, 6], [2**62, 2**62, 0], [2**40, 2**40], [0], [*[1] * 9, 24], [], [24, 1, 1, 1, 1, 1, 1, 1, 1])
MISMATCHES: list[tuple[str, Json]] = [
    *(("attend", {"levels": levels}) for levels in LEVELS),
    ("attend", {"levels": [7] * 16}),  # the masked code has a weight above 0
    *(("permute", {"view": view}) for view in VIEWS),
    *(("permute", {"perm": perm}) for perm in ([0, 0], [0, 2], [0, -1], [0], [0, 1, 2], [0, 2**62], [])),
    *(("permute", {"shape": shape}) for shape in ([11], [-12, -1], [2**62, 4], [0], [*[1] * 8, 12])),
    *(("permute", {"select": select}) for select in ([3, 0], [1, 2], [-1, 0], [1], [1, -1], [1, 1, 1], [2**62, 2**62], [])),
    ("matmul", {"b": "x"}),
    ("matmul", {"b": "log"}),
    ("matmul", {"a_zero": 65535, "b_zero": 65535}),
    ("matmul", {"a": "x", "b": "x"}),  # a bias needs heads
    ("matmul, per head", {"a": "x", "b": "x", "index": None}),  # multipliers per head need heads
    *(("matmul, per head", {"mult": mult}) for mult in ("none", "h", "region", "alpha", "", [2**30] * 2, None, True)),
    *(("layernorm, uncentered", {"center": center}) for center in (0, 1, None, "false", [])),
    ("shift_matmul", {"a": "h"}),
    ("shift_matmul", {"a": "wide"}),
    ("shift_matmul", {"zero_code": False}),
    ("attend", {"a": "log"}),
    ("attend", {"a": "uniform"}),
    ("attend", {"a": "s"}),
    ("attend", {"v": "wide"}),
    ("add", {"terms": [{"x": "row", "mult": 1}, {"x": "token", "mult": 1}]}),
    ("add", {"terms": [{"x": "acc", "mult": 1}, {"x": "token", "mult": 1}]}),
    ("add", {"terms": [{"x": "acc", "mult": 1}, {"x": "h", "mult": 1}]}),
    ("concat", {"xs": ["token"]}),
    ("concat", {"xs": []}),
    ("concat", {"xs": ["x", "wide"]}),
    ("concat", {"xs": ["x", "h"]}),
    ("concat", {"xs": ["x", "row"]}),
    ("mean", {"x": "h", "skip": 2}),
    ("log_softmax", {"x": "x"}),
    ("linear", {"x": "h"}),
    *linear_limits.MISMATCHES,
    *elementwise_limits.MISMATCHES,
    ("linear", {"out": "code"}),
    ("linear", {"out": "ACC"}),
]


@pytest.mark.parametrize("name, changes", MISMATCHES, ids=str)
def test_fields_that_do_not_match_each_other_or_their_inputs_are_rejected(name: str, changes: Json, path: Path) -> None:
    assert_rejected(path, name, changes)


def test_i32_outputs_that_exceed_31_bits_are_rejected(path: Path) -> None:
    shifts = {"y.shift": np.ones(5, np.uint8), "y.mult": np.full(5, 2**31 - 1, np.int32)}
    assert_rejected(path, "linear to i32", {}, shifts)


@pytest.mark.parametrize("name", ["shift_matmul", "attend"])
def test_permuted_attention_codes_are_rejected(name: str, path: Path) -> None:
    """attend: rows may lack the largest weight. shift_matmul: permuted codes are still masked, so zero_code must be True."""
    case = CASES[name]
    moved = {"op": "permute", "y": "moved", "x": case.op["a"], "view": [2, 2, 2, 2], "perm": [0, 1, 3, 2]}
    header = header_of([*BEFORE, moved, case.op | {"a": "moved", **({"zero_code": False} if name == "shift_matmul" else {})}],
                       {"buffer": "x", "kind": "tokens", "scale": 1.0})  # fmt: skip
    path.write_bytes(file_of(header, SHARED | case.constants))
    found = verdicts(path)
    for error in (found.python, found.native):
        assert isinstance(error, FqvitError) and "y: " in str(error)


def test_constants_and_fields_may_have_the_largest_allowed_values() -> None:
    """The engine and the reference agree on the largest values that every check allows."""
    extremes: list[tuple[str, Json, Constants]] = [
        ("linear", {"y_zero": 255}, {"y.w": np.full((5, C), -128, np.int8), "y.mult": np.full(5, 2**31 - 1, np.int32)}),
        ("linear", {}, {"y.shift": np.full(5, 62, np.uint8), "y.bias": np.full(5, 2**31 - 1 - 255 * 60, np.int32)}),
        ("layernorm", {"shift": 62, "b_shift": 30}, {"y.affine": np.full_like(NORM, 2**31 - 1)}),
        ("layernorm", {"epsilon": 2**61, "zero": 65535}, {}),
        ("mean", {"mult": 2**31 - 1, "shift": 1, "zero": 65535}, {}),
        ("matmul", {"mult": 2**31 - 1, "shift": 1}, {"y.bias": np.full((3, 2), -(2**30), np.int32)}),
        ("matmul, per head", {"shift": 1}, {"mults": i32(2**31 - 1, 0)}),
        ("layernorm, uncentered", {"epsilon": 2**61, "zero": 65535}, {}),
        ("layernorm, uncentered", {"shift": 62, "b_shift": 30}, {"y.affine": np.full_like(NORM, 2**31 - 1)}),
        ("softmax", {"mult": 2**58 - 1, "shift": 52}, {}),
        ("attend", {"mult": 2**29 - 1, "shift": 62, "levels": [*range(15), 2**15]}, {}),
        ("shift_matmul", {"mult": 2**31 - 1, "shift": 1, "v_zero": 0}, {}),
        ("lookup", {"y_zero": [255] * 3}, {"y.table": i32(*[2**30] * 256)}),
        ("take", {"fill": [255] * C}, {}),
        *elementwise_limits.EXTREMES,
    ]
    for name, changes, constants in extremes:
        case = CASES[name]
        changed = type(case)(case.op | changes, case.constants | constants)
        for images in (np.zeros((1, *IMAGE), np.uint8), np.full((1, *IMAGE), 255, np.uint8)):
            compare_with_reference(program_of(changed), images, f"{name} {changes}")
    assert set(PARTS) == {"y.w", "y.bias", "y.mult", "y.shift"}
