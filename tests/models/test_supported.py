"""The lists that `fqvit models` prints agree with the code."""

from __future__ import annotations

from fqvit.frontend.read import HANDLERS
from fqvit.models import supported


def test_listed_ops_are_those_with_a_handler() -> None:
    listed = [name for names in supported.OPS.values() for name in names.split()]
    assert sorted(listed) == sorted(HANDLERS)
