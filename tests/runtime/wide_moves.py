"""Draw linear ops on gathered rows, as in convolutions, and after a lookup, as in MLPs. EVERY_WIDE lists all wide cases."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fqvit.ir.moves import Permute, Take
from fqvit.ir.ops import Linear, Lookup
from fqvit.ir.program import AnyOp
from tests.ir.draw import IMAGES, Draw
from tests.runtime.wide import WIDE, Case, linear_parts, size
from tests.runtime.wide_attention import WIDE_ATTENTION
from tests.runtime.wide_elementwise import ELEMENTWISE


def take_linear(draw: Draw) -> Case:
    """Draw a linear op on one or several gathered rows (9 in a convolution), with or without a reshape in between."""
    rows, channels, parts = draw.one(1, 2, 5, 23), size(draw, 1, 4, 8, 16, 33, 64, 256), draw.one(1, 1, 2, 4, 9)
    lead, outputs = draw.one((1,), (2,), (11,), (12,), (23,), (3, 7)), size(draw, 1, 8, 16, 25, 33)
    bits = draw.one(8, 8, 8, 5, 16)
    draw.buffer("x", (rows, channels), bits)
    fill = draw.zero("f", channels, bits)
    many = (*lead, parts) if parts > 1 else lead
    index = draw.rng.integers(-1, rows - 1, many, endpoint=True).astype(np.int32)
    draw.constants["index"] = index
    ops: list[AnyOp] = [Take(y="rows", x="x", index="index", fill=fill)]
    # These rows are used only to choose biases and shifts, so the contents of padded rows do not matter.
    found = draw.buffers["x"][:, index.clip(0)].reshape(IMAGES, -1, parts * channels)
    if parts > 1 or draw.int(0, 1):
        ops.append(Permute(y="squares", x="rows", view=(*lead, parts * channels), perm=tuple(range(len(lead) + 1))))
    y_bits, last = draw.one(1, 8, 8, 8, 16), ops[-1].y
    if draw.int(0, 2) == 0:
        linear_parts(draw, "m", found, outputs, 8)
        draw.constant("y.table", 0, 255, (256,), "u8")
        return (*ops, Linear(y="m", x=last), Lookup(y="y", x="m"))
    linear_parts(draw, "y", found, outputs, y_bits)
    return (*ops, Linear(y="y", x=last, y_zero=draw.zero("z", outputs, y_bits), bits=y_bits))


def mlp(draw: Draw) -> Case:
    """Draw linear, lookup and linear ops. The lookup has one table per alpha value; kernels may sort its channels by table."""
    lead, inner, hidden, outputs = (
        draw.one((1,), (5,), (13,), (26,)),
        size(draw, 4, 16, 64),
        size(draw, 4, 40, 96),
        draw.one(3, 16, 33),
    )
    draw.buffer("x", (*lead, inner))
    bits = draw.one(4, 8, 10, 10, 12)
    linear_parts(draw, "m", draw.buffers["x"], hidden, bits)
    draw.constant("h.table", -(2**9), 2**9, (2**bits,), "i16")
    alpha = draw.constant("alpha", 0, draw.one(0, 1, 3), (hidden,), "u8")
    zeros = tuple(draw.int(0, 255) for _ in range(int(draw.constants["alpha"].max()) + 1))
    # These codes are used only to choose biases and shifts.
    linear_parts(draw, "y", draw.rng.integers(0, 255, (IMAGES, *lead, hidden), endpoint=True), outputs, 8)
    return (
        Linear(y="m", x="x", y_zero=draw.zero("z", hidden, bits), bits=bits),
        Lookup(y="h", x="m", alpha=alpha, y_zero=zeros, bits=8),
        Linear(y="y", x="h", y_zero=draw.zero("yz", outputs, 8), bits=8),
    )


EVERY_WIDE: dict[str, Callable[[Draw], Case]] = WIDE | {"take + linear": take_linear, "mlp": mlp} | WIDE_ATTENTION | ELEMENTWISE
