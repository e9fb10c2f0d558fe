"""Show progress: as a bar on stderr if it is a terminal, as a bar below the cell of a notebook, otherwise not at all.

Long-running functions have an argument `progress`. In functions that users call directly, its default is `track`. None shows no
progress.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from html import escape
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
REDRAW_SECONDS = 0.2  # minimum time between two updates of the bar in a notebook
SHOW_CURSOR = b"\x1b[?25h"
_shown: set[Callable[[], None]] = set()  # functions that stop the visible bars, one per bar


class Progress(Protocol):
    """A function like `track`: yields the items of an iterable and shows the progress."""

    def __call__(self, iterable: Iterable[T], total: int | None, label: str) -> Iterable[T]: ...


def track(iterable: Iterable[T], total: int | None, label: str, unit: str = "batches") -> Iterator[T]:
    """Yield the items, and show a bar with the fraction done, the rate in `unit` per second and the remaining time."""
    if (display := _notebook_display()) is not None:
        yield from _track_in_notebook(iterable, total, label, display)
        return
    if not _has_terminal():
        yield from iterable
        return
    # Late: importing rich takes 0.1 s, which `--help` and scripts should not wait for.
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
        # Ctrl-C may interrupt the bar while it starts or stops; end_bars() then stops it.
        if not isinstance(sys.exception(), KeyboardInterrupt):
            _shown.discard(progress.stop)


def _track_in_notebook(iterable: Iterable[T], total: int | None, label: str, display: Callable[..., Any]) -> Iterator[T]:
    """Yield the items, and show a bar as the output of the running cell of a notebook."""
    start = drawn = time.monotonic()
    handle, count = display(_notebook_bar(label, 0, total, 0.0), raw=True, display_id=True), 0
    try:
        for item in iterable:
            yield item
            count += 1
            now = time.monotonic()
            if now - drawn >= REDRAW_SECONDS:
                handle.update(_notebook_bar(label, count, total, now - start), raw=True)
                drawn = now
    finally:
        handle.update(_notebook_bar(label, count, total, time.monotonic() - start), raw=True)


def _notebook_bar(label: str, count: int, total: int | None, seconds: float) -> dict[str, str]:
    """Return a bar as text and as HTML, for IPython's display."""
    left = f", {seconds / count * (total - count):.0f} s left" if total is not None and 0 < count < total else ""
    text = f"{label}: {count}{'' if total is None else f' of {total}'}, {seconds:.0f} s{left}"
    bar = "" if total is None else f'<progress value="{count}" max="{total}"></progress> '
    return {"text/plain": text, "text/html": f"{bar}{escape(text)}"}


def _notebook_display() -> Callable[..., Any] | None:
    """Return IPython's display function in a notebook, None elsewhere. IPython in a terminal counts as a terminal."""
    ipython: Any = sys.modules.get("IPython")  # already imported if this is a notebook
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or type(shell).__name__ == "TerminalInteractiveShell":
        return None
    display: Callable[..., Any] = importlib.import_module("IPython.display").display
    return display


@contextlib.contextmanager
def busy(label: str) -> Iterator[None]:
    """Show a label and the elapsed time during work that has no countable steps. The line disappears at the end."""
    if not _has_terminal():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    _shown.add(progress.stop)
    try:
        with progress:
            progress.add_task(label, total=None)
            yield
    finally:
        if not isinstance(sys.exception(), KeyboardInterrupt):  # as in `track`
            _shown.discard(progress.stop)


def _has_terminal() -> bool:
    """Return whether stderr is a terminal and rich, a dependency of typer, is installed."""
    # sys.stderr is None if it was closed before the process started.
    return sys.stderr is not None and sys.stderr.isatty() and importlib.util.find_spec("rich") is not None


def end_bars() -> None:
    """Stop all visible bars of a command that ends early: end their lines and show the cursor."""
    if _shown:
        while _shown:
            with contextlib.suppress(Exception):  # from a bar that was interrupted while it started
                _shown.pop()()
        os.write(2, SHOW_CURSOR)


def abandon_bars() -> None:
    """Show the cursor without waiting for other threads: for a background thread that is about to end the process."""
    if _shown:
        _shown.clear()
        os.write(2, SHOW_CURSOR + b"\n")
