"""Small valid programs as plain JSON and arrays, one for every op, which tests change and write with a valid fingerprint.

with_op(case.op | {"shift": 63}, case.constants)      # the bytes of a file
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from fqvit.ir.program import AnyOp, Program
from fqvit.ir.value import Scope, Value
from tests.robustness.hostile.containers import Json, Tensors, fingerprint_of, packed

Array = np.ndarray[Any, Any]
Constants = dict[str, Array]
DTYPES = {"uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "int32": "I32", "int64": "I64", "float32": "F32"}
DTYPES |= {"uint32": "U32", "uint64": "U64", "bool": "BOOL"}
IMAGE = (4, 2, 3)
T, C = 4, 6
FAR = (-1, -(2**62), 2**62, -(2**62) - 1, 2**62 + 1, 2**63, 10**30)  # integers outside the range of every field


def i32(*values: int) -> Array:
    return np.array(values, np.int32)


def u8(*values: int) -> Array:
    return np.array(values, np.uint8)


def linear_parts(y: str, inputs: int = C, outputs: int = 5) -> Constants:
    w = (np.arange(outputs * inputs).reshape(outputs, inputs) % 9 - 4).astype(np.int8)
    parts = {"w": w, "bias": np.ones(outputs, np.int32), "mult": np.full(outputs, 2**30, np.int32)}
    return {f"{y}.{part}": array for part, array in parts.items()} | {f"{y}.shift": np.full(outputs, 33, np.uint8)}


RATIO: Json = {"mult": 2**30, "shift": 40}
EXPONENTIALS, CODES = i32(2**20, 2**10, 0), u8(15, 3, 0)
SCORES: Json = {"a": "h", "b": "h", "mult": 2**30, "shift": 40, "a_zero": 3, "b_zero": 4, "y_zero": 9}
UNIFORM: Json = {"op": "softmax", "x": "s", "mult": 2**40, "shift": 36}

# The ops before each case. They write these buffers: x, u8 [T, C]; h, u8 [2, 2, 2, 3]; s, log, relative and uniform, each u8
# [2, 2, 2, 2]; acc, i32 [T, C]; wide, u16 [T, C]. Cases may also use the constants row and token as operands.
BEFORE: list[Json] = [
    {"op": "permute", "y": "x", "x": "pixels", "view": [T, C], "perm": [0, 1]},
    {"op": "permute", "y": "h", "x": "x", "view": [2, 2, 2, 3], "perm": [0, 1, 2, 3]},
    {"op": "matmul", "y": "s", **SCORES},
    {"op": "log_softmax", "y": "log", "x": "s", "region": "region"},
    {"op": "row_codes", "y": "relative", "x": "s", "region": "region"},
    {"op": "linear", "y": "acc", "x": "x", "out": "acc"},
    {"op": "linear", "y": "wide", "x": "x", "bits": 16, "y_zero": 7},
    {**UNIFORM, "y": "uniform"},
]
SHARED: Constants = {
    "log.table": EXPONENTIALS,
    "relative.table": CODES,
    "uniform.table": EXPONENTIALS,
    "region": np.array([[0, 1], [1, 1]], np.uint8),
    "row": np.arange(C).astype(np.int16),
    "token": np.full((2, C), 9, np.uint8),
    "alpha": np.full(C, 2, np.uint8),
    "alphas": u8(0, 1, 2, 0, 1, 2),
    **linear_parts("acc", C, C),
    **linear_parts("wide", C, C),
}


X_TOKENS: Json = {"buffer": "x", "kind": "tokens", "scale": 1.0}  # an output that is valid after BEFORE


@dataclass(frozen=True)
class Case:
    """A valid op that writes `y`, and the constants that only it uses."""

    op: Json
    constants: Constants = field(default_factory=dict)


LINEAR: Json = {"op": "linear", "y": "y", "x": "x"}
PARTS = linear_parts("y")
WITHOUT_W = {name: array for name, array in PARTS.items() if name != "y.w"}
NORM = np.stack([np.full(C, 2**30), np.full(C, 2**20)]).astype(np.int32)
TERMS = [{"x": "acc", "mult": 2**10, "zero": 0}, {"x": "row", "mult": "mults", "zero": 3}]
CASES: dict[str, Case] = {
    "lookup": Case(
        {"op": "lookup", "y": "y", "x": "x", "alpha": "alphas", "y_zero": [1, 2, 3]},
        {"y.table": np.arange(256).astype(np.int16)},
    ),
    "lookup of codes": Case({"op": "lookup", "y": "y", "x": "x"}, {"y.table": np.arange(256).astype(np.uint8)}),
    "linear": Case(LINEAR | {"y_zero": 7}, PARTS),
    "linear to acc": Case(LINEAR | {"out": "acc"}, {name: PARTS[name] for name in ("y.w", "y.bias")}),
    "linear to i32": Case(LINEAR | {"out": "i32"}, PARTS),
    "linear, 4 bits": Case(
        LINEAR | {"group": 2},
        WITHOUT_W | {"y.w": np.full((5, 3), 0x8F, np.uint8), "y.exponent": np.tile(u8(0x40, 0x02), (5, 1))},
    ),
    "linear, shared": Case(LINEAR | {"weights_of": "acc"}, {k: v for k, v in linear_parts("y", C, C).items() if k != "y.w"}),
    "layernorm": Case(
        {"op": "layernorm", "y": "y", "x": "x", "epsilon": 9, "shift": 32, "b_shift": 10, "zero": 5, "alpha": "alpha"},
        {"y.affine": NORM},
    ),
    "layernorm, uncentered": Case(
        {"op": "layernorm", "y": "y", "x": "x", "epsilon": 9, "shift": 32, "b_shift": 10, "zero": 5, "center": False},
        {"y.affine": NORM},
    ),
    "add": Case(
        {"op": "add", "y": "y", "terms": TERMS, "shift": 20, "y_zero": 4, "y_alpha": "alpha"},
        {"mults": np.full(C, 2**12, np.int32)},
    ),
    "mean": Case({"op": "mean", "y": "y", "x": "x", "mult": 2**30, "shift": 33, "skip": 1, "zero": 5, "y_zero": 3}),
    "take": Case({"op": "take", "y": "y", "x": "x", "index": "index", "fill": 9}, {"index": i32(3, -1, 0)}),
    "permute": Case({"op": "permute", "y": "y", "x": "x", "view": [2, 2, 6], "perm": [1, 0], "shape": [12], "select": [1, 1]}),
    "concat": Case({"op": "concat", "y": "y", "xs": ["x", "token"]}),
    "matmul": Case(
        {"op": "matmul", "y": "y", **SCORES, "index": "places"},
        {"y.bias": np.ones((3, 2), np.int32), "places": np.array([[0, 1], [2, 0]], np.uint16)},
    ),
    "matmul, per head": Case(
        {"op": "matmul", "y": "y", **SCORES, "mult": "mults", "index": "places"},
        {"mults": i32(2**30, 2**29), "y.bias": np.ones((3, 2), np.int32), "places": np.array([[0, 1], [2, 0]], np.int32)},
    ),
    "matmul of rows": Case({"op": "matmul", "y": "y", **SCORES, "a": "s", "b_rows": True}),
    "log_softmax": Case({"op": "log_softmax", "y": "y", "x": "s", "region": "region"}, {"y.table": EXPONENTIALS}),
    "softmax": Case({**UNIFORM, "y": "y", "region": "region"}, {"y.table": EXPONENTIALS}),
    "row_codes": Case({"op": "row_codes", "y": "y", "x": "s", "region": "region"}, {"y.table": CODES}),
    "shift_matmul": Case(
        {"op": "shift_matmul", "y": "y", "a": "log", "v": "h", "mult": 2**30, "shift": 40, "v_zero": 5, "zero_code": True}
        | {"y_zero": 3}
    ),
    "attend": Case(
        {"op": "attend", "y": "y", "a": "relative", "v": "h", "mult": 2**28, "shift": 30, "levels": list(range(16))}
        | {"v_zero": 5, "y_zero": 3}
    ),
    "multiply": Case({"op": "multiply", "y": "y", "a": "x", "b": "wide", **RATIO, "a_zero": 3, "b_zero": 4, "y_zero": 9}),
    "rotary": Case(
        {"op": "rotary", "y": "y", "x": "x", "partner": "partner", **RATIO, "zero": 5, "y_zero": 9},
        {"y.table": np.arange(2 * T * 3).reshape(2, T, 3).astype(np.int16) * 400, "partner": i32(1, 0, 2)},
    ),
    "depthwise": Case(
        {"op": "depthwise", "y": "y", "x": "x", "index": "taps", "fill": 9, "y_zero": 7},
        linear_parts("y", C, C) | {"y.w": linear_parts("y", C, 2)["y.w"], "taps": np.array([[3, -1], [0, 2]], np.int32)},
    ),
    "max": Case({"op": "max", "y": "y", "x": "h"}),
    "linear, 6 bits": Case(LINEAR | {"width": 6}, WITHOUT_W | {"y.w": np.tile(u8(0x20, 0xF8, 0x7F, 0xA5, 0x03), (5, 1))}),
    "linear, 5 bits in groups": Case(
        LINEAR | {"width": 5, "group": 4},
        WITHOUT_W | {"y.w": np.tile(u8(0xF0, 0x8F, 0x31, 0x2A), (5, 1)), "y.exponent": np.full((5, 1), 0x30, np.uint8)},
    ),
    "linear, codebooks": Case(
        LINEAR | {"group": 2, "codebooks": 2},
        WITHOUT_W
        | {"y.w": np.tile(u8(0x80, 0xF7, 0x31), (5, 1)), "y.choice": np.tile(u8(0x01, 0x01), (5, 1))}
        | {"y.codebooks": np.stack([np.arange(-128, 128, 16), np.arange(-8, 8) ** 2 * 2 - 1]).astype(np.int8)},
    ),
    "linear, codebooks of 3 bits": Case(
        LINEAR | {"width": 3, "group": 5, "codebooks": 1},
        WITHOUT_W
        | {"y.w": np.tile(u8(0x88, 0xC6, 0x02), (5, 1)), "y.choice": np.zeros((5, 1), np.uint8)}
        | {"y.codebooks": np.array([[-128, -50, -9, -1, 0, 9, 50, 127]], np.int8)},
    ),
}


def header_of(ops: list[Json], *outputs: Json, image: tuple[int, ...] = IMAGE) -> Json:
    preprocess = {"height": image[0], "width": image[1], "channels": image[2], "resize": 4, "interpolation": "bicubic"}
    preprocess |= {"mean": [0.5] * image[2], "std": [0.5] * image[2]}
    header = {"version": 1, "model": "test", "preprocess": preprocess, "ops": ops, "sites": {}, "recipe": {}, "source": ""}
    version = 2 if any("width" in op or "codebooks" in op for op in ops) else 1
    return header | {"version": version, "images": 1, "output": outputs[0], "others": list(outputs[1:])}


def tensors_of(constants: Constants) -> Tensors:
    little = {name: np.asarray(array, array.dtype.newbyteorder("<")) for name, array in constants.items()}
    return {name: (DTYPES[x.dtype.name], list(x.shape), x.tobytes()) for name, x in little.items()}


def file_of(header: Json | str, constants: Constants) -> bytes:
    """Return a file with a valid fingerprint. header: JSON, or its text"""
    text, tensors = header if isinstance(header, str) else json.dumps(header), tensors_of(constants)
    return packed(text, fingerprint_of(text, tensors), tensors)


def flattened(op: Json, constants: Constants, before: list[Json] = BEFORE) -> tuple[Json, Json]:
    """Return an op that flattens `y`, and the program output that reads it. `op` must be valid."""
    values = {"pixels": Value("u8", IMAGE, 0, 255)}
    for one in msgspec.convert([*before, op], list[AnyOp]):
        values[one.y], _ = one.infer(Scope(values, SHARED | constants, one.y))
    flat = {"op": "permute", "y": "flat", "x": "y", "view": [math.prod(values["y"].shape)], "perm": [0]}
    kind = "logits" if values["y"].dtype == "i32" else "pooled"
    return flat, {"buffer": "flat", "kind": kind, "scale": 1.0}


def with_op(op: Json, constants: Constants, case: Case | None = None) -> bytes:
    """Return a file with this op after the ops of BEFORE. case: the valid case from which `op` was derived"""
    return file_of(text_with(json.dumps(op), case or Case(op, constants)), SHARED | constants)


def text_with(op: str, case: Case) -> str:
    """Return the JSON of a program that contains an op, which is given as JSON text."""
    flat, output = flattened(case.op, case.constants)
    version = 2 if '"width"' in op or '"codebooks"' in op else 1
    header = header_of([*BEFORE, {"op": "HERE"}, flat], output) | {"version": version}
    return json.dumps(header).replace('{"op": "HERE"}', op)


def program_of(case: Case) -> Program:
    """Return a case as a program in memory."""
    from fqvit.ir.program import Header

    flat, output = flattened(case.op, case.constants)
    return Program(msgspec.convert(header_of([*BEFORE, case.op, flat], output), Header), SHARED | case.constants)
