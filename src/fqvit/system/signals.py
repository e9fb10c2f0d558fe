"""Signals that ask a command to stop: Ctrl-C (SIGINT), `kill` (SIGTERM), a terminal that was closed (SIGHUP).

Outside `tidily` nothing has been begun, or all is done, and they end the process without a word. Inside they raise
Stopped, so that files and the terminal are put in order first. Exit codes are those of shells, 128 + signal. Only the
command line calls `install`: a library leaves signals to its program. Neighbours: cli/guard.py, watchdog.py (many workers).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Stopped(KeyboardInterrupt):
    """Of its own kind: after a plain KeyboardInterrupt inside an import Python kills itself, whatever the exit code."""


_mine: list[int] = []  # the signals that `install` took
_came: int | None = None  # the first that came inside `tidily`


def install() -> None:
    """Takes those signals that nobody else has: `nohup` and shells ignore some for their children, and that stays."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)
            _mine.append(number)
    if _mine:
        sys.unraisablehook = _again


@contextmanager
def tidily() -> Iterator[None]:
    """Around all work of a command. Nothing happens here where `install` was not called."""
    _take(_raise)
    try:
        yield
    finally:
        _take(_end)


def exit_code() -> int | None:
    """Of a command that was asked to stop; None if it was not. Imports and libraries may make any error of an interruption."""
    return None if _came is None else 128 + _came


def _take(handler: object) -> None:
    for number in _mine:
        signal.signal(number, handler)  # type: ignore[arg-type]


def _raise(number: int, _: FrameType | None) -> NoReturn:
    global _came  # noqa: PLW0603  # a process ends once
    _came = _came or number
    raise Stopped


def _end(number: int, _: FrameType | None) -> NoReturn:
    os._exit(128 + number)


def _again(dropped: sys.UnraisableHookArgs) -> None:
    """Python drops what is raised inside `__del__` and the callbacks of weak references, of which an import has many. The
    signal then comes once more, a moment later, from a thread: it would end up in here otherwise."""
    if _came is None or not isinstance(dropped.exc_value, Stopped):
        sys.__unraisablehook__(dropped)
        return
    import _thread
    import threading

    again = threading.Timer(0.02, _thread.interrupt_main, (_came,))
    again.daemon = True
    again.start()
