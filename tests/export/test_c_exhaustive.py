"""Exhaustive tests of C exports on small domains, compared with exact integers.

See also: tests/runtime/test_exhaustive.py.
"""

from __future__ import annotations

import pytest

from tests.export.compiled import Builder
from tests.factories import assert_same
from tests.ir.exhaustive import CASES, IMAGE, joined


@pytest.mark.parametrize("name", CASES)
def test_every_case_of_a_small_domain_is_exact(name: str, builder: Builder) -> None:
    for program, expected in joined(CASES[name]()):
        assert_same(builder.outputs(program, IMAGE), [expected], name)
