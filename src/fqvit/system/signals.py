"""Handle termination signals of a command: Ctrl-C (SIGINT), `kill` (SIGTERM) and a closed terminal (SIGHUP).

Inside `cleanup_on_signal` a signal raises Terminated, so that temporary files and the terminal are cleaned up first. Outside
it there is nothing to clean up, and a signal ends the process at once without a message. Exit codes are 128 + signal, as in
shells. Only the command line calls `install`: a library leaves signals to the program that uses it.
See also: cli/guard.py, and distributed/watchdog.py for several workers.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """A termination signal arrived.

    A subclass is needed because after a plain KeyboardInterrupt during an import, Python kills itself with SIGINT and ignores
    the exit code.
    """


_installed: list[int] = []  # the signals that `install` handles
_received: int | None = None  # the first signal inside `cleanup_on_signal`


def install() -> None:
    """Handle the signals that still have their default handler. Signals that `nohup` or a shell ignores stay ignored."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _exit)
            _installed.append(number)
    if _installed:
        sys.unraisablehook = _resend_dropped


@contextmanager
def cleanup_on_signal() -> Iterator[None]:
    """Raise Terminated on a signal while a command works. Does nothing unless `install` was called."""
    _set_handlers(_raise)
    try:
        yield
    finally:
        _set_handlers(_exit)


def exit_code() -> int | None:
    """Return 128 + the received signal, or None if there was none.

    Callers cannot rely on Terminated alone: imports and libraries may turn it into any other exception.
    """
    return None if _received is None else 128 + _received


def _set_handlers(handler: object) -> None:
    for number in _installed:
        signal.signal(number, handler)  # type: ignore[arg-type]


def _raise(number: int, _: FrameType | None) -> NoReturn:
    global _received  # noqa: PLW0603  # a process is terminated once
    _received = _received or number
    raise Terminated


def _exit(number: int, _: FrameType | None) -> NoReturn:
    os._exit(128 + number)


def _resend_dropped(dropped: sys.UnraisableHookArgs) -> None:
    """Send the signal again when Python has dropped the exception that it raised.

    Python drops exceptions raised in `__del__` and in callbacks of weak references, which are frequent during imports. A timer
    thread sends the signal a moment later, because a signal sent at once would raise its exception in the same callback.
    """
    if _received is None or not isinstance(dropped.exc_value, Terminated):
        sys.__unraisablehook__(dropped)
        return
    import _thread
    import threading

    again = threading.Timer(0.02, _thread.interrupt_main, (_received,))
    again.daemon = True
    again.start()
