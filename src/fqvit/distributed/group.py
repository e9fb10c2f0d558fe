"""Connect several workers through torch.distributed and gloo, and run collective operations between them.

Values are sent as MessagePack: numbers, strings, lists, dictionaries with string keys, and numpy arrays. Nothing is unpickled,
so another machine on the network cannot run code here. Operations wait without a time limit; watchdog.py ends them if a
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

from fqvit.distributed.watchdog import RENDEZVOUS, Handler, Watchdog
from fqvit.errors import FqvitError

ARRAY = 1  # MessagePack extension type of a numpy array
NO_LIMIT = timedelta(days=365)
T = TypeVar("T")


class Group:
    """This worker's connection to the other workers. workers.py documents the operations."""

    def __init__(self, rank: int, size: int, watchdog: Watchdog) -> None:
        self.rank, self.size, self._watchdog = rank, size, watchdog

    @classmethod
    def join(cls, rank: int, size: int, handler: Handler) -> Group:
        """Connect to all workers at MASTER_ADDR (rendezvous). handler: the SIGTERM handler that `close` restores."""
        try:
            store, _, _ = _interruptible(lambda: next(rendezvous("env://", timeout=timedelta(seconds=RENDEZVOUS))))
            # torchrun's store survives a restart of the workers, so their keys need a prefix per restart.
            prefix = f"fqvit/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
            watchdog = Watchdog(PrefixStore(f"{prefix}/watch", store.clone()), rank, size, handler)
            watchdog.wait_for_all()
        except (RuntimeError, ValueError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            reason = str(error).splitlines()[0]
            message = f"worker {rank}: cannot connect to the others at {where} ({reason}). Start all workers again."
            raise FqvitError(message) from None
        watchdog.start()
        self = cls(rank, size, watchdog)
        with self._reporting_loss():
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
        with self._reporting_loss():
            length = torch.tensor([len(payload)])
            dist.broadcast(length, 0)
            if self.rank:
                payload = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(payload, 0)
        return _value(payload)

    def merge(self, state: Callable[[], Any], merge: Callable[[Any], None]) -> None:
        """Merge states along a binary tree. In each round, every second remaining worker sends its state to its predecessor."""
        step = 1
        while step < self.size:
            if self.rank % (2 * step):
                with self._reporting_loss():
                    self._send(_bytes(state()), self.rank - step)
                return
            if self.rank + step < self.size:
                with self._reporting_loss():
                    payload = self._receive(self.rank + step)
                merge(_value(payload))
            step *= 2

    def fail(self, message: str) -> NoReturn:
        self._watchdog.fail(message)

    def close(self) -> None:
        self._watchdog.finish()
        with self._reporting_loss():
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
    def _reporting_loss(self) -> Iterator[None]:
        """End all workers if a call to torch fails, which happens when another worker is lost."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0].rpartition("] ")[2].rstrip(".")
            self._watchdog.report_loss(f"a worker was lost ({reason}).")


def _interruptible(call: Callable[[], T]) -> T:
    """Run call() in a thread and return its result: while the main thread is inside torch, Python handles no signals."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="fqvit-rendezvous", daemon=True).start()
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
        raise TypeError(f"{type(value).__name__} cannot be sent between workers")
    head = msgspec.msgpack.encode((value.dtype.str, value.shape))
    return msgspec.msgpack.Ext(ARRAY, len(head).to_bytes(4, "little") + head + value.tobytes())


def _unpack(code: int, data: memoryview) -> Any:
    if code != ARRAY:
        raise ValueError(f"unknown MessagePack extension type {code}")
    length = int.from_bytes(data[:4], "little")
    dtype, shape = msgspec.msgpack.decode(data[4 : 4 + length], type=tuple[str, tuple[int, ...]])
    return np.frombuffer(data[4 + length :], dtype).reshape(shape).copy()
