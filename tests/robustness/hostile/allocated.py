"""How much memory a piece of code may take, as Python and numpy count it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_most(size: float) -> Iterator[None]:
    """Fails where the code inside takes `size` bytes or more at any one time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()
