"""Build a small program with cosine attention and RMS normalization by hand, from random weights.

It uses fields that the lowering rules of the first release never wrote: layernorm without centering, matmul with one
multiplier per head, and a bias whose index is i32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fqvit.data.preprocess import Preprocess
from fqvit.ir.attention import Attend, MatMul, RowCodes
from fqvit.ir.moves import Permute
from fqvit.ir.ops import LayerNorm, Linear, Mean
from fqvit.ir.program import INPUT, AnyOp, Header, Output, Program, Site

SIDE, PATCH, CHANNELS, HEADS, WIDTH, CLASSES = 12, 4, 16, 2, 8, 5
GRID = SIDE // PATCH
TOKENS = GRID * GRID
QKV_SCALE, NORM_SCALE, SCORE_SCALE = 0.02, 1 / 127, 20 / 255


def cosine() -> Program:
    rng = np.random.default_rng(21)
    constants: dict[str, np.ndarray[Any, Any]] = {}

    def linear(y: str, outputs: int, reach: float) -> None:
        """Draw weights; requantization scales an accumulator of `reach` to 1."""
        w = rng.integers(-127, 127, (outputs, CHANNELS), endpoint=True)
        constants[f"{y}.w"] = w.astype(np.int8)
        constants[f"{y}.bias"] = (-128 * w.sum(1)).astype(np.int32)
        constants[f"{y}.mult"] = np.full(outputs, round(2**37 / reach), np.int32)
        constants[f"{y}.shift"] = np.full(outputs, 37, np.uint8)

    def affine(y: str, gain: float, zero: int) -> dict[str, int]:
        """Add the constants of a norm whose gamma divided by its output scale is `gain`; return its shift and b_shift."""
        shift, b_shift = 40, 20
        g, b = np.full(WIDTH if y != "norm" else CHANNELS, round(gain * 2 ** (shift - 24))), zero << (shift - b_shift)
        constants[f"{y}.affine"] = np.stack([g, np.full_like(g, b)]).astype(np.int32)
        return {"shift": shift, "b_shift": b_shift}

    linear("qkv", 3 * CHANNELS, 2000)
    linear("head", CLASSES, 200)
    # Row and column offsets between every pair of positions on the grid.
    down, across = (np.arange(TOKENS) // GRID, np.arange(TOKENS) % GRID)
    offsets = [axis[:, None] - axis[None, :] + GRID - 1 for axis in (down, across)]
    constants["positions"] = (offsets[0] * (2 * GRID - 1) + offsets[1]).astype(np.int32)
    constants["scores.bias"] = rng.integers(-3000, 3000, ((2 * GRID - 1) ** 2, HEADS)).astype(np.int32)
    temperatures = np.array([10.0, 7.0])
    constants["scores.mult"] = np.round(temperatures * NORM_SCALE**2 / SCORE_SCALE * 2**37).astype(np.int32)
    constants["codes.table"] = np.round(15 * np.exp(-SCORE_SCALE * np.arange(256))).astype(np.uint8)

    view, perm = (TOKENS, 3, HEADS, WIDTH), (1, 0, 2)
    unit = 127 / np.sqrt(WIDTH)  # L2 normalization is RMS normalization divided by sqrt(WIDTH)
    ops: list[AnyOp] = [
        Permute(
            y="patches", x=INPUT, view=(GRID, PATCH, GRID, PATCH), perm=(0, 2, 1, 3), shape=(TOKENS, CHANNELS)
        ),
        Linear(y="qkv", x="patches", y_zero=128),
        *(Permute(y=name, x="qkv", view=view, perm=perm, select=(1, i)) for i, name in enumerate("qkv")),
        LayerNorm(y="q.norm", x="q", epsilon=64, zero=128, center=False, **affine("q.norm", unit, 128)),
        LayerNorm(y="k.norm", x="k", epsilon=64, zero=128, center=False, **affine("k.norm", unit, 128)),
        MatMul(
            y="scores", a="q.norm", b="k.norm", mult="scores.mult", shift=37, a_zero=128, b_zero=128,
            index="positions", y_zero=128,
        ),
        RowCodes(y="codes", x="scores"),
        Attend(
            y="context", a="codes", v="v", mult=round(2**32 / 15), shift=32, levels=tuple(range(16)), v_zero=128, y_zero=128
        ),
        Permute(y="joined", x="context", view=(HEADS, TOKENS, WIDTH), perm=(1, 0, 2), shape=(TOKENS, CHANNELS)),
        LayerNorm(y="norm", x="joined", epsilon=256, zero=128, center=False, **affine("norm", 30, 128)),
        Mean(y="mean", x="norm", mult=round(2**33 / TOKENS), shift=33, zero=128, y_zero=128),
        Linear(y="head", x="mean", out="i32"),
    ]  # fmt: skip
    sites = {
        "qkv": Site("qkv", 8, (QKV_SCALE,) * 3, (128,) * 3),
        "q.norm": Site("norm", 8, (NORM_SCALE,), (128,)),
        "k.norm": Site("norm", 8, (NORM_SCALE,), (128,)),
        "scores": Site("scores", 8, (SCORE_SCALE,), (128,)),
        "codes": Site("attention", 4, levels=tuple(range(16))),
        "joined": Site("context", 8, (QKV_SCALE,), (128,)),
        "norm": Site("norm", 8, (1 / 30,), (128,)),
        "mean": Site("norm", 8, (1 / 30,), (128,)),
    }
    header = Header(
        version=1, model="cosine", preprocess=Preprocess(SIDE, SIDE, 1, SIDE, "bilinear", (0.5,), (0.5,)),
        ops=tuple(ops), output=Output("head", "logits", 0.01), sites=sites, recipe={}, source="", images=1,
    )  # fmt: skip
    return Program(header, constants)
