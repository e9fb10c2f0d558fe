"""Tests of the size limits of a program: the largest sizes that verify() accepts and the smallest that it rejects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fqvit.errors import FqvitError
from fqvit.ir.moves import Concat, Permute, Take
from fqvit.ir.ops import Lookup
from fqvit.ir.program import INPUT, CodeInput, Output, Program
from fqvit.ir.value import MAX_AXES, MAX_CHANNELS, MAX_ELEMENTS
from tests.ir.test_verify import program_of, with_header


def sized(shape: tuple[int, int, int], *ops: Any, **constants: Any) -> Program:
    """Return a program whose input and output are codes of that shape."""
    output = Output(INPUT, "map", 0.5)
    return with_header(program_of([], constants), input=CodeInput(shape, 0.5, 0), ops=ops, output=output)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, MAX_ELEMENTS - 1, 1), (2**14, 2**13, 1)])
def test_inputs_of_any_size_below_the_limit_are_accepted(shape: tuple[int, int, int]) -> None:
    assert sized(shape).verify().buffers[INPUT].shape == shape


@pytest.mark.parametrize("shape", [(1, MAX_ELEMENTS, 1), (2**14, 2**14, 1), (0, 2, 3), (2, 0, 3), (2, 3, 0), (-2, -2, 3)])
def test_empty_and_too_large_inputs_are_rejected(shape: tuple[int, int, int]) -> None:
    with pytest.raises(FqvitError, match="^input shape .* is empty or too large"):
        sized(shape).verify()


def test_buffers_have_fewer_elements_than_the_limit() -> None:
    half = MAX_ELEMENTS // 2
    one = np.zeros((1, 1), np.uint8)
    for rows, xs in ((half - 1, ("rows", "rows", "one")), (half, ("rows", "rows"))):
        ops = Permute(y="rows", x=INPUT, view=(rows, 1), perm=(0, 1)), Concat(y="y", xs=xs)
        program = sized((1, rows, 1), *ops, one=one)
        if rows < half:
            assert program.verify().buffers["y"].shape == (MAX_ELEMENTS - 1, 1)
        else:
            with pytest.raises(FqvitError, match=rf"^y: shape \[{MAX_ELEMENTS}, 1\] is too large"):
                program.verify()


def test_take_rejects_more_axes_than_the_limit() -> None:
    take = Take(y="y", x=INPUT, index="i")
    last = sized((2, 2, 3), take, i=np.zeros((1,) * (MAX_AXES - 1), np.int32))
    assert last.verify().buffers["y"].shape == (*(1,) * (MAX_AXES - 1), 3)
    with pytest.raises(FqvitError, match=f"^y: shape .* has more than {MAX_AXES} axes"):
        sized((2, 2, 3), take, i=np.zeros((1,) * MAX_AXES, np.int32)).verify()


def test_the_channel_limit_applies_to_computed_buffers_but_not_to_moved_ones() -> None:
    lookup, table = Lookup(y="y", x="c"), {"y.table": np.zeros(256, np.uint8)}
    for channels in (MAX_CHANNELS, MAX_CHANNELS + 1):
        row = Permute(y="c", x=INPUT, view=(1, channels), perm=(0, 1))
        assert sized((1, channels, 1), row).verify().buffers["c"].channels == channels
        program = sized((1, channels, 1), row, lookup, **table)
        if channels == MAX_CHANNELS:
            assert program.verify().buffers["y"].channels == channels
        else:
            with pytest.raises(FqvitError, match=f"^y: too many channels: {channels}, at most {MAX_CHANNELS}"):
                program.verify()
