"""Define Workers: the processes that share a job, and the collective operations between them.

Each worker gets a contiguous range of batches, and states are merged in batch order, so the result is bit-identical for every
number of workers. A process that torchrun did not start is single-process: it is the only worker. This module imports
torch (through group.py) only when there are several workers.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

from fqvit.errors import FqvitError

if TYPE_CHECKING:
    from fqvit.distributed.group import Group


class Mergeable(Protocol):
    """A result accumulated over consecutive batches."""

    def state(self) -> Any:
        """Return the result as plain values that group.py can send."""

    def merge(self, later: Any) -> None:
        """Add the state of another worker, whose batches come after those seen here."""


class Workers:
    """This worker's rank, the number of workers, and their collective operations.

    Every worker must make the same calls in the same order. A call waits until all workers have made it.
    """

    _joined: ClassVar[Workers | None] = None

    def __init__(self, group: Group | None = None) -> None:
        self._group = group
        self.rank = 0 if group is None else group.rank
        self.size = 1 if group is None else group.size

    @staticmethod
    def alone() -> Workers:
        """Return the workers of a single-process run: this process only."""
        return SINGLE_PROCESS

    @staticmethod
    def from_environment() -> Workers:
        """Join the workers that torchrun started, once per process. Without torchrun, the run is single-process."""
        if Workers._joined is None:
            size = number_in(os.environ, "WORLD_SIZE")
            if size is None or size < 2:
                return SINGLE_PROCESS
            rank = number_in(os.environ, "RANK")
            missing = next((name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ), None)
            if rank is None or missing is not None:
                raise FqvitError(f"WORLD_SIZE is {size}, but {missing} is not set. Start with torchrun, or unset WORLD_SIZE.")
            # Torch reports a lost connection in dozens of lines from its C++ code; the watchdog reports it in one line.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
            before = signal.signal(signal.SIGTERM, _terminated_early)
            try:
                from fqvit.distributed.group import Group

                Workers._joined = Workers(Group.join(rank, size, before))
            except BaseException:
                signal.signal(signal.SIGTERM, before)
                raise
        return Workers._joined

    @property
    def first(self) -> bool:
        """True for worker 0, which writes files and prints results."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Return which of `count` batches are assigned to this worker: a contiguous range; ranges are ordered by rank."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers, ordered by rank, on every worker."""
        return [value] if self._group is None else self._group.gather(value)

    def broadcast(self, value: Any) -> Any:
        """Return worker 0's value on every worker. The other workers' values are ignored."""
        return value if self._group is None else self._group.broadcast(value)

    def merge(self, found: Mergeable) -> None:
        """Merge the results of all workers into worker 0's. The results of other workers must not be used afterwards."""
        if self._group is not None:
            self._group.merge(found.state, found.merge)

    def fold(self, found: Mergeable) -> None:
        """Deprecated: the name of `merge` in version 0.1.0."""
        warnings.warn("Workers.fold is now called Workers.merge", DeprecationWarning, stacklevel=2)
        self.merge(found)

    def agree(self, what: str, value: str, remedy: str) -> None:
        """Raise FqvitError unless all workers pass the same value."""
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise FqvitError(f"{what}: worker {rank} has {other}, worker 0 has {values[0]}. {remedy}")

    def fail(self, message: str) -> NoReturn:
        """End all workers with one line on stderr. Single-process: raise FqvitError."""
        if self._group is not None:
            self._group.fail(message)
        raise FqvitError(message)

    def close(self) -> None:
        """Wait until all workers have called this, then disconnect."""
        if self._group is not None:
            self._group.close()


SINGLE_PROCESS = Workers()


def joined() -> Workers | None:
    """Return the workers that this process has joined, or None if it is single-process."""
    return Workers._joined


def leave() -> None:
    """Close the connection to the other workers, if there is one."""
    if Workers._joined is not None:
        Workers._joined.close()
        Workers._joined = None


def _terminated_early(*_: object) -> NoReturn:
    """Handle SIGTERM before the workers are connected. They cannot agree yet on who prints the message, so worker 0 does."""
    if os.environ.get("RANK") == "0":
        os.write(2, b"fqvit: a worker was lost while the workers started, or all of them were terminated. Start again.\n")
    os._exit(2)


def cores() -> int:
    """Return the number of CPU cores for this process: usable cores / number of workers that torchrun started here."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    size = number_in(os.environ, "WORLD_SIZE") or 1
    here = number_in(os.environ, "LOCAL_WORLD_SIZE") or size
    return max(1, usable // min(here, size)) if size > 1 else usable


def number_in(environment: Mapping[str, str], name: str) -> int | None:
    """Return the number in a variable that torchrun sets, or None if it is not set."""
    text = environment.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise FqvitError(f"{name}={text}: expected a number, as torchrun sets it. Unset it to run a single process.")
    return int(text)
