"""Build a small random program with norms whose quotients have fewer than 24 fraction bits, as in norms of long rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from fqvit.data.preprocess import Preprocess
from fqvit.ir.moves import Permute
from fqvit.ir.ops import LayerNorm, Linear
from fqvit.ir.program import INPUT, Header, Output, Program

SIDE, CHANNELS, CLASSES = 6, 36, 5


def fraction() -> Program:
    """Return a program with two norms: one of every row, and one of all values as a single row, without centering."""
    rng = np.random.default_rng(31)
    shift, b_shift = 36, 20
    constants: dict[str, np.ndarray[Any, Any]] = {}
    for y, bits, size, middle in (("rows", 16, CHANNELS, 2**11), ("flat", 19, SIDE * SIDE * 3, 128)):
        g = rng.uniform(0.5, 1.5, size) * 2 ** (shift - bits) * middle / 4
        b = rng.uniform(0.8, 1.2, size) * middle * 2 ** (shift - b_shift)
        constants[f"{y}.affine"] = np.rint(np.stack([g, b])).astype(np.int32)
    w = rng.integers(-127, 128, (CLASSES, SIDE * SIDE * 3))
    constants |= {"head.w": w.astype(np.int8), "head.bias": (-128 * w.sum(1)).astype(np.int32)}
    constants |= {"head.mult": np.full(CLASSES, 2**30, np.int32), "head.shift": np.full(CLASSES, 32, np.uint8)}
    constants["alpha"] = rng.integers(0, 3, CHANNELS).astype(np.uint8)
    rows, flat = (SIDE * SIDE * 3 // CHANNELS, CHANNELS), (SIDE * SIDE * 3,)
    ops = (
        Permute(y="pixel rows", x=INPUT, view=rows, perm=(0, 1)),
        LayerNorm(
            y="rows", x="pixel rows", epsilon=40, shift=shift, b_shift=b_shift, zero=99, alpha="alpha", bits=12, fraction=16
        ),
        Permute(y="row", x="rows", view=flat, perm=(0,)),
        LayerNorm(y="flat", x="row", epsilon=9, shift=shift, b_shift=b_shift, zero=2**11, center=False, fraction=19),
        Linear(y="head", x="flat", out="i32"),
    )
    picture = Preprocess(SIDE, SIDE, 3, SIDE, "bilinear", (0.5,) * 3, (0.5,) * 3)
    header = Header(
        version=1, model="fraction", preprocess=picture, ops=ops, output=Output("head", "logits", 1.0),
        sites={}, recipe={}, source="", images=1,
    )  # fmt: skip
    return Program(header, constants)
