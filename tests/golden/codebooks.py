"""Build a program with codebooks of every width. See also: make.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from fqvit.data.preprocess import Preprocess
from fqvit.ir.moves import Permute
from fqvit.ir.ops import Linear
from fqvit.ir.packing import pack_codebooks
from fqvit.ir.program import INPUT, Header, Output, Program
from tests.golden.widths import add_requantizer

SIDE, CHANNELS = 5, 13
BOOKS = {2: 16, 3: 1, 4: 16, 5: 3, 6: 2, 7: 5}  # {width: number of codebooks}


def codebooks() -> Program:
    """Return a chain of linear ops with codebooks of 2 to 7 bits, then again with u16 activations; two ops reuse weights.

    Groups have 5 weights, so most end within a byte, and the last one is shorter.
    """
    rng = np.random.default_rng(17)
    ops: list[Any] = [Permute(y="row", x=INPUT, view=(SIDE * SIDE,), perm=(0,))]
    constants: dict[str, Any] = {}
    x, inputs, x_bits = "row", SIDE * SIDE, 8
    for bits in (8, 12):
        for width, books in BOOKS.items():
            y = f"w{width}b{bits}"
            levels = np.sort(rng.integers(-128, 128, (books, 2**width)), 1).astype(np.int8)
            choice = rng.integers(0, books, (CHANNELS, -(-inputs // 5)), dtype=np.uint8)
            w = levels[choice[:, np.arange(inputs) // 5], rng.integers(0, 2**width, (CHANNELS, inputs))]
            constants[f"{y}.w"], constants[f"{y}.choice"] = pack_codebooks(w, choice, levels, 5, width)
            constants[f"{y}.codebooks"] = levels
            for name in (y, f"{y}.again") if width == 6 else (y,):
                owner = None if name == y else y
                zero, fields = 2 ** (bits - 1), {"group": 5, "width": width, "codebooks": books, "weights_of": owner}
                ops.append(Linear(y=name, x=x, y_zero=zero, bits=bits, **fields))
                add_requantizer(constants, name, w, 2 ** (x_bits - 1), 1.2 * 2.0 ** (bits - x_bits))
                x, inputs, x_bits = name, CHANNELS, bits
    header = Header(
        version=2, model="codebooks", preprocess=Preprocess(SIDE, SIDE, 1, SIDE, "bilinear", (0.5,), (0.5,)),
        ops=tuple(ops), output=Output(x, "embedding", 1.0, 2**11), sites={}, recipe={"name": "codebooks"},
        source="random sha256:0", images=1,
    )  # fmt: skip
    return Program(header, constants)
