"""Build a program with packed weights of every width, with and without groups. See also: make.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from fqvit.data.preprocess import Preprocess
from fqvit.ir.fixed import multiplier
from fqvit.ir.moves import Permute
from fqvit.ir.ops import Linear
from fqvit.ir.packing import pack_codes
from fqvit.ir.program import INPUT, Header, Output, Program
from tests.ir.exponents import pack

SIDE, CHANNELS, GROUP = 5, 27, 4  # 27 codes fill no whole number of bytes at any width; the last group is shorter


def widths() -> Program:
    """Return a chain of linear ops with weights of 2 to 7 bits, without and then with groups of 4; two ops reuse weights."""
    rng = np.random.default_rng(13)
    ops: list[Any] = [Permute(y="row", x=INPUT, view=(SIDE * SIDE,), perm=(0,))]
    constants: dict[str, Any] = {}
    x, inputs = "row", SIDE * SIDE
    for group in (0, GROUP):
        for width in range(2, 8):
            y, half = f"w{width}g{group}", 2 ** (width - 1)
            codes = rng.integers(-half, half, (CHANNELS, inputs), dtype=np.int8)
            if group:
                exponent = rng.integers(0, 9 - width, (CHANNELS, -(-inputs // group)), dtype=np.uint8)
                w = codes * (1 << exponent[:, np.arange(inputs) // group]).astype(np.int8)
                constants[f"{y}.w"], constants[f"{y}.exponent"] = pack(w, exponent, group, width)
            else:
                w, constants[f"{y}.w"] = codes, pack_codes(codes, width)
            ops.append(Linear(y=y, x=x, y_zero=128, group=group, width=width))
            add_requantizer(constants, y, w)
            x, inputs = y, CHANNELS
            if width == 6:
                ops.append(Linear(y=f"{y}.again", x=x, y_zero=128, group=group, width=width, weights_of=y))
                add_requantizer(constants, f"{y}.again", w)
                x = f"{y}.again"
    header = Header(
        version=2, model="widths", preprocess=Preprocess(SIDE, SIDE, 1, SIDE, "bilinear", (0.5,), (0.5,)),
        ops=tuple(ops), output=Output(x, "embedding", 1.0, 128), sites={}, recipe={"name": "widths"}, source="random sha256:0",
        images=1,
    )  # fmt: skip
    return Program(header, constants)


def add_requantizer(constants: dict[str, Any], y: str, w: np.ndarray[Any, Any], zero: int = 128, gain: float = 1.2) -> None:
    """Add a bias for the zero point of the inputs and multipliers that spread the outputs over the codes."""
    wide = w.astype(np.int64)
    constants[f"{y}.bias"] = (-zero * wide.sum(1)).astype(np.int32)
    pairs = [multiplier(gain / max(float(np.linalg.norm(row)), 1.0)) for row in wide]
    constants[f"{y}.mult"] = np.array([mult for mult, _ in pairs], np.int32)
    constants[f"{y}.shift"] = np.array([shift for _, shift in pairs], np.uint8)
