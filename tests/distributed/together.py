"""Start several workers for tests: as threads of one process, or as processes that run a script or a command."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from fqvit.distributed.group import Group, _bytes, _value
from fqvit.distributed.workers import Workers

T = TypeVar("T")
Mail = dict[tuple[int, int], "queue.Queue[torch.Tensor | None]"]


class OtherFailed(Exception):
    """Another worker raised an exception, so it will send nothing."""


class ThreadGroup(Group):
    """A worker that is a thread and communicates through queues instead of gloo. Everything else is the code under test.

    Only the thread that holds the lock `baton` runs, because torch.fx cannot trace in two threads. Waiting threads release it.
    """

    def __init__(self, rank: int, size: int, mail: Mail, baton: threading.Lock | None = None) -> None:
        self.rank, self.size, self._mail, self._baton = rank, size, mail, baton or threading.Lock()

    def _send(self, payload: torch.Tensor, to: int) -> None:
        self._mail[self.rank, to].put(payload)

    def _receive(self, source: int) -> torch.Tensor:
        self._baton.release()
        payload = self._mail[source, self.rank].get(timeout=60)
        self._baton.acquire()
        if payload is None:
            raise OtherFailed
        return payload

    def broadcast(self, value: Any) -> Any:
        if self.rank == 0:
            for rank in range(1, self.size):
                self._send(_bytes(value), rank)
            return _value(_bytes(value))
        return _value(self._receive(0))


def together(size: int, work: Callable[[Workers], T]) -> list[T]:
    """Run work(worker) in `size` workers and return the results. Raise the exception of the first worker that failed."""
    mail: Mail = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
    results: list[Any] = [None] * size
    baton = threading.Lock()

    def run(rank: int) -> None:
        with baton:
            try:
                results[rank] = work(Workers(ThreadGroup(rank, size, mail, baton)))
            except Exception as error:
                results[rank] = error
                for other in range(size):
                    mail[rank, other].put(None)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, OtherFailed):
            raise result
    return results


def start(commands: Sequence[Sequence[object]], **environment: str) -> list[subprocess.Popen[str]]:
    """Start one process per command, with the environment that torchrun would set."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | environment
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=shared | {"RANK": str(rank), "WORLD_SIZE": str(len(commands))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
        )
        for rank, command in enumerate(commands)
    ]


def ends(processes: Sequence[subprocess.Popen[str]], seconds: float = 60) -> list[tuple[int, str, str]]:
    """Wait for the processes and return (exit code, stdout, stderr) of each."""
    found = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            for other in processes:
                other.kill()
            raise
        found.append((process.returncode, out, err))
    return found
