"""Micro-batching: order, batch sizes, failures, cancelled requests, and closing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from fqvit.serve.batcher import Batcher


class Runs:
    """A model that doubles numbers. The first run waits until `go` is set, so that later requests are queued."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.batches: list[list[int]] = []

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.go.wait(10)
        self.batches.append(list(items))
        if -1 in items:
            raise ValueError("bad batch")
        return [2 * item for item in items]


def make(runs: Runs, batch: int = 4) -> tuple[Batcher[int, int], list[int]]:
    sizes: list[int] = []
    return Batcher(runs, batch, threading.Lock(), sizes.append, "test"), sizes


async def first_running(runs: Runs, batcher: Batcher[int, int]) -> asyncio.Task[list[int]]:
    """Submit one item and wait until its run has begun."""
    task = asyncio.create_task(batcher.submit([100]))
    while batcher._waiting or not task:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    return task


def test_queued_requests_are_batched_in_order() -> None:
    runs = Runs()
    batcher, sizes = make(runs)

    async def main() -> None:
        first = await first_running(runs, batcher)
        others = [asyncio.create_task(batcher.submit([10 * n, 10 * n + 1])) for n in range(3)]
        await asyncio.sleep(0.01)
        runs.go.set()
        assert await first == [200]
        assert await asyncio.gather(*others) == [[20 * n, 20 * n + 2] for n in range(3)]

    asyncio.run(main())
    batcher.close()
    assert runs.batches == [[100], [0, 1, 10, 11], [20, 21]] and sizes == [1, 4, 2]


def test_a_failed_batch_fails_its_own_requests_only() -> None:
    runs = Runs()
    runs.go.set()
    batcher, _ = make(runs)

    async def main() -> None:
        with pytest.raises(ValueError, match="bad batch"):
            await batcher.submit([-1])
        assert await batcher.submit([3]) == [6]

    asyncio.run(main())
    batcher.close()


def test_items_of_cancelled_requests_are_not_run() -> None:
    runs = Runs()
    batcher, _ = make(runs)

    async def main() -> None:
        first = await first_running(runs, batcher)
        given_up, kept = (asyncio.create_task(batcher.submit([n])) for n in (1, 2))
        await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.sleep(0.01)
        runs.go.set()
        assert await first == [200] and await kept == [4]

    asyncio.run(main())
    batcher.close()
    assert runs.batches == [[100], [2]]


def test_close_finishes_queued_requests_and_rejects_new_ones() -> None:
    runs = Runs()
    batcher, _ = make(runs)

    async def main() -> None:
        first = await first_running(runs, batcher)
        waiting = asyncio.create_task(batcher.submit([7]))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(asyncio.to_thread(batcher.close))
        runs.go.set()
        await closing
        assert await first == [200] and await waiting == [14]
        with pytest.raises(RuntimeError, match="closed"):
            await batcher.submit([1])

    asyncio.run(main())
