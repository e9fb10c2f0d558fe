"""Draw attention in its general form: Q, K and V from separate buffers, fewer or more keys than queries, a separate width of V.

wide.py draws the common form: Q, K and V are parts of one buffer, and the heads are joined.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from fqvit.ir.attention import MatMul
from fqvit.ir.moves import Permute
from fqvit.ir.ops import Lookup
from fqvit.ir.program import AnyOp
from tests.ir.draw import IMAGES, Draw
from tests.runtime.wide import Case, log2_codes, mixed, relative, shift_to, size, uniform

Shape = tuple[int, ...]


def operand(draw: Draw, name: str, lead: Shape, heads: int, tokens: int, width: int) -> tuple[list[AnyOp], np.ndarray]:
    """Draw the ops that write an operand [..., H, T, D] of attention, and return them with its codes [N, W, H, T, D]."""
    n, shape, bits = len(lead), (*lead, heads, tokens, width), draw.one(8, 8, 6)
    kind = draw.one("part", "part", "split", "plain", "lookup", "transposed", "read twice")
    swapped = (*range(n), n + 1, n, n + 2)
    if kind in ("part", "read twice"):
        parts = draw.int(1, 3)
        part = draw.int(0, parts - 1)
        x = draw.buffers[draw.buffer(f"{name}.x", (*lead, tokens, parts * heads * width), bits)]
        view = (*lead, tokens, parts, heads, width)
        ops: list[AnyOp] = [Permute(y=name, x=f"{name}.x", view=view, perm=swapped, select=(n + 1, part))]
        codes = x.reshape(IMAGES, -1, tokens, parts, heads, width)[:, :, :, part].swapaxes(2, 3)
        if kind == "read twice":
            draw.constants[f"{name}.other.table"] = np.zeros(2**bits, np.uint8)
            ops.append(Lookup(y=f"{name}.other", x=name))
    elif kind == "split":
        x = draw.buffers[draw.buffer(f"{name}.x", (*lead, tokens, heads * width), bits)]
        ops = [Permute(y=name, x=f"{name}.x", view=(*lead, tokens, heads, width), perm=swapped)]
        codes = x.reshape(IMAGES, -1, tokens, heads, width).swapaxes(2, 3)
    elif kind == "transposed":
        x = draw.buffers[draw.buffer(f"{name}.x", (*lead, heads, width, tokens), bits)]
        ops = [Permute(y=name, x=f"{name}.x", view=(*lead, heads, width, tokens), perm=(*range(n + 1), n + 2, n + 1))]
        codes = x.reshape(IMAGES, -1, heads, width, tokens).swapaxes(3, 4)
    else:
        x = draw.buffers[draw.buffer(name if kind == "plain" else f"{name}.x", shape, bits)]
        codes, ops = x.reshape(IMAGES, -1, heads, tokens, width), []
        if kind == "lookup":
            table = draw.rng.integers(0, 255, 2**bits, endpoint=True).astype(np.uint8)
            draw.constants[f"{name}.table"] = table
            ops, codes = [Lookup(y=name, x=f"{name}.x")], table[codes]
    return ops, codes.astype(np.int64)


def attention(draw: Draw, softmax: Callable[..., Case]) -> Case:
    """Draw attention of M queries to T keys with heads of width D in Q and K, and of another width in V."""
    queries, tokens = size(draw, 1, 6, 17, 49), size(draw, 1, 8, 16, 33, 50)
    width, v_width = draw.one(1, 8, 16, 20, 33, 64), draw.one(1, 7, 16, 32, 40)
    heads, windows = draw.int(1, 3), draw.one(None, None, 1, 3)
    rare = draw.int(0, 11)
    if rare == 0:  # several blocks of queries
        queries, tokens, width, v_width, heads, windows = draw.one(252, 253, 505), draw.one(3, 9), 4, 3, draw.int(1, 2), None
    elif rare == 1:  # wide heads, as in attention over channels
        queries, tokens, width, v_width, windows = 7, draw.one(5, 17), draw.one(129, 196, 300), draw.one(129, 196), None
    lead = () if windows is None else (windows,)
    square = draw.int(0, 2) == 0
    queries = tokens if square else queries
    ops: list[AnyOp] = []
    codes = {}
    for name, rows, columns in (("q", queries, width), ("k", tokens, width), ("v", tokens, v_width)):
        made, codes[name] = operand(draw, name, lead, heads, rows, columns)
        ops += made
    zeros = [draw.one(0, 255, 128, 128, draw.int(0, 255)) for _ in range(3)]
    acc = np.einsum("nwhtd,nwhud->nwhtu", codes["q"] - zeros[0], codes["k"] - zeros[1])
    index = None
    if draw.int(0, 1):
        most = draw.one(0, 2**10, 2**20)
        draw.constants["s.bias"] = draw.integers(-most, most, (11, heads), "i32")
        index = draw.constant("index", 0, 10, (queries, tokens), draw.one("u16", "i32"))
        acc = acc + draw.constants["s.bias"][draw.constants[index]].transpose(2, 0, 1)
    mult = draw.one(draw.int(2**30, 2**31 - 1), draw.int(1, 2**16))
    shift = shift_to(draw, acc * mult, 8)
    if draw.int(0, 1):
        mult = draw.constant("mults", draw.one(0, mult // 2), mult, (heads,), "i32")
    scores = MatMul(
        y="s", a="q", b="k", mult=mult, shift=shift, a_zero=zeros[0], b_zero=zeros[1], index=index,
        y_zero=draw.one(0, 255, 128, 128), bits=draw.one(*[8] * 6, 16),
    )  # fmt: skip
    region = None
    if square and windows is not None:
        region = draw.one(None, draw.constant("region", 0, draw.one(1, 3), (windows, tokens), "u8"))
    codes_of = 2**scores.bits
    ops += [scores, *softmax(draw, tokens, codes_of, region, zeros[2])]
    last = ops[-1]
    if isinstance(last, MatMul) and draw.int(0, 1):  # the product with V may also have one multiplier per head
        assert isinstance(last.mult, int)
        draw.constant("v mults", last.mult // 2, last.mult, (heads,), "i32")
        ops[-1] = MatMul(**{field: getattr(last, field) for field in last.__struct_fields__} | {"mult": "v mults"})
    n, y = len(lead), (*lead, heads, queries, v_width)
    join = draw.one("joined", "joined", "absent", "transposed")
    if join == "joined":
        shape = (*lead, queries, heads * v_width)
        ops.append(Permute(y="y", x="c", view=y, perm=(*range(n), n + 1, n, n + 2), shape=shape))
    elif join == "transposed":
        ops.append(Permute(y="y", x="c", view=y, perm=(*range(n), n + 2, n, n + 1)))
    return tuple(ops)


WIDE_ATTENTION: dict[str, Callable[[Draw], Case]] = {
    "any attention, log2": partial(attention, softmax=log2_codes),
    "any attention, uniform": partial(attention, softmax=uniform),
    "any attention, relative": partial(attention, softmax=relative),
    "any attention, mixed": partial(attention, softmax=mixed),
}
