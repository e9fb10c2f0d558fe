"""Run the items of concurrent requests together: micro-batching without a waiting time.

One thread takes up to `batch` waiting items and runs them. Meanwhile new items arrive, so that batches grow with the load by
themselves, and a single request on an idle server never waits for others.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Batcher(Generic[Item, Answer]):
    """Runs items in a thread of its own, in the order of their arrival.

    run: returns one answer per item   batch: maximum number of items per run
    turn: lock that is held during a run, so that several batchers share the cores instead of competing for them
    ran: called with the number of items of each batch
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Sequence[Answer]],
        batch: int,
        turn: threading.Lock,
        ran: Callable[[int], None],
        name: str,
    ) -> None:
        self._run, self._batch, self._turn, self._ran = run, batch, turn, ran
        self._waiting: deque[tuple[Item, asyncio.Future[Answer]]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"fqvit-run-{name}", daemon=True)
        self._thread.start()

    async def submit(self, items: Sequence[Item]) -> list[Answer]:
        """Return the answers to the items. If the caller is cancelled, its items that are still waiting are not run."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Answer]] = [loop.create_future() for _ in items]
        with self._changed:
            if self._closed:
                raise RuntimeError("the batcher is closed")
            self._waiting.extend(zip(items, futures, strict=True))
            self._changed.notify()
        return await asyncio.gather(*futures)

    def close(self) -> None:
        """Run the waiting items, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while taken := self._take():
            items, futures = [item for item, _ in taken], [future for _, future in taken]
            answers: Sequence[Answer] | Exception
            try:
                with self._turn:
                    answers = self._run(items)
            except Exception as error:
                answers = error
            self._ran(len(items))
            futures[0].get_loop().call_soon_threadsafe(_settle, futures, answers)

    def _take(self) -> list[tuple[Item, asyncio.Future[Answer]]]:
        """Wait for items and return them. Return an empty list once the batcher is closed and no items are left."""
        with self._changed:
            while True:
                taken: list[tuple[Item, asyncio.Future[Answer]]] = []
                while self._waiting and len(taken) < self._batch:
                    item, future = self._waiting.popleft()
                    if not future.cancelled():
                        taken.append((item, future))
                if taken or self._closed:
                    return taken
                self._changed.wait()


def _settle(futures: Sequence[asyncio.Future[Answer]], answers: Sequence[Answer] | Exception) -> None:
    """Give each future its answer, or all of them the exception of the run."""
    for position, future in enumerate(futures):
        if future.cancelled():
            continue
        if isinstance(answers, Exception):
            future.set_exception(answers)
        else:
            future.set_result(answers[position])
