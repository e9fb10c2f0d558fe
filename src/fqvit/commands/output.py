"""How commands speak: results on stdout, everything else on stderr, tables as plain aligned text.

Plain text and not rich: it costs nothing to start and reads the same in a terminal, a log and a pipe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Protocol

import typer


class Pass(Protocol):
    """A pass over images: how many, and (name, reason) of those that could not be read."""

    skipped: list[tuple[str, str]]

    def __len__(self) -> int: ...


def say(text: str = "") -> None:
    try:
        typer.echo(text)
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk behind `> FILE`
        raise OSError(error.errno, error.strerror, "stdout") from None


def say_json(result: Mapping[str, object]) -> None:
    """One object, one line, the last of stdout."""
    say(json.dumps(result, allow_nan=False))


def warn(text: str) -> None:
    typer.echo(f"fqvit: warning: {text}", err=True)


def warn_of_skipped(source: Pass) -> int:
    """Says what the last pass could not read; returns how many images that were."""
    count = len(source.skipped)
    if count:
        path, reason = source.skipped[0]
        which = "1 image" if count == 1 else f"{count} images"
        warn(f"skipped {which} of {len(source)} that cannot be read ({path}: {reason}{', ...' if count > 1 else ''}).")
    return count


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Aligned columns: the first `left` of them to the left, the others (numbers) to the right."""
    every = [head, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(head))]
    lines = []
    for row in every:
        cells = [cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """A name and a value a line."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def size(count: int) -> str:
    """Bytes for people, in powers of ten."""
    for unit, scale in (("MB", 1_000_000), ("kB", 1_000)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} bytes"
