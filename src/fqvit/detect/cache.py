"""A least-recently-used cache of values that depend on the size of an image."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SizeCache(Generic[T]):
    """Hold at most `capacity` values, one per image size (height, width). Thread-safe: values are made one at a time.

    The least recently used value is dropped before a new one is made, so that memory never holds more than `capacity` of them.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._values: OrderedDict[tuple[int, int], T] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, size: tuple[int, int], make: Callable[[int, int], T]) -> T:
        """Return the value for `size`; if it is not cached, make it with make(height, width)."""
        with self._lock:
            if size not in self._values:
                while len(self._values) >= self._capacity:
                    self._values.popitem(last=False)
                self._values[size] = make(*size)
            self._values.move_to_end(size)
            return self._values[size]
