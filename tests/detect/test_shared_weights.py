"""Test that a layer that runs on several maps stores its weights once: the proposal head, which runs on five levels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fqvit.errors import FqvitError
from fqvit.ir.ops import Linear
from fqvit.ir.program import Program
from fqvit.runtime.native import Engine
from fqvit.runtime.reference import Reference

pytest.importorskip("torch")

from tests.factories import assert_same, buffers_of
from tests.factories import one_thread as one_thread
from tests.ir.slow_ops import linear

from .test_programs import lowered, packed, padded_pixels

LAYERS = ("rpn_head.relu", "rpn_head.objectness", "rpn_head.deltas")


def pyramid(recipe: str) -> Program:
    low, (height, width, _) = packed() if recipe == "packed" else lowered("mask r-cnn", recipe), padded_pixels().shape
    return low.pyramid(height, width)


@pytest.mark.parametrize("recipe", ["fqvit", "npu", "fq-vit", "fq-vit-original", "packed"])
def test_every_level_uses_the_weights_of_the_first_level(recipe: str) -> None:
    program = pyramid(recipe)
    owners = {op.y: op.weights_of for op in program.ops if isinstance(op, Linear) and op.y.startswith("rpn_head.")}
    assert owners == {f"{y}@{i}" if i else y: y if i else None for i in range(5) for y in LAYERS}
    held = [name for name in program.constants if name.startswith("rpn_head.") and name.endswith((".w", ".choice"))]
    assert sorted(name for name in held if name.endswith(".w")) == sorted(f"{y}.w" for y in LAYERS)
    assert len(held) == 3 + (recipe == "packed")
    others = [op for op in program.ops if isinstance(op, Linear) and not op.y.startswith("rpn_head.")]
    assert others and all(op.weights_of is None for op in others)


def test_shared_packed_weights_run_on_every_backend(tmp_path: Path) -> None:
    program, pixels = pyramid("packed"), padded_pixels()[None]
    program.save(tmp_path / "packed.fqvit")
    exact = Reference(program).run_all(pixels)
    for engine in (Engine(program, 1), Engine(tmp_path / "packed.fqvit", 1), Engine(program.unpacked(), 1)):
        for output, a, b in zip(program.header.outputs, engine.run_all(pixels), exact, strict=True):
            assert_same(a, b, output.buffer)
    assert not any(name.endswith(".choice") for name in program.unpacked().constants)


def test_a_shared_layer_equals_the_slow_definition() -> None:
    program = packed().template
    pixels = np.random.default_rng(0).integers(0, 256, (1, *program.input_shape)).astype(np.uint8)
    buffers = buffers_of(program, pixels)
    for y in ("rpn_head.relu@3", "rpn_head.deltas@2"):
        op = next(op for op in program.ops if op.y == y)
        assert isinstance(op, Linear) and op.weights_of is not None
        slow = linear(op, lambda name: buffers[name][0] if name in buffers else program.constants[name])
        assert_same(buffers[y][0], np.asarray(slow, buffers[y].dtype), y)


def altered(program: Program, y: str, **fields: Any) -> Program:
    ops = tuple(msgspec.structs.replace(op, **fields) if op.y == y else op for op in program.ops)
    return Program(msgspec.structs.replace(program.header, ops=ops), program.constants)


@pytest.mark.parametrize(
    "fields, problem",
    [
        ({"weights_of": "nothing"}, "weights_of is 'nothing', expected an earlier linear op"),
        ({"weights_of": "rpn_head.relu@1"}, "weights_of is 'rpn_head.relu@1', expected an earlier linear op"),  # itself
        ({"weights_of": "rpn_head.relu@2"}, "weights_of is 'rpn_head.relu@2', expected an earlier linear op"),  # a later one
        ({"weights_of": "rpn_head.relu.squares@1"}, "expected an earlier linear op"),
        ({"weights_of": "rpn_head.objectness"}, "constant .rpn_head.objectness.w. is missing"),  # its weights are not packed
        ({"weights_of": "neck.lateral.0", "codebooks": 1}, "reads a different number of channels than 'neck.lateral.0'"),
        ({"weights_of": None}, "constant 'rpn_head.relu@1.w' is missing"),
        ({"codebooks": 1}, r"codebooks is 1, but 'rpn_head.relu' \(weights_of\) has"),
        ({"group": 8}, r"group is 8, but 'rpn_head.relu' \(weights_of\) has"),
        ({"group": 0}, r"group is 0, but 'rpn_head.relu' \(weights_of\) has"),
    ],
)
def test_invalid_references_to_weights_are_rejected(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(FqvitError, match=problem):
        altered(packed().template, "rpn_head.relu@1", **fields).verify()


def test_referring_to_an_op_without_weights_of_its_own_is_rejected() -> None:
    with pytest.raises(
        FqvitError, match="weights_of is 'rpn_head.relu@1', expected an earlier linear op that has its own weights"
    ):
        altered(packed().template, "rpn_head.relu@2", weights_of="rpn_head.relu@1").verify()
