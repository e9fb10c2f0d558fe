"""Heads of detectors: a batch of RoIs gives the same bits as one RoI at a time.

See also: test_batch.py (batches in a hand-made head).
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from fqvit.detect.batch import batched
from fqvit.detect.fixed.head_runner import HeadRunner, rois_per_batch
from fqvit.errors import FqvitError
from fqvit.ir.moves import Permute
from fqvit.ir.ops import Linear
from fqvit.ir.program import Program
from fqvit.runtime.native import Engine
from fqvit.runtime.reference import Reference

pytest.importorskip("torch")

from tests.factories import assert_same
from tests.factories import one_thread as one_thread

from .detectors import CONFIGS
from .test_programs import lowered, packed

every_detector = pytest.mark.parametrize("name", CONFIGS)


def heads(name: str) -> list[Program]:
    low = lowered(name, "fqvit")
    return [*low.boxes, *low.masks]


def random_rois(program: Program, count: int, seed: int = 0) -> NDArray[np.uint8]:
    """Random RoI features; the first RoI is all 0, the second all 255."""
    codes = np.random.default_rng(seed).integers(0, 256, (count, *program.input_shape)).astype(np.uint8)
    codes[:1], codes[1:2] = 0, 255
    return codes


@every_detector
def test_batches_give_the_same_bits_as_one_roi_at_a_time(name: str) -> None:
    for program in heads(name):
        codes = random_rois(program, 7)
        one_at_a_time = Reference(program).run_all(codes)
        # Batches of one RoI, of three RoIs (the last batch is partial), of all RoIs, and of more RoIs than there are.
        for batch in (1, 3, 7, 10):
            for head in (HeadRunner(program, 1, batch=batch), HeadRunner(program, 2, "native", batch)):
                for output, a, b in zip(program.header.outputs, head.run_all(codes), one_at_a_time, strict=True):
                    assert_same(a, b, f"{program.header.model}, batches of {batch}, {output.buffer}")
        for a, b in zip(HeadRunner(program, backend="reference", batch=4).run_all(codes), one_at_a_time, strict=True):
            assert_same(a, b, f"{program.header.model}, reference")


def test_heads_with_packed_weights_can_be_batched() -> None:
    for program in (*packed().boxes, *packed().masks):
        codes = random_rois(program, 5)
        for a, b in zip(HeadRunner(program, 1, batch=3).run_all(codes), Engine(program, 1).run_all(codes), strict=True):
            assert_same(a, b, program.header.model)


def test_a_fully_connected_layer_is_one_matrix_product_over_all_rois() -> None:
    program = heads("mask r-cnn")[0]
    buffers = batched(program, 50).verify().buffers
    assert [buffers[op.y].shape[:-1] for op in program.ops if isinstance(op, Linear)] == [(1, 50)] * 4
    assert [output.kind for output in batched(program, 50).header.outputs] == ["scores", "deltas"]
    mask = heads("mask r-cnn")[1]
    assert batched(mask, 5).verify().buffers[mask.header.output.buffer].shape == (5 * 28, 28, 5)


def test_convolutions_need_only_one_roi_per_batch() -> None:
    assert [rois_per_batch(program) for program in heads("mask r-cnn")] == [64, 1]
    assert rois_per_batch(heads("cascade of 4conv1fc")[0]) == 64


def test_batching_changes_only_row_indices_and_shapes() -> None:
    for program in heads("cascade of 4conv1fc"):
        made = batched(program, 3)
        assert [(op.y, type(op)) for op in made.ops] == [(op.y, type(op)) for op in program.ops]
        assert made.header.sites == program.header.sites and made.input_shape[0] == 3 * program.input_shape[0]
        weights = [{k: v for k, v in p.constants.items() if not k.startswith("rows.")} for p in (made, program)]
        assert_same(weights[0], weights[1], program.header.model)


def test_an_empty_batch_of_rois_gives_empty_outputs() -> None:
    for program in heads("mask r-cnn"):
        for head in (HeadRunner(program, 1), HeadRunner(program, backend="reference")):
            found = head.run_all(random_rois(program, 0))
            assert [x.shape for x in found] == [(0, *shape) for shape in head.shapes]


def test_programs_that_are_not_heads_are_rejected() -> None:
    low = lowered("mask r-cnn", "fqvit")
    for build in (lambda: batched(low.template, 2), lambda: HeadRunner(low.template)):
        with pytest.raises(FqvitError, match="takes pixels"):
            build()
    with pytest.raises(FqvitError, match="a batch of 0 RoIs"):
        batched(low.boxes[0], 0)
    with pytest.raises(FqvitError, match="too many"):
        batched(low.masks[0], 2**24)
    with pytest.raises(FqvitError, match=r"RoI features: uint8 \[2, 7, 8, 16\], expected uint8 \[n, 7, 7, 16\]"):
        HeadRunner(low.boxes[0], 1).run_all(np.zeros((2, 7, 8, 16), np.uint8))


def test_permutations_that_would_mix_rois_are_rejected() -> None:
    program = heads("mask r-cnn")[1]
    ops = [
        msgspec.structs.replace(op, perm=(2, 0, 1, 3, 4)) if isinstance(op, Permute) and len(op.view) == 5 else op
        for op in program.ops
    ]
    with pytest.raises(FqvitError, match="this op cannot run on a batch of RoIs"):
        batched(Program(msgspec.structs.replace(program.header, ops=tuple(ops)), program.constants), 2)
