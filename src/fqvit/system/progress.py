"""A progress bar on stderr for a person at a terminal; nothing at all for pipes, logs and tests.

The only place where library code may show something, and it does so only when asked through `track`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

T = TypeVar("T")
SHOW_CURSOR = b"\x1b[?25h"
_shown: set[Callable[[], None]] = set()  # how to end each bar that is on the screen


class Progress(Protocol):
    """`track`, or something like it: hands the items on and shows how far it is."""

    def __call__(self, iterable: Iterable[T], total: int | None, label: str) -> Iterable[T]: ...


def track(iterable: Iterable[T], total: int | None, label: str, unit: str = "batches") -> Iterator[T]:
    """The items themselves, with a bar that shows the share done, rate in `unit` a second, and time left."""
    # None where it was closed before the start. Rich is typer's to bring; without it work goes on without a bar.
    if sys.stderr is None or not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield from iterable
        return
    # Late: rich costs a tenth of a second, which `--help` and scripts should not pay.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:.1f} {unit}/s")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    _shown.add(progress.stop)
    try:
        with progress:
            task = progress.add_task(label, total=total)
            for item in iterable:
                yield item
                progress.advance(task)
    finally:
        if not isinstance(sys.exception(), KeyboardInterrupt):  # which may come while the bar itself begins or ends
            _shown.discard(progress.stop)


def end_bars() -> None:
    """For a command that ends early, whose bars may be in the middle of something: ends their lines and shows the cursor."""
    if _shown:
        while _shown:
            with contextlib.suppress(Exception):  # of one that has half begun
                _shown.pop()()
        os.write(2, SHOW_CURSOR)


def abandon_bars() -> None:
    """As end_bars, without waiting for anybody: for a thread that is about to end the process."""
    if _shown:
        _shown.clear()
        os.write(2, SHOW_CURSOR + b"\n")
