"""Invalid constants and fields of linear ops with packed or shared weights, for test_native_engine.py."""

from __future__ import annotations

import numpy as np

from tests.robustness.hostile.containers import Json
from tests.robustness.hostile.small_programs import FAR, Array, C, u8

NONE = np.zeros(0, np.uint8)
# {case: {field: integers outside its range}}
RANGES: dict[str, dict[str, tuple[int, ...]]] = {
    "linear, 4 bits": {"group": (1, 65537, *FAR), "bits": (0, 17, 64, *FAR), "width": (1, 3, 5, 6, 8, *FAR)},
    "linear, 6 bits": {"width": (1, 2, 3, 4, 5, 7, 8, *FAR), "group": (1, 65537, *FAR)},
    "linear, 5 bits in groups": {"width": (1, 2, 3, 4, 6, 7, 8, *FAR), "group": (1, 2, 65537, *FAR), "codebooks": (1, 4, 17)},
    "linear, codebooks": {
        "codebooks": (0, 1, 3, 16, 17, *FAR),
        "group": (0, 1, 3, 65537, *FAR),
        "width": (1, 2, 3, 5, 8, *FAR),
    },
    "linear, codebooks of 3 bits": {
        "codebooks": (0, 2, 17, *FAR),
        "group": (0, 1, 2, 65537, *FAR),
        "width": (0, 2, 4, 8, *FAR),
    },
}
# {case: {constant: arrays with a wrong type, shape or content}}
ARRAYS: dict[str, dict[str, tuple[Array, ...]]] = {
    "linear, 4 bits": {
        "y.w": (np.zeros((5, 4), np.uint8), np.zeros((5, 2), np.uint8), np.zeros((5, 3), np.int8), np.zeros(15, np.uint8)),
        "y.exponent": (
            np.full((5, 2), 0x05, np.uint8),
            np.full((5, 2), 0x50, np.uint8),
            np.full((5, 2), 0x10, np.uint8),  # a padding bit that is not 0
            np.zeros((5, 3), np.uint8),
            np.zeros((4, 2), np.uint8),
            np.zeros((5, 2), np.int8),
        ),
    },
    "linear, 6 bits": {
        "y.w": (
            np.tile(np.array([0, 0, 0, 0, 0x10], np.uint8), (5, 1)),  # a padding bit that is not 0
            np.tile(np.array([0, 0, 0, 0, 0x80], np.uint8), (5, 1)),
            np.zeros((5, 6), np.uint8),
            np.zeros((5, 4), np.uint8),
            np.zeros((5, 5), np.int8),
            np.zeros((5, C), np.int8),
            np.zeros((0, 5), np.uint8),
            NONE,
        ),
    },
    "linear, 5 bits in groups": {
        "y.w": (np.tile(np.array([0, 0, 0, 0x40], np.uint8), (5, 1)), np.zeros((5, 3), np.uint8)),
        "y.exponent": (np.full((5, 1), 0x04, np.uint8), np.full((5, 1), 0x40, np.uint8), np.zeros((5, 2), np.uint8), NONE),
    },
    "linear, codebooks": {
        "y.w": (np.zeros((5, 4), np.uint8), np.zeros((4, 3), np.uint8), np.zeros((5, 3), np.int8), np.zeros((5, C), np.int8)),
        "y.choice": (
            np.full((5, 2), 0x02, np.uint8),  # only two codebooks
            np.tile(u8(0x20, 0x00), (5, 1)),
            np.tile(u8(0x00, 0x10), (5, 1)),  # a padding bit that is not 0
            np.zeros((5, 3), np.uint8),
            np.zeros((4, 2), np.uint8),
            np.zeros((5, 2), np.int8),
            NONE,
        ),
        "y.codebooks": (
            np.zeros((2, 16), np.uint8),
            np.zeros((2, 16), np.int16),
            np.zeros((2, 8), np.int8),
            np.zeros((3, 16), np.int8),
            np.zeros((1, 16), np.int8),
            np.zeros((16, 2), np.int8),
            np.zeros(32, np.int8),
            np.zeros((0, 16), np.int8),
            np.zeros((1, 2, 16), np.int8),
            NONE,
        ),
    },
    "linear, codebooks of 3 bits": {
        "y.w": (np.tile(u8(0x88, 0xC6, 0x04), (5, 1)), np.tile(u8(0x88, 0xC6, 0x80), (5, 1)), np.zeros((5, 2), np.uint8)),
        "y.choice": (np.full((5, 1), 0x01, np.uint8), np.full((5, 1), 0x10, np.uint8), np.full((5, 1), 0xF0, np.uint8)),
        "y.codebooks": (np.zeros((1, 16), np.int8), np.zeros((1, 4), np.int8), np.zeros(8, np.int8)),
    },
}
MISMATCHES: list[tuple[str, Json]] = [
    ("linear, shared", {"weights_of": "y"}),
    ("linear, shared", {"weights_of": "x"}),
    ("linear, shared", {"weights_of": "none"}),
    ("linear, shared", {"x": "h"}),
    ("linear, shared", {"group": 2}),
    ("linear, 4 bits", {"group": 0}),
    ("linear", {"group": 2}),
    ("linear, shared", {"width": 6}),
    ("linear", {"width": 6}),
    ("linear, shared", {"group": 2, "codebooks": 2}),
    ("linear", {"group": 2, "codebooks": 2}),
    ("linear, 4 bits", {"codebooks": 2}),
    ("linear, 6 bits", {"codebooks": 2}),
    ("linear, codebooks", {"x": "h"}),
    ("linear, codebooks", {"weights_of": "acc"}),
]
