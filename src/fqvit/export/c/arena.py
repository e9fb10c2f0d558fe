"""Plan the arena: give every buffer a byte offset, so that buffers in use together do not overlap.

See also: native/core/arena.cpp, the planner of the native engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

ALIGNMENT = 8  # bytes; no op needs it, but some processors are faster with it


def plan_arena(sizes: Mapping[str, int], lifetimes: Mapping[str, tuple[int, int]]) -> tuple[dict[str, int], int]:
    """Return the offset of every buffer and the size of the arena, in bytes.

    sizes: bytes per buffer   lifetimes: indices of the first and last op that use a buffer, both inclusive

    Greedy first fit in three orders: by size, by length of the lifetime and by first use. No order is best for every network,
    so the smallest of the three arenas is returned.
    """
    orders: list[Callable[[str], tuple[int, ...]]] = [
        lambda name: (-sizes[name],),
        lambda name: (lifetimes[name][0] - lifetimes[name][1], -sizes[name]),
        lambda name: (lifetimes[name][0], -sizes[name]),
    ]
    return min((_first_fit(sizes, lifetimes, sorted(sizes, key=key)) for key in orders), key=lambda found: found[1])


def _first_fit(
    sizes: Mapping[str, int], lifetimes: Mapping[str, tuple[int, int]], order: list[str]
) -> tuple[dict[str, int], int]:
    """Place buffers in this order, each at the lowest offset where it overlaps no placed buffer that is in use with it."""
    offsets: dict[str, int] = {}
    total = 0
    for name in order:
        first, last = lifetimes[name]
        occupied = sorted(
            (offsets[other], offsets[other] + sizes[other])
            for other in offsets
            if lifetimes[other][0] <= last and first <= lifetimes[other][1]
        )
        offset = 0
        for begin, end in occupied:
            if offset + sizes[name] <= begin:
                break
            offset = max(offset, -(-end // ALIGNMENT) * ALIGNMENT)
        offsets[name] = offset
        total = max(total, offset + sizes[name])
    return offsets, total
