"""Test the cache that is keyed by image size: which values it keeps or drops, and its use by several threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fqvit.detect.cache import SizeCache


def test_a_value_is_made_once_per_size() -> None:
    cache: SizeCache[object] = SizeCache(2)
    first = cache.get((32, 64), lambda height, width: [height, width])
    assert first == [32, 64] and cache.get((32, 64), lambda *_: None) is first
    assert cache.get((64, 32), lambda height, width: [height, width]) == [64, 32] and len(cache) == 2


def test_the_least_recently_used_value_is_dropped_before_a_new_one_is_made() -> None:
    cache: SizeCache[int] = SizeCache(2)
    held: list[int] = []

    def make(height: int, width: int) -> int:
        held.append(len(cache))
        return height

    for height in (1, 2, 1, 3, 1):  # 3 replaces 2
        cache.get((height, 1), make)
    assert held == [0, 1, 1] and len(cache) == 2
    cache.get((2, 1), make)
    assert held == [0, 1, 1, 1]


def test_a_failed_value_is_not_cached() -> None:
    cache: SizeCache[int] = SizeCache(2)

    def fail(height: int, width: int) -> int:
        raise ValueError

    with pytest.raises(ValueError):
        cache.get((1, 1), fail)
    assert len(cache) == 0 and cache.get((1, 1), lambda height, width: 5) == 5


def test_threads_make_one_value_at_a_time() -> None:
    cache: SizeCache[int] = SizeCache(1)
    busy = threading.Lock()

    def make(height: int, width: int) -> int:
        assert busy.acquire(blocking=False), "two values are made at the same time"
        time.sleep(0.001)
        busy.release()
        return height

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda i: cache.get((i % 3, 1), make), range(60))) == [i % 3 for i in range(60)]
    assert len(cache) == 1
