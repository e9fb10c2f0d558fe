"""Turn exceptions of a command into one line on stderr and an exit code.

With several workers, distributed/watchdog.py prints the line once and ends all of them. No heavy imports: `fqvit --help`
imports this module.
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
    """Return a decorator that registers a command inside `one_line_errors`."""

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
    """Report errors of the enclosed command in one line. User errors exit with code 2; bugs keep their traceback."""
    with signals.cleanup_on_signal():
        try:
            yield
            if sys.stdout is not None:  # None if it was closed before the start
                sys.stdout.flush()  # so that a closed pipe raises here
            workers.leave()
        except BaseException as error:
            progress.end_bars()  # otherwise the cursor stays hidden and the message is appended to the bar
            _end(error)


def _end(error: BaseException) -> NoReturn:
    """Raise SystemExit with the exit code for this error. Raise the error itself if it is a bug."""
    _replace_broken_stdout()
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
        advice = remedy(failed) if failed.errno in FULL else ""  # advice is about writing; other errors may come from reading
        fail(f"{where}{failed.strerror or failed}. {advice}")
    except Exception:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            fail("not enough memory. Free some, use fewer workers per machine, or use a larger machine.")
        if workers.joined() is None:
            raise
        traceback.print_exc()
        fail(f"{type(error).__name__}: {error}. This is a bug in fqvit; please report it.")


def _replace_broken_stdout() -> None:
    """Redirect a closed or full stdout to /dev/null: otherwise Python reports the error again when it flushes at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str) -> NoReturn:
    """Print the message as one line on stderr and exit with code 2, on all workers if there are several."""
    if (group := workers.joined()) is not None:
        group.fail(message)
    with contextlib.suppress(OSError):  # stderr may be on a full disk as well; the exit code remains
        typer.echo(f"fqvit: {' '.join(message.split())}", err=True)
    raise SystemExit(2)
