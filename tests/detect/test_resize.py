"""Resize a hand-made program, and reject invalid moves.

See also: test_sizes.py (resizing the pyramids of detectors).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from fqvit.data.preprocess import Preprocess
from fqvit.detect.resize import resized
from fqvit.errors import FqvitError
from fqvit.ir.attention import LogSoftmax, MatMul
from fqvit.ir.elementwise import Depthwise
from fqvit.ir.moves import Permute, Take
from fqvit.ir.ops import Linear, Lookup
from fqvit.ir.program import Header, Move, Output, Program
from fqvit.lowering import grids

PATCHES = Permute(y="patches", x="pixels", view=(8, 4, 8, 4, 3), perm=(0, 2, 1, 3, 4), shape=(64, 48))
MOVES = {
    "patches": Move("patches"),
    "cut": Move("windows", 4, 2),
    "attention": Move("windows", 4, 2),
    "half": Move("second"),
    "whole": Move("enlarged", of="patches"),
}


def program_of(ops: tuple[Any, ...], moves: dict[str, Move], output: Output, constants: dict[str, Any]) -> Program:
    header = Header(
        version=1,
        model="test",
        preprocess=Preprocess(32, 32, 3, 32, "bicubic", (0.5,) * 3, (0.5,) * 3),
        ops=ops,
        output=output,
        sites={},
        recipe={},
        source="",
        images=1,
        moves=moves,
    )
    return Program(header, constants)


def pyramid(*more: Any, **moves: Move | None) -> Program:
    """Return a program: 32 x 32 pixels -> 8 x 8 patches -> self-attention in windows of 4 x 4.

    A second branch selects every second patch of the 8 x 8 patches and enlarges the result to 8 x 8 again.
    moves: replaces entries of MOVES, whose keys are buffers; None removes an entry
    """
    ops = (
        PATCHES,
        Take(y="cut", x="patches", index="rows.0"),  # [4, 16, 48], full range 0..255
        Permute(y="heads", x="cut", view=(4, 16, 2, 24), perm=(0, 2, 1, 3)),
        MatMul(y="scores", a="heads", b="heads", mult=2**30, shift=44),
        LogSoftmax(y="attention", x="scores", region="region.0"),
        Lookup(y="table", x="patches"),
        Take(y="half", x="table", index="rows.1"),  # [4, 4, 48]
        Take(y="whole", x="half", index="rows.2"),  # [8, 8, 48]
        *more,
    )
    constants = {
        "table.table": np.arange(256, dtype=np.uint8),
        "attention.table": np.array([2**20, 2**10, 0], np.int32),
        "rows.0": grids.windows((8, 8), 4, 2),
        "region.0": grids.regions((8, 8), 4, 2),
        "rows.1": grids.every_second(8, 8),
        "rows.2": grids.enlarged((4, 4), (8, 8)),
    }
    known = {name: move for name, move in (MOVES | moves).items() if move is not None}
    return program_of(ops, known, Output("whole", "map", 1.0), constants)


def test_resizing_to_the_current_size_gives_the_same_program() -> None:
    program = pyramid()
    program.verify()
    for made in (resized(program, 32, 32), resized(resized(program, 96, 64), 32, 32)):
        assert made.header == program.header and made.fingerprint() == program.fingerprint()


def test_indices_and_regions_follow_the_new_size() -> None:
    made = resized(pyramid(), 96, 64)
    assert made.input_shape == (96, 64, 3)
    shapes = {name: value.shape for name, value in made.verify().buffers.items()}
    assert shapes["patches"] == (24 * 16, 48) and shapes["attention"] == (24, 2, 16, 16)
    assert shapes["half"] == (12, 8, 48) and shapes["whole"] == (24, 16, 48)
    assert made.constants["rows.0"].tolist() == grids.windows((24, 16), 4, 2).tolist()
    assert made.constants["region.0"].tolist() == grids.regions((24, 16), 4, 2).tolist()
    assert made.constants.keys() == pyramid().constants.keys()  # no constant of the old size is left


@pytest.mark.parametrize("name", ["rows.0", "region.0", "rows.1", "rows.2"])
def test_stored_indices_must_equal_those_of_the_moves(name: str) -> None:
    program = pyramid()
    program.constants[name] = program.constants[name][::-1].copy()
    with pytest.raises(FqvitError, match="its stored indices differ from those that its move gives"):
        resized(program, 32, 32)
    assert (
        resized(program, 64, 64).fingerprint() == resized(pyramid(), 64, 64).fingerprint()
    )  # new indices do not depend on the stored ones


def test_the_total_size_of_new_constants_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = resized(pyramid(), 64, 64)
    total = sum(x.size for name, x in made.constants.items() if name.startswith(("rows.", "region.")))
    monkeypatch.setattr("fqvit.detect.resize.MAX_ELEMENTS", total)
    resized(pyramid(), 64, 64)
    monkeypatch.setattr("fqvit.detect.resize.MAX_ELEMENTS", total - 1)
    with pytest.raises(FqvitError, match="the image is too large"):
        resized(pyramid(), 64, 64)


@pytest.mark.parametrize(("grid", "window", "shift"), [((8, 8), 4, 2), ((6, 9), 4, 1), ((7, 3), 3, 2), ((4, 4), 4, 3)])
def test_positions_attend_to_each_other_unless_the_image_border_is_between_them(
    grid: tuple[int, int], window: int, shift: int
) -> None:
    height, width = (-(-side // window) * window for side in grid)
    found = grids.regions(grid, window, shift)
    windows = [
        [(top + i, left + j) for i in range(window) for j in range(window)]
        for top in range(0, height, window)
        for left in range(0, width, window)
    ]
    before = [[((y + shift) % height, (x + shift) % width) for y, x in some] for some in windows]  # before the shift
    for numbers, now, then in zip(found, windows, before, strict=True):
        assert numbers[0] == 0 and set(numbers) == set(range(max(numbers) + 1))
        for a in range(window**2):
            for b in range(window**2):
                near = all(then[a][k] - then[b][k] == now[a][k] - now[b][k] for k in (0, 1))
                assert (numbers[a] == numbers[b]) == near


ROWS = "no move says how its row indices follow"
REGIONS = "no move says how its regions follow"
CHOICE = "does not select rows"
SHAPE = "does not reshape a view"
BAD: list[tuple[str, Move | None, str]] = [
    ("cut", None, ROWS),
    ("half", None, ROWS),
    ("attention", None, REGIONS),
    ("attention", Move("windows", 4, 0), REGIONS),  # a window that is not shifted has no regions
    ("attention", Move("windows", 4, 4), REGIONS),
    ("attention", Move("windows", 4, 5), REGIONS),
    ("cut", Move("windows", 4, 4), "windows of 4 shifted by 4"),
    ("cut", Move("windows", 4, 5), "windows of 4 shifted by 5"),
    ("cut", Move("tokens", 4, 4), "windows of 4 shifted by 4"),
    ("cut", Move("windows"), "windows of 0 shifted by 0"),
    ("cut", Move("patches"), CHOICE),
    ("cut", Move("grid"), CHOICE),
    ("whole", Move("enlarged", of="nothing"), CHOICE),
    ("whole", Move("enlarged"), CHOICE),
    ("patches", Move("grid"), SHAPE),
    ("heads", Move("grid"), SHAPE),
    ("heads", Move("windows", 4, 2), SHAPE),
]


@pytest.mark.parametrize("name, move, said", BAD)
def test_invalid_moves_are_rejected(name: str, move: Move | None, said: str) -> None:
    with pytest.raises(FqvitError, match=f"^{name}: .*{said}"):
        resized(pyramid(**{name: move}), 64, 64)


def test_only_enlarged_maps_take_the_size_of_another_buffer() -> None:
    assert resized(pyramid(half=Move("second", of="patches")), 64, 64).constants["rows.1"].shape == (8, 8)


def test_reading_an_unwritten_buffer_is_rejected() -> None:
    program = pyramid(Take(y="lost", x="nothing", index="rows.0"), lost=Move("windows", 4, 2))
    with pytest.raises(FqvitError, match="^lost: reads 'nothing' before any op writes it"):
        resized(program, 64, 64)


@pytest.mark.parametrize("move", [None, Move("windows", 4, 2)])
def test_the_indices_of_a_depthwise_op_cannot_be_resized(move: Move | None) -> None:
    program = pyramid(Depthwise(y="mixed", x="patches", index="rows.0"), mixed=move)
    with pytest.raises(FqvitError, match=f"^mixed: .*{ROWS}"):
        resized(program, 64, 64)


def test_sides_are_limited_to_8192_pixels_and_by_the_size_of_buffers() -> None:
    parts = {
        "y.w": np.ones((64, 48), np.int8),
        "y.bias": np.zeros(64, np.int32),
        "y.mult": np.full(64, 2**30, np.int32),
        "y.shift": np.full(64, 38, np.uint8),
    }
    ops = (PATCHES, Linear(y="y", x="patches"))
    program = program_of(ops, {"patches": Move("patches")}, Output("y", "tokens", 1.0), parts)
    assert resized(program, 8192, 4096).input_shape == (8192, 4096, 3)
    with pytest.raises(FqvitError, match=r"^y: shape \[4194304, 64\] is too large"):
        resized(program, 8192, 8192)
    with pytest.raises(FqvitError, match="multiples of 32"):
        resized(program, 8224, 32)


def test_a_program_without_moves_cannot_be_resized() -> None:
    program = pyramid()
    with pytest.raises(FqvitError, match="^test: has a fixed image size"):
        resized(Program(msgspec.structs.replace(program.header, moves={}), program.constants), 64, 64)
