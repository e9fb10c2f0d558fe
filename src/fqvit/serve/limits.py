"""The limits of a server. Everything that a client controls has a limit that is checked before the work starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fqvit.errors import FqvitError

BODIES_AT_ONCE = 16  # number of bodies of maximum size that may be in memory at the same time


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    body: maximum number of bytes per request body   pixels: maximum number of pixels per image
    images: maximum number of images per request   queue: maximum number of images that were accepted and not answered yet
    batch: maximum number of images per batch   seconds: maximum time per request, from its headers to the answer
    connections: maximum number of open connections
    """

    body: int = 20_000_000
    pixels: int = 50_000_000
    images: int = 64
    queue: int = 256
    batch: int = 8
    seconds: float = 30.0
    connections: int = 512

    @property
    def header_seconds(self) -> float:
        """Maximum time from the opening of a connection, or from the first byte of a request, to the end of its headers."""
        return min(10.0, self.seconds)

    def __post_init__(self) -> None:
        options = {"--max-body": self.body, "--max-pixels": self.pixels, "--queue": self.queue, "--batch": self.batch}
        for option, value in options.items():
            if value < 1:
                raise FqvitError(f"{option} {value}: expected at least 1.")
        if not 0.001 <= self.seconds < float("inf"):  # also rejects nan
            raise FqvitError(f"--timeout {self.seconds:g}: expected a number of seconds, at least 0.001.")


class Rejected(Exception):
    """A request that is answered with an error. status: HTTP status code   message: one line for the client"""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Budget:
    """Counts something that many requests share. Not thread-safe: used by the event loop only."""

    def __init__(self, size: int, status: int, message: str) -> None:
        """size: the total amount   status, message: the answer to requests that need more than is left"""
        self.size, self.used = size, 0
        self._status, self._message = status, message

    def take(self, amount: int) -> None:
        """Take an amount, or raise Rejected if there is not enough left."""
        if self.used + amount > self.size:
            raise Rejected(self._status, self._message)
        self.used += amount

    def give_back(self, amount: int) -> None:
        self.used -= amount

    @contextmanager
    def holding(self, amount: int) -> Iterator[None]:
        """Take an amount for the duration of the block."""
        self.take(amount)
        try:
            yield
        finally:
            self.give_back(amount)
