"""Workers: who shares the work, and what they do together. A process that torchrun did not start is a worker alone.

Work is dealt in whole batches, neighbours to the same worker, and what they found is folded in the order of the batches, so
that the result is one worker's to the bit. No torch here: group.py, which many workers need, brings it in.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

from fqvit.errors import FqvitError

if TYPE_CHECKING:
    from fqvit.distributed.group import Group


class Mergeable(Protocol):
    """Something found in consecutive batches."""

    def state(self) -> Any:
        """As plain values: see group.py."""

    def merge(self, later: Any) -> None:
        """Adds the state of another, of batches that come after mine."""


class Workers:
    """This worker's number, how many there are, and what they do together: nothing for a worker alone, else through a group.

    Every worker must make the same calls in the same order: each waits for the others, as long as they live.
    """

    _joined: ClassVar[Workers | None] = None

    def __init__(self, group: Group | None = None) -> None:
        self._group = group
        self.rank = 0 if group is None else group.rank
        self.size = 1 if group is None else group.size

    @staticmethod
    def alone() -> Workers:
        """One process that does everything itself."""
        return SINGLE_PROCESS

    @staticmethod
    def from_environment() -> Workers:
        """The workers that torchrun started, joined once a process; a worker alone where there is no torchrun."""
        if Workers._joined is None:
            size = number_in(os.environ, "WORLD_SIZE")
            if size is None or size < 2:
                return SINGLE_PROCESS
            rank = number_in(os.environ, "RANK")
            missing = next((name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ), None)
            if rank is None or missing is not None:
                raise FqvitError(f"WORLD_SIZE is {size}, but {missing} is not set. Start with torchrun, or unset WORLD_SIZE.")
            # Torch's own words about lost connections are dozens of lines of C++; what matters is said in one of ours.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
            before = signal.signal(signal.SIGTERM, _stopped_early)
            try:
                from fqvit.distributed.group import Group

                Workers._joined = Workers(Group.join(rank, size, before))
            except BaseException:
                signal.signal(signal.SIGTERM, before)
                raise
        return Workers._joined

    @property
    def first(self) -> bool:
        """Whether this one writes files and prints results."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Which of `count` batches are this worker's: neighbours, so that the order of workers is that of batches."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def gather(self, value: Any) -> list[Any]:
        """The values of all workers, in their order; every worker gets them."""
        return [value] if self._group is None else self._group.gather(value)

    def broadcast(self, value: Any) -> Any:
        """The first worker's value; what others pass does not matter."""
        return value if self._group is None else self._group.broadcast(value)

    def merge(self, found: Mergeable) -> None:
        """Afterwards the first worker's `found` has what all workers found; those of others are of no more use."""
        if self._group is not None:
            self._group.merge(found.state, found.merge)

    def agree(self, what: str, value: str, remedy: str) -> None:
        """FqvitError unless all workers pass the same value."""
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise FqvitError(f"{what}: worker {rank} has {other}, worker 0 has {values[0]}. {remedy}")

    def fail(self, message: str) -> NoReturn:
        """Ends the work of all workers with one line on stderr."""
        if self._group is not None:
            self._group.fail(message)
        raise FqvitError(message)

    def close(self) -> None:
        """Waits until all workers have come here. Afterwards this worker is on its own."""
        if self._group is not None:
            self._group.close()


SINGLE_PROCESS = Workers()


def joined() -> Workers | None:
    """The workers that this process has joined; None where it works alone."""
    return Workers._joined


def leave() -> None:
    """Ends the membership, if there is one, when all is done."""
    if Workers._joined is not None:
        Workers._joined.close()
        Workers._joined = None


def _stopped_early(*_: object) -> NoReturn:
    """While torch is imported and workers meet, seconds in which nobody can settle yet who speaks: the first does."""
    if os.environ.get("RANK") == "0":
        os.write(2, b"fqvit: a worker was lost while the workers started, or somebody stopped them. Start again.\n")
    os._exit(2)


def cores() -> int:
    """Cores for this process: those it may use, divided by the workers that torchrun started on this machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    size = number_in(os.environ, "WORLD_SIZE") or 1
    here = number_in(os.environ, "LOCAL_WORLD_SIZE") or size
    return max(1, usable // min(here, size)) if size > 1 else usable


def number_in(environment: Mapping[str, str], name: str) -> int | None:
    """What torchrun has set; None where it has not."""
    text = environment.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise FqvitError(f"{name}={text}: expected a number. torchrun sets it; unset it to work alone.")
    return int(text)
