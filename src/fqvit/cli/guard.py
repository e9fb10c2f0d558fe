"""How a command ends: well, or with one line on stderr and an exit code, for all workers if there are several.

No heavy import: `fqvit --help` passes here. Neighbours: app.py (the commands), watchdog.py (the line, of many workers).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from fqvit.distributed import workers
from fqvit.errors import FqvitError
from fqvit.system import progress, signals
from fqvit.system.files import FULL, remedy


def command(app: typer.Typer, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a command whose failures end in one line and an exit code."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def guarded(*args: object, **options: object) -> None:
            with one_line_errors():
                function(*args, **options)

        app.command(name)(guarded)
        return function

    return register


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Around a whole command. Mistakes of the user have exit code 2; bugs keep their traceback."""
    with signals.cleanup_on_signal():
        try:
            yield
            if sys.stdout is not None:  # None where it was closed before the start
                sys.stdout.flush()  # here, so that a closed pipe is noticed here
            workers.leave()
        except BaseException as error:
            progress.end_bars()  # or the cursor would stay hidden, and the bar would share its line with what is said
            _end(error)


def _end(error: BaseException) -> NoReturn:
    """Ends the command by SystemExit; an error that is a bug is raised again."""
    _leave_broken_stdout()
    if (code := signals.exit_code()) is not None:
        raise SystemExit(code) from None
    try:
        raise error
    except FqvitError:
        fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        raise SystemExit(141) from None
    except OSError as failed:
        where = f"{failed.filename}: " if failed.filename else ""
        advice = remedy(failed) if failed.errno in FULL else ""  # of others one cannot know whether they were about writing
        fail(f"{where}{failed.strerror or failed}. {advice}")
    except Exception:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            fail("there is not enough memory. Free some, use fewer workers on a machine, or a machine with more.")
        if workers.joined() is None:
            raise
        traceback.print_exc()
        fail(f"{type(error).__name__}: {error}. This is not your mistake; please report it.")


def _leave_broken_stdout() -> None:
    """Its reader has left, or its disk is full: Python would complain of that once more when it flushes at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str) -> NoReturn:
    if (together := workers.joined()) is not None:
        together.fail(message)
    with contextlib.suppress(OSError):  # stderr may be a full disk, too; the exit code still tells
        typer.echo(f"fqvit: {' '.join(message.split())}", err=True)
    raise SystemExit(2)
