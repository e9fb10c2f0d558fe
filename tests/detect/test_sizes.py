"""Test one pyramid at several image sizes: a resized program equals a program lowered at that size."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from fqvit.detect.resize import resized
from fqvit.errors import FqvitError
from fqvit.ir.program import Move, Program
from fqvit.lowering import grids
from fqvit.runtime.native import Engine
from fqvit.runtime.reference import Reference

pytest.importorskip("torch")

from fqvit.detect.lower import KEPT_SIZES
from fqvit.detect.model.float_models import pyramid_model
from fqvit.lowering.lower import lower
from fqvit.models.graph import trace
from fqvit.models.swin import inverse_index, merge_index, shift_mask, window_index
from tests.factories import assert_same
from tests.factories import one_thread as one_thread

from .test_programs import calibrated, detector_of, lowered

SIZES = ((32, 32), (64, 96), (160, 128), (256, 32))


def template(recipe: str = "fqvit") -> Program:
    return lowered("mask r-cnn", recipe).template


@pytest.mark.parametrize("recipe", ["fqvit", "fq-vit", "fq-vit-8", "npu"])
@pytest.mark.parametrize("size", SIZES)
def test_a_resized_program_equals_a_program_lowered_at_that_size(size: tuple[int, int], recipe: str) -> None:
    direct = lower(pyramid_model(detector_of("mask r-cnn"), *size), calibrated("mask r-cnn", recipe).pyramid)
    made = resized(template(recipe), *size)
    assert made.ops == direct.ops
    assert_same(dict(sorted(made.constants.items())), dict(sorted(direct.constants.items())), f"{size}")
    assert made.fingerprint() == direct.fingerprint()
    # Resizing back gives the template: a template of any size gives the same programs.
    assert resized(made, 64, 64).fingerprint() == template(recipe).fingerprint()


def test_only_moves_and_regions_depend_on_the_image_size() -> None:
    small, large = resized(template(), 64, 96), resized(template(), 128, 160)
    assert [(op.y, type(op)) for op in small.ops] == [(op.y, type(op)) for op in large.ops]
    assert small.header.sites == large.header.sites and small.header.outputs == large.header.outputs
    fixed = [{k: v for k, v in p.constants.items() if not k.startswith(("rows.", "region."))} for p in (small, large)]
    assert_same(fixed[0], fixed[1], "constants at two sizes")


@pytest.mark.parametrize("size", SIZES)
def test_engine_and_reference_give_the_same_bits_for_resized_programs(size: tuple[int, int]) -> None:
    program = lowered("mask r-cnn", "fqvit").pyramid(*size)
    pixels = np.random.default_rng(0).integers(0, 256, (1, *size, 3)).astype(np.uint8)
    for output, a, b in zip(
        program.header.outputs, Engine(program, 1).run_all(pixels), Reference(program).run_all(pixels), strict=True
    ):
        assert_same(a, b, output.buffer)
        if output.kind == "map":
            assert a.shape[1:3] == tuple(side // 2 ** (2 + int(output.buffer[-1])) for side in size)


def test_the_cache_does_not_change_programs() -> None:
    low = lowered("mask r-cnn", "fqvit")
    before = low.pyramid(32, 64).fingerprint()
    for side in range(32, 32 * (KEPT_SIZES + 2), 32):
        low.pyramid(side, 96)
    assert low.pyramid(32, 64).fingerprint() == before


@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (7, 7), (8, 13), (16, 5)])
@pytest.mark.parametrize("window, shift", [(3, 0), (3, 1), (7, 3), (4, 2)])
def test_indices_equal_those_of_the_float_model(grid: tuple[int, int], window: int, shift: int) -> None:
    index = window_index(grid, window, shift)
    assert_same(grids.windows(grid, window, shift), index.numpy(), "windows")
    assert_same(grids.tokens(grid, window, shift), inverse_index(index, grid[0] * grid[1]).numpy(), "tokens")
    assert_same(grids.merged(grid), merge_index(grid).numpy(), "merged")
    mask = shift_mask(grid, window, shift)
    if mask is not None:
        found = grids.regions(grid, window, shift)
        assert_same(found[:, :, None] == found[:, None, :], mask.numpy(), "regions")


def test_indices_of_a_small_map_are_those_computed_by_hand() -> None:
    assert grids.neighbours(2, 2).tolist()[0] == [-1, -1, -1, -1, 0, 1, -1, 2, 3]
    assert grids.neighbours(2, 2).tolist()[3] == [0, 1, -1, 2, 3, -1, -1, -1, -1]
    assert grids.enlarged((1, 2), (2, 4)).tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]
    assert grids.every_second(3, 3).tolist() == [[0, 2], [6, 8]]


@pytest.mark.parametrize("size", [(60, 64), (0, 32), (64, 31), (-32, 32), (8224, 32)])
def test_unsupported_image_sizes_are_rejected(size: tuple[int, int]) -> None:
    with pytest.raises(FqvitError, match="multiples of 32"):
        lowered("mask r-cnn", "fqvit").pyramid(*size)


def test_programs_without_moves_are_rejected() -> None:
    with pytest.raises(FqvitError, match="has a fixed image size"):
        resized(lowered("mask r-cnn", "fqvit").boxes[0], 64, 64)


@pytest.mark.parametrize(
    "move", [None, *(Move(kind) for kind in ("patches", "grid", "windows", "enlarged")), Move("tokens", 3, 5)]
)
def test_invalid_moves_are_rejected(move: Move | None) -> None:
    program = template()
    for name, right in program.header.moves.items():
        if move is None and right.kind == "grid":
            # Without this move, only the first axis is resized. Such a program still verifies if no later op checks the height
            # and width.
            continue
        moves = {key: value for key, value in program.header.moves.items() if key != name}
        if move is not None and move.kind != right.kind:
            moves[name] = move
        elif move is not None:
            continue
        changed = Program(msgspec.structs.replace(program.header, moves=moves), program.constants)
        with pytest.raises(FqvitError):
            resized(changed, 96, 160)


def test_graphs_of_different_sizes_have_the_same_node_names() -> None:
    detector = detector_of("mask r-cnn")
    names = [[n.name for n in trace(pyramid_model(detector, *size).module).nodes] for size in ((32, 32), (64, 160))]
    assert names[0] == names[1]
