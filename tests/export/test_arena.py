"""Tests of the arena planner of C exports: buffers in use together never overlap, and memory is reused."""

from __future__ import annotations

import itertools

import numpy as np

from fqvit.export.c.arena import ALIGNMENT, plan_arena


def test_buffers_in_use_at_the_same_time_do_not_overlap() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        names = [str(i) for i in range(rng.integers(1, 12))]
        sizes = {name: int(rng.integers(1, 100)) for name in names}
        firsts = {name: int(rng.integers(0, 10)) for name in names}
        lifetimes = {name: (first, first + int(rng.integers(0, 5))) for name, first in firsts.items()}
        offsets, total = plan_arena(sizes, lifetimes)
        assert total == max(offsets[name] + sizes[name] for name in names)
        assert all(offset % ALIGNMENT == 0 for offset in offsets.values())
        for a, b in itertools.combinations(names, 2):
            together = lifetimes[a][0] <= lifetimes[b][1] and lifetimes[b][0] <= lifetimes[a][1]
            apart = offsets[a] + sizes[a] <= offsets[b] or offsets[b] + sizes[b] <= offsets[a]
            assert apart or not together, (sizes, lifetimes, offsets)


def test_a_buffer_reuses_memory_that_is_no_longer_in_use() -> None:
    offsets, total = plan_arena({"a": 64, "b": 32, "c": 64}, {"a": (0, 1), "b": (1, 2), "c": (2, 3)})
    assert offsets == {"a": 0, "b": 64, "c": 0} and total == 96


def test_the_smallest_arena_of_three_placement_orders_is_returned() -> None:
    sizes = {"a": 16, "b": 16, "c": 24, "d": 8, "e": 24}
    lifetimes = {"a": (0, 0), "b": (0, 1), "c": (2, 4), "d": (0, 2), "e": (1, 3)}
    assert plan_arena(sizes, lifetimes)[1] == 56  # placed by size: 72 bytes, by length of the lifetime: 56, by first use: 64
