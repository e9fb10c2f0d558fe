"""A progress bar on stderr for a person at a terminal; nothing at all for pipes, logs and tests.

The only place where library code may show something, and it does so only when asked through `track`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

T = TypeVar("T")


class Progress(Protocol):
    """`track`, or something like it: hands the items on and shows how far it is."""

    def __call__(self, iterable: Iterable[T], total: int | None, label: str) -> Iterable[T]: ...


def track(iterable: Iterable[T], total: int | None, label: str, unit: str = "batches") -> Iterator[T]:
    """The items themselves, with a bar that shows the share done, rate in `unit` a second, and time left."""
    if not sys.stderr.isatty():
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
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=total)
        for item in iterable:
            yield item
            progress.advance(task)
