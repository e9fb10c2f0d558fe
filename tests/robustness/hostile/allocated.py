"""Limit the memory that a piece of code may allocate, as tracemalloc counts it (Python and numpy)."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_most(size: float) -> Iterator[None]:
    """Fail if the code inside has `size` bytes or more allocated at any one time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()
