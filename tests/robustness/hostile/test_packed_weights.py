"""Both loaders agree on which ops may read the constants of packed weights: only linear ops with the same format."""

from __future__ import annotations

from pathlib import Path

import pytest

from fqvit.errors import FqvitError
from tests.robustness.fuzz.oracle import verdicts
from tests.robustness.hostile.containers import Json
from tests.robustness.hostile.small_programs import (
    BEFORE,
    CASES,
    LINEAR,
    SHARED,
    X_TOKENS,
    Constants,
    file_of,
    header_of,
    linear_parts,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.fqvit"


PACKED = ("linear, 4 bits", "linear, 6 bits", "linear, codebooks", "linear, codebooks of 3 bits")


def accepted(path: Path, name: str, more: Json, constants: Constants | None = None) -> bool:
    """Return whether both loaders accept a case that is followed by another op; they agree about every file."""
    case = CASES[name]
    header = header_of([*BEFORE, case.op, more], X_TOKENS)
    path.write_bytes(file_of(header, SHARED | case.constants | linear_parts("z") | (constants or {})))
    found = verdicts(path)
    assert isinstance(found.python, FqvitError) == isinstance(found.native, FqvitError)
    return not isinstance(found.python, FqvitError)


@pytest.mark.parametrize("name", PACKED)
def test_other_ops_may_not_read_packed_weights(name: str, path: Path) -> None:
    assert not accepted(path, name, {"op": "linear", "y": "z", "x": "x", "weights_of": "y"})
    for constant in ("y.w", "y.exponent", "y.choice", "y.codebooks"):
        if constant not in CASES[name].constants:
            continue
        for more in (
            {"op": "take", "y": "z", "x": "x", "index": constant},
            {"op": "concat", "y": "z", "xs": ["x", constant]},
            {"op": "lookup", "y": "z", "x": "x", "alpha": constant},
            {"op": "add", "y": "z", "terms": [{"x": "x", "mult": 1}, {"x": constant, "mult": 1}], "shift": 1},
        ):
            assert not accepted(path, name, more), constant


@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_are_shared_only_with_ops_of_the_same_format(name: str, path: Path) -> None:
    own = {"group": 0, "width": 0, "codebooks": 0} | {k: v for k, v in CASES[name].op.items() if k not in LINEAR}
    more = {"op": "linear", "y": "z", "x": "x", "weights_of": "y"} | own
    for format_ in ({"group": 0}, {"group": 2}, {"group": 5}, {"width": 0}, {"width": 3}, {"width": 4}, {"width": 6},
                    {"codebooks": 0}, {"codebooks": 1}, {"codebooks": 2}, {}):  # fmt: skip
        assert accepted(path, name, more | format_) == (own == own | format_), format_


@pytest.mark.parametrize("name", PACKED)
def test_other_ops_may_read_constants_that_are_named_like_unused_parts_of_weights(name: str, path: Path) -> None:
    for part in ("y.exponent", "y.choice", "y.codebooks"):
        if part not in CASES[name].constants:
            assert accepted(path, name, {"op": "concat", "y": "z", "xs": ["x", part]}, {part: SHARED["token"]}), part
