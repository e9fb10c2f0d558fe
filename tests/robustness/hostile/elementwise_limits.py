"""Invalid and extreme constants and fields of multiply, rotary, depthwise and mean, for test_native_engine.py."""

from __future__ import annotations

import numpy as np

from tests.robustness.hostile.containers import Json
from tests.robustness.hostile.small_programs import Array, C, Constants, T, i32, u8

NONE = np.zeros(0, np.uint8)
# {op: {constant: arrays with a wrong type, shape or content}}
ARRAYS: dict[str, dict[str, tuple[Array, ...]]] = {
    "rotary": {
        "y.table": (
            np.zeros((2, T, 4), np.int16),
            np.zeros((2, T, 2), np.int16),  # the last axis is not the number of partners
            np.zeros((2, T + 1, 3), np.int16),
            np.zeros((1, T, 3), np.int16),
            np.zeros((2, T, 0), np.int16),
            np.zeros((2, T * 3), np.int16),
            np.zeros((2, T, 3), np.int32),
        ),
        "partner": (i32(0, 1), i32(0, 1, 3), i32(-1, 0, 1), i32(2**31 - 1, 0, 0), i32(-(2**31), 0, 0))
        + (np.zeros(3, np.int64), np.zeros(3, np.uint8), np.full(3, 65535, np.uint16), np.zeros((1, 3), np.int32), NONE),
    },
    "depthwise": {
        "y.w": (np.zeros((2, C + 1), np.int8), np.zeros((3, C), np.int8), np.zeros(C, np.int8), np.zeros((2, C), np.uint8))
        + (np.zeros((0, C), np.int8),),
        "y.bias": (np.ones(C - 1, np.int32), np.ones(C, np.int64), np.full(C, 2**31 - 1, np.int32))
        + (np.full(C, -(2**31), np.int32),),
        "y.mult": (np.ones(C - 1, np.int32), np.full(C, -1, np.int32), np.ones(C, np.int16), NONE),
        "y.shift": (np.zeros(C, np.uint8), np.full(C, 63, np.uint8), np.ones(C, np.int8), np.ones(C + 1, np.uint8), NONE),
        "taps": (
            i32(4, 0),
            i32(0, -2),
            i32(0, 2**31 - 1),
            i32(0, 0, 0),
            np.array(0, np.int32),
            np.zeros((1, 2), np.int64),
            np.zeros((0, 2), np.int32),
            np.zeros((2, 0), np.int32),
            NONE,
        ),
    },
}
# Fields that do not match each other or their inputs.
MISMATCHES: list[tuple[str, Json]] = [
    ("multiply", {"b": "h"}),
    ("multiply", {"a": "h"}),
    ("multiply", {"a": "wide", "b": "wide"}),  # the product may reach 2^32
    ("multiply", {"a_zero": 65535}),
    ("rotary", {"x": "h"}),
    ("rotary", {"partner": "taps"}),
    ("depthwise", {"x": "h"}),
    ("depthwise", {"index": "y.bias"}),
    ("depthwise", {"index": "none"}),
]
# The largest values that every check allows.
EXTREMES: list[tuple[str, Json, Constants]] = [
    ("multiply", {"mult": 2**31 - 1, "shift": 1, "b_zero": 0, "y_zero": 255}, {}),
    ("multiply", {"mult": 2**31 - 1, "shift": 62, "a_zero": 32767, "bits": 16, "y_zero": 65535}, {}),
    ("rotary", {"mult": 2**31 - 1, "shift": 31, "zero": 32767}, {"y.table": np.full((2, T, 3), -(2**15), np.int16)}),
    ("depthwise", {"y_zero": 255, "fill": 255}, {"y.w": np.full((2, C), -128, np.int8), "y.shift": u8(*[62] * C)}),
    ("mean", {"x": "h", "mult": 2**31 - 1, "shift": 1, "zero": 65535}, {}),
]
