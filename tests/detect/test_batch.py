"""Tests of batching with a hand-made head: the batched program, and heads and batch sizes that are rejected.

See also: test_head_runner.py (batches in the heads of detectors).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from fqvit.data.preprocess import Preprocess
from fqvit.detect.batch import _permute, _repeated, batched
from fqvit.errors import FqvitError
from fqvit.ir.moves import Permute, Take
from fqvit.ir.ops import LayerNorm, Linear
from fqvit.ir.program import CodeInput, Header, Output, Program
from fqvit.ir.value import MAX_ELEMENTS
from fqvit.runtime.reference import Reference

INDEX = np.array([[0, -1, 3], [2, 1, 0]], np.int32)


def parts(name: str, outputs: int, inputs: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {
        f"{name}.w": rng.integers(-127, 127, (outputs, inputs), dtype=np.int8),
        f"{name}.bias": rng.integers(-999, 999, outputs, dtype=np.int32),
        f"{name}.mult": np.full(outputs, 2**30, np.int32),
        f"{name}.shift": np.full(outputs, 38, np.uint8),
    }


def head(*more: Any) -> Program:
    """Return a head that reads 2 x 2 codes of 3 channels and uses one index twice; outputs: scores (a map), logits, deltas."""
    ops = (
        Take(y="rows", x="pixels", index="rows.0", fill=5),  # [2, 3, 3] from four rows
        Linear(y="map", x="rows"),  # [2, 3, 4]
        Take(y="again", x="map", index="rows.0"),  # [2, 3, 4] from six rows
        Permute(y="turned", x="again", view=(2, 3, 2, 2), perm=(0, 2, 1, 3), shape=(4, 3, 2)),
        Linear(y="scores", x="turned", out="i32"),  # [4, 3, 2]
        Permute(y="flat", x="again", view=(24,), perm=(0,)),
        Linear(y="logits", x="flat", out="i32"),
        Linear(y="deltas", x="flat", out="i32"),
        *more,
    )
    header = Header(
        version=1,
        model="head",
        preprocess=Preprocess(4, 2, 3, 4, "bicubic", (0.5,) * 3, (0.5,) * 3),
        ops=ops,
        output=Output("logits", "logits", 1.0),
        others=(Output("deltas", "deltas", 1.0), Output("scores", "scores", 1.0)),
        input=CodeInput((2, 2, 3), 0.5, 5),
        sites={},
        recipe={},
        source="",
        images=1,
    )
    constants = parts("map", 4, 3, 0) | parts("scores", 2, 2, 1) | parts("logits", 5, 24, 2) | parts("deltas", 3, 24, 3)
    return Program(header, constants | {"rows.0": INDEX})


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_batch_gives_the_same_bits_as_one_roi_at_a_time(count: int) -> None:
    codes = np.random.default_rng(count).integers(0, 256, (count, 2, 2, 3)).astype(np.uint8)
    made = batched(head(), count)
    assert made.input_shape == (2 * count, 2, 3)
    together = Reference(made).run_all(codes.reshape(1, 2 * count, 2, 3))
    assert [x.shape for x in together] == [(1, 1, count, 5), (1, 1, count, 3), (1, 4 * count, 3, 2)]
    for a, b in zip(together, Reference(head()).run_all(codes), strict=True):
        np.testing.assert_array_equal(a.reshape(b.shape), b)
    assert [output.kind for output in made.header.outputs] == ["scores", "deltas", "scores"]


def test_an_index_is_stored_once_per_map_size() -> None:
    program = head(Take(y="third", x="map", index="rows.0"))
    made = batched(program, 3)
    assert {name for name in made.constants if name.startswith("rows")} == {"rows.0.of4", "rows.0.of6"}
    assert [op.index for op in made.ops if isinstance(op, Take)] == ["rows.0.of4", "rows.0.of6", "rows.0.of6"]
    assert [op for op in made.ops if isinstance(op, Linear)] == [op for op in program.ops if isinstance(op, Linear)]


def test_each_roi_reads_its_own_rows() -> None:
    found = _repeated(INDEX, 4, 3)
    assert found.dtype == np.int32
    assert found.tolist() == [[0, -1, 3], [2, 1, 0], [4, -1, 7], [6, 5, 4], [8, -1, 11], [10, 9, 8]]
    assert _repeated(np.array([1, -1], np.int32), 2, 2).tolist() == [1, -1, 3, -1]


@pytest.mark.parametrize(
    "size, rows, count",
    [(1, MAX_ELEMENTS, 1), (1, MAX_ELEMENTS // 2, 2), (MAX_ELEMENTS // 2, 1, 2), (MAX_ELEMENTS, 1, 1)],
)
def test_batches_whose_indices_exceed_a_buffer_are_rejected(size: int, rows: int, count: int) -> None:
    index = np.broadcast_to(np.zeros(1, np.int32), size)  # uses no memory
    with pytest.raises(FqvitError, match=f"^a batch of {count} RoIs: too many elements"):
        _repeated(index, rows, count)


def test_batches_whose_input_exceeds_a_buffer_are_rejected() -> None:
    whole = head()
    kept = (Permute(y="flat", x="pixels", view=(12,), perm=(0,)), Linear(y="logits", x="flat", out="i32"))
    header = msgspec.structs.replace(whole.header, ops=kept, others=())
    program = Program(header, parts("logits", 5, 12, 2))
    batched(program, MAX_ELEMENTS // 12)
    with pytest.raises(FqvitError, match="^input shape .* is empty or too large"):
        batched(program, MAX_ELEMENTS // 12 + 1)


def test_the_largest_batch_that_fits_a_buffer_is_accepted() -> None:
    assert _repeated(np.zeros(1, np.int32), MAX_ELEMENTS - 1, 1).tolist() == [0]


@pytest.mark.parametrize(
    "before, after",
    [
        (((2, 3), (0, 1), ()), ((6, 3), (0, 1), ())),
        (((2, 3, 4), (0, 2, 1), ()), ((6, 3, 4), (0, 2, 1), ())),
        (((2, 3, 4), (0, 2, 1), (8, 3)), ((6, 3, 4), (0, 2, 1), (24, 3))),
        (((6,), (0,), ()), ((1, 3, 6), (0, 1, 2), ())),
    ],
)
def test_permutations_keep_rois_as_the_outermost_axis(before: Any, after: Any) -> None:
    made = _permute(Permute(y="y", x="x", view=before[0], perm=before[1], shape=before[2]), 3)
    assert (made.view, made.perm, made.shape) == after


def test_a_selection_within_each_roi_is_kept() -> None:
    for select in ((1, 2), (1, 0)):
        made = _permute(Permute(y="y", x="x", view=(2, 3, 4), perm=(0, 1), select=select), 3)
        assert (made.view, made.perm, made.select) == ((6, 3, 4), (0, 1), select)


@pytest.mark.parametrize(
    "fields",
    [
        {"view": (2, 3), "perm": (1, 0)},
        {"view": (2, 3, 4), "perm": (0, 1), "select": (0, 0)},  # selects from the first RoI only
        {"view": (2, 3, 4), "perm": (0, 1), "select": (0, 1)},
        {"view": (6,), "perm": (0,), "shape": (2, 3)},
        {"view": (2, 3), "perm": (0, 1), "shape": (6,)},
    ],
)
def test_permutations_that_would_mix_rois_are_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(FqvitError, match="^y: this op cannot run on a batch of RoIs"):
        _permute(Permute(y="y", x="x", **fields), 3)


def test_unsupported_ops_programs_and_batch_sizes_are_rejected() -> None:
    norm = LayerNorm(y="norm", x="map", epsilon=1, shift=30, b_shift=10)
    program = head(norm)
    with_norm = Program(program.header, {**program.constants, "norm.affine": np.ones((2, 4), np.int32)})
    with_norm.verify()
    with pytest.raises(FqvitError, match="^norm: this op cannot run on a batch of RoIs"):
        batched(with_norm, 2)
    for count in (0, -1):
        with pytest.raises(FqvitError, match=f"^head: a batch of {count} RoIs, expected 1 or more"):
            batched(head(), count)
    with pytest.raises(FqvitError, match="^head: takes pixels"):
        batched(Program(msgspec.structs.replace(head().header, input=None), head().constants), 2)
