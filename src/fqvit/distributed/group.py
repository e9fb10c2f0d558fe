"""Many workers: torch.distributed over gloo, as torchrun starts them.

What travels is plain: numbers, strings, lists, dictionaries with string keys and numpy arrays, as MessagePack. Nothing is
unpickled, so that a neighbour on the network cannot run code here. Waits have no time limit; watchdog.py ends them if a
worker is lost.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fqvit.distributed.watchdog import ARRIVE, Handler, Watchdog
from fqvit.errors import FqvitError

ARRAY = 1  # MessagePack's number for our kind of value
NO_LIMIT = timedelta(days=365)
T = TypeVar("T")


class Group:
    """One of several workers. workers.py says what the calls mean."""

    def __init__(self, rank: int, size: int, watchdog: Watchdog) -> None:
        self.rank, self.size, self._watchdog = rank, size, watchdog

    @classmethod
    def join(cls, rank: int, size: int, handler: Handler) -> Group:
        """Meets the others at MASTER_ADDR; returns when all are there. handler: SIGTERM's, for the time after `close`."""
        try:
            store, _, _ = _heeding_signals(lambda: next(rendezvous("env://", timeout=timedelta(seconds=ARRIVE))))
            # torchrun's store outlives the workers that it starts again, and so would their bad news.
            prefix = f"fqvit/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
            watchdog = Watchdog(PrefixStore(f"{prefix}/watch", store.clone()), rank, size, handler)
            watchdog.arrive()
        except (RuntimeError, ValueError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            reason = str(error).splitlines()[0]
            raise FqvitError(f"worker {rank}: cannot meet the others at {where} ({reason}). Start all workers anew.") from None
        watchdog.start()
        self = cls(rank, size, watchdog)
        with self._together():
            mine = PrefixStore(f"{prefix}/gloo", store)
            dist.init_process_group("gloo", store=mine, rank=rank, world_size=size, timeout=NO_LIMIT)
        return self

    def gather(self, value: Any) -> list[Any]:
        values = [value]
        self.merge(lambda: values, values.extend)
        found: list[Any] = self.broadcast(values)
        return found

    def broadcast(self, value: Any) -> Any:
        payload = _bytes(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        with self._together():
            length = torch.tensor([len(payload)])
            dist.broadcast(length, 0)
            if self.rank:
                payload = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(payload, 0)
        return _value(payload)

    def merge(self, state: Callable[[], Any], merge: Callable[[Any], None]) -> None:
        """In log2(size) rounds each worker takes what its neighbour behind has and hands both on, until the first has all."""
        step = 1
        while step < self.size:
            if self.rank % (2 * step):
                with self._together():
                    self._send(_bytes(state()), self.rank - step)
                return
            if self.rank + step < self.size:
                with self._together():
                    payload = self._receive(self.rank + step)
                merge(_value(payload))
            step *= 2

    def fail(self, message: str) -> NoReturn:
        self._watchdog.fail(message)

    def close(self) -> None:
        self._watchdog.leave()
        with self._together():
            dist.barrier()
        self._watchdog.stop()
        dist.destroy_process_group()

    def _send(self, payload: torch.Tensor, to: int) -> None:
        dist.send(torch.tensor([len(payload)]), to)
        dist.send(payload, to)

    def _receive(self, source: int) -> torch.Tensor:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, source)
        payload = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(payload, source)
        return payload

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0].rpartition("] ")[2].rstrip(".")
            self._watchdog.lost(f"a worker was lost ({reason}).")


def _heeding_signals(call: Callable[[], T]) -> T:
    """What call() gives, by a thread of its own: inside torch the main thread would heed no signal until it is over."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="fqvit-meet", daemon=True).start()
    while not result.done():
        time.sleep(0.02)
    return result.result()


def _bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(value, enc_hook=_pack)), dtype=torch.uint8)


def _value(payload: torch.Tensor) -> Any:
    return msgspec.msgpack.decode(payload.numpy().data, ext_hook=_unpack)


def _pack(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        raise TypeError(f"{type(value).__name__} does not travel between workers")
    head = msgspec.msgpack.encode((value.dtype.str, value.shape))
    return msgspec.msgpack.Ext(ARRAY, len(head).to_bytes(4, "little") + head + value.tobytes())


def _unpack(code: int, data: memoryview) -> Any:
    if code != ARRAY:
        raise ValueError(f"unknown kind of value {code}")
    length = int.from_bytes(data[:4], "little")
    dtype, shape = msgspec.msgpack.decode(data[4 : 4 + length], type=tuple[str, tuple[int, ...]])
    return np.frombuffer(data[4 + length :], dtype).reshape(shape).copy()
