"""The engine checks inputs, operands and outputs of programs, and the native module checks the arguments of every call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fqvit import _native
from fqvit.errors import FqvitError
from fqvit.runtime.limits import MOST_BYTES
from fqvit.runtime.native import Engine
from tests.robustness.fuzz.oracle import verdicts
from tests.robustness.hostile.small_programs import BEFORE, CASES, IMAGE, SHARED, X_TOKENS, Array, C, T, file_of, header_of
from tests.runtime.programs import ISAS

REJECTED = (_native.BadProgram, TypeError, MemoryError)
IMAGES = np.full((2, *IMAGE), 77, np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.fqvit"


@pytest.mark.parametrize(
    "shape", [[4, 2], [4, 2, 3, 1], [0, 2, 3], [-1, 2, 3], [2**28, 2, 3], [2**62, 4, 1], [2**62] * 3, [2**63 - 1] * 3, []]
)
def test_invalid_input_shapes_are_rejected(shape: list[int], path: Path) -> None:
    path.write_bytes(file_of(header_of(BEFORE, X_TOKENS) | {"input": {"shape": shape, "scale": 1.0, "zero": 0}}, SHARED))
    found = verdicts(path)
    assert isinstance(found.python, FqvitError) and isinstance(found.native, FqvitError)


@pytest.mark.parametrize("array", [np.zeros((2, 0), np.uint8), np.zeros((2, C), np.int8), np.zeros((2, C), np.int64)])
def test_constants_that_cannot_be_operands_are_rejected(array: Array, path: Path) -> None:
    for name in ("concat", "add"):
        case = CASES[name]
        op = case.op | ({"terms": [{"x": "x", "mult": 1}, {"x": "token", "mult": 1}]} if name == "add" else {})
        path.write_bytes(file_of(header_of([*BEFORE, op], X_TOKENS), SHARED | case.constants | {"token": array}))
        found = verdicts(path)
        assert isinstance(found.python, FqvitError) and isinstance(found.native, FqvitError)


@pytest.mark.parametrize("buffer", ["none", "", "row", "token", "acc.w", "region", 0, None])
def test_outputs_that_no_op_writes_are_rejected(buffer: Any, path: Path) -> None:
    output = X_TOKENS | {"buffer": buffer}
    for outputs in ((output,), (X_TOKENS, output)):
        path.write_bytes(file_of(header_of(BEFORE, *outputs), SHARED))
        found = verdicts(path)
        assert isinstance(found.python, FqvitError) and isinstance(found.native, FqvitError)


def test_outputs_must_differ_and_run_all_returns_them_in_order(path: Path) -> None:
    wide = X_TOKENS | {"buffer": "wide"}
    for others in ([X_TOKENS], [wide, wide], [wide, X_TOKENS]):
        path.write_bytes(file_of(header_of(BEFORE, X_TOKENS, *others), SHARED))
        found = verdicts(path)
        for error in (found.python, found.native):
            assert "is listed as an output twice" in str(error)
    path.write_bytes(file_of(header_of(BEFORE, X_TOKENS, wide), SHARED))
    engine = Engine(path, 1)
    path.write_bytes(file_of(header_of(BEFORE, wide), SHARED))
    x, second = engine.run_all(IMAGES)
    assert (x == engine.run(IMAGES)).all() and (second == Engine(path, 1).run(IMAGES)).all() and second.dtype == np.uint16


def model(keep: bool = False, threads: int = 1) -> _native.Model:
    return _native.load_memory(file_of(header_of(BEFORE, X_TOKENS), SHARED), threads, "", keep, MOST_BYTES)


def test_the_native_module_checks_images_itself() -> None:
    one = model()
    uses: list[Any] = [
        lambda: one.buffers(IMAGES[:1], ["x"]),
        lambda: one.profile(IMAGES, 1),
        lambda: one.profile(IMAGES[:1], 0),
        lambda: one.run(np.zeros((1, 4, 3, 2), np.uint8), False),
        lambda: one.run(np.zeros((1, 4, 3, 2), np.uint8), True),
        lambda: one.run(np.zeros(IMAGE, np.uint8), False),
        lambda: one.run(np.zeros((1, *IMAGE), np.int8), False),
        lambda: one.run(None, False),  # type: ignore[arg-type]
        lambda: one.profile(np.zeros((1, 4, 3, 2), np.uint8), 1),
    ]
    for use in uses:
        with pytest.raises(REJECTED):
            use()
    assert one.run(IMAGES, False)[0].shape == (2, T, C)


@pytest.mark.parametrize("name", ["pixels", "row", "token", "none", "", "acc.w"])
def test_only_buffers_that_ops_write_can_be_read_back(name: str) -> None:
    kept = model(keep=True)
    for names in ([name], ["x", name]):
        with pytest.raises(_native.BadProgram):
            kept.buffers(IMAGES[:1], names)
    with pytest.raises(_native.BadProgram):
        kept.buffers(IMAGES, ["x"])
    assert [codes.dtype for codes in kept.buffers(IMAGES[:1], ["wide", "x"])] == [np.uint16, np.uint8]


def test_the_number_of_threads_is_clamped_between_1_and_256() -> None:
    for threads in (-(2**31), 0, 2**31 - 1):
        assert 1 <= model(threads=threads).threads <= 256


def test_unknown_instruction_sets_are_rejected() -> None:
    for isa in ("abacus", ISAS[0] + " ", ISAS[0].upper()):
        with pytest.raises(REJECTED):
            _native.load_memory(file_of(header_of(BEFORE, X_TOKENS), SHARED), 1, isa, False, MOST_BYTES)
