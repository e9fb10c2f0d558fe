"""How a command ends: well, or with one line on stderr and an exit code, for all workers if there are several.

No heavy import: `fqvit --help` passes here. Neighbours: cli.py (the commands), watch.py (the line, if workers share the work).
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from fqvit import workers
from fqvit.errors import FqvitError


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
    try:
        yield
        if sys.stdout is not None:  # None where it was closed before the start
            sys.stdout.flush()  # here, so that a closed pipe is noticed here
        workers.leave()
    except FqvitError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader has left. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}.")
    except Exception as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            fail("there is not enough memory. Free some, use fewer workers on a machine, or a machine with more.")
        if workers.joined() is None:
            raise
        traceback.print_exc()
        fail(f"{type(error).__name__}: {error}. This is not your mistake; please report it.")


def fail(message: str) -> NoReturn:
    if (together := workers.joined()) is not None:
        together.fail(message)
    typer.echo(f"fqvit: {' '.join(message.split())}", err=True)
    raise SystemExit(2)
