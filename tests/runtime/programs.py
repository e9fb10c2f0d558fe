"""Turn one or several ops into a whole program, whose first ops compute the input buffers of the given ops from pixels.

The only input of a program is pixels. A code of up to 16 bits becomes a cell of four pixels: its low byte, then its high byte
three times; a linear op with the weights 1, 127, 127 and 2 recombines them. Accumulators are rows of a constant. See also:
tests/ir/draw.py.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fqvit import _native
from fqvit.data.preprocess import Preprocess
from fqvit.ir.attention import Attend, RowCodes
from fqvit.ir.moves import Concat, Permute, Take
from fqvit.ir.ops import Linear
from fqvit.ir.program import INPUT, AnyOp, CodeInput, Header, Output, Program, version_of
from fqvit.ir.value import Scope, Value
from fqvit.runtime.native import Engine
from tests.factories import assert_same, buffers_of
from tests.ir.draw import IMAGES, Draw

ISAS = tuple(_native.instruction_sets())
CELLS = 64  # cells per row of pixels
RECOMBINE = np.array([[1, 127, 127, 2]], np.int8)


def program_with(draw: Draw, *ops: AnyOp) -> tuple[Program, NDArray[np.uint8]]:
    """Return a program with these ops, preceded by ops that compute the drawn buffers, and the images for it."""
    constants, before, cells = dict(draw.constants), [], [np.zeros((IMAGES, 1), np.uint16)]
    for name, codes in draw.buffers.items():
        value = draw.values[name]
        if value.dtype == "i32":
            before += accumulator(name, codes[0], constants)
        elif any(isinstance(op, Attend) and op.a == name for op in ops):
            before += row_codes(name, codes, value, constants, cells)
        else:
            before += codes_from_cells(name, codes, value, constants, cells)
    values = np.concatenate(cells, 1)
    height = -(-values.shape[1] // CELLS)
    values = np.pad(values, ((0, 0), (0, height * CELLS - values.shape[1])))
    low, high = values & 255, values >> 8
    images = np.stack([low, high, high, high], -1).astype(np.uint8).reshape(IMAGES, height, 4 * CELLS, 1)
    split = Permute(y="cells", x=INPUT, view=(height * CELLS, 4), perm=(0, 1))
    return program_of((split, *before, *ops), constants, (height, 4 * CELLS, 1)), images


def program_of(ops: tuple[Any, ...], constants: dict[str, Any], image: tuple[int, int, int]) -> Program:
    """Return a program whose output is the flattened result of the last op."""
    values = {INPUT: Value("u8", image, 0, 255)}
    for op in ops:
        values[op.y], _ = op.infer(Scope(values, constants, op.y))
    last = values[ops[-1].y]
    flat = Permute(y="flat", x=ops[-1].y, view=(math.prod(last.shape),), perm=(0,))
    channels = image[2]
    header = Header(
        version=version_of(ops),
        model="test",
        preprocess=Preprocess(*image, 1, "bicubic", (0.5,) * channels, (0.5,) * channels),  # type: ignore[arg-type]
        ops=(*ops, flat),
        output=Output("flat", "logits" if last.dtype == "i32" else "pooled", 1.0),
        sites={},
        recipe={},
        source="",
        images=1,
    )
    return Program(header, constants)


def engine_of(program: Program, threads: int | None = None, **options: Any) -> Engine:
    """Return an engine. An input that cannot be a picture (more than 8192 rows, or 2 channels) is declared as codes."""
    height, width, channels = program.input_shape
    if channels not in (1, 3) or max(height, width) > 8192:
        picture = Preprocess(1, 1, 1, 1, "bicubic", (0.5,), (0.5,))
        codes = CodeInput(program.input_shape, 1.0, 0)
        program = Program(msgspec.structs.replace(program.header, preprocess=picture, input=codes), program.constants)
    return Engine(program, threads, **options)


def codes_from_cells(name: str, codes: Any, value: Value, constants: dict[str, Any], cells: list[Any]) -> list[AnyOp]:
    """Return ops that compute a buffer of codes from cells, and append these cells to `cells`."""
    n, first = math.prod(value.shape), sum(x.shape[1] for x in cells)
    cells.append(codes.reshape(IMAGES, n).astype(np.uint16))
    column = f"{name}.column"
    constants[f"{name}.rows"] = np.arange(first, first + n, dtype=np.int32)
    constants |= {f"{column}.w": RECOMBINE, f"{column}.bias": np.zeros(1, np.int32)}
    constants |= {f"{column}.mult": np.full(1, 2, np.int32), f"{column}.shift": np.ones(1, np.uint8)}
    return [
        Take(y=f"{name}.cells", x="cells", index=f"{name}.rows"),
        Linear(y=column, x=f"{name}.cells", bits=value.hi.bit_length()),
        Permute(y=name, x=column, view=(n,), perm=(0,), shape=value.shape),
    ]


def accumulator(name: str, x: Any, constants: dict[str, Any]) -> list[AnyOp]:
    """Return ops that compute a buffer of accumulators, equal for all images.

    Concat needs at least one computed buffer, so a row of zeros precedes the rows of the constant. Take removes it.
    """
    channels = x.shape[-1]
    one, rows = f"{name}.one", x.size // channels
    constants |= {f"{one}.w": np.zeros((channels, 4), np.int8), f"{one}.bias": np.zeros(channels, np.int32)}
    constants |= {f"{name}.all": x.reshape(rows, channels), f"{name}.first": np.zeros(1, np.int32)}
    constants[f"{name}.rows"] = np.arange(1, rows + 1, dtype=np.int32)
    return [
        Take(y=f"{name}.cell", x="cells", index=f"{name}.first"),
        Linear(y=one, x=f"{name}.cell", out="acc"),
        Concat(y=f"{name}.list", xs=(one, f"{name}.all")),
        Take(y=f"{name}.taken", x=f"{name}.list", index=f"{name}.rows"),
        Permute(y=name, x=f"{name}.taken", view=(x.size,), perm=(0,), shape=x.shape),
    ]


def row_codes(name: str, codes: Any, value: Value, constants: dict[str, Any], cells: list[Any]) -> list[AnyOp]:
    """Return ops that compute the codes that an Attend reads. RowCodes must write them, so the cells hold matching scores."""
    table = np.arange(value.hi + 1, dtype=np.uint8)
    table[[0, value.row_code]] = table[[value.row_code, 0]]  # a transposition is its own inverse
    scores = Value("u8", value.shape, 0, 255)
    constants[f"{name}.table"] = table
    made = codes_from_cells(f"{name}.scores", 255 - table[codes], scores, constants, cells)
    return [*made, RowCodes(y=name, x=f"{name}.scores")]


def compare_with_reference(program: Program, images: NDArray[np.uint8], name: str, threads: int = 1) -> None:
    """Compare the engine with the reference on every instruction set: every buffer without fusion, the output with fusion."""
    expected = buffers_of(program, images)
    for isa in ISAS:
        engine = engine_of(program, threads, isa=isa, keep=True)
        for i, image in enumerate(images):
            assert_same(engine.buffers(image), {key: x[i] for key, x in expected.items()}, f"{name}: {isa} image {i},")
        output = engine_of(program, threads, isa=isa).run(images)
        assert_same(output, expected[program.header.output.buffer], f"{name}: {isa}, fused ops")
        assert output.dtype == expected[program.header.output.buffer].dtype
