"""How commands speak: results on stdout, everything else on stderr. What they say is laid out in text.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol

import typer

from fqvit.errors import FqvitError


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


class Unreadable:
    """Images, named one by one on the command line, that could not be read: each is told when it comes, and at the end the
    exit code tells. One image alone is told once."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.errors: list[FqvitError] = []

    def add(self, error: FqvitError) -> None:
        self.errors.append(error)
        if self.total > 1:
            warn(str(error))

    def refuse(self) -> None:
        """When the others are done."""
        if self.errors:
            many = FqvitError(f"{len(self.errors)} of {self.total} images cannot be read. Repair or remove them.")
            raise self.errors[0] if self.total == 1 else many


def warn_of_skipped(source: Pass) -> int:
    """Says what the last pass could not read; returns how many images that were."""
    count = len(source.skipped)
    if count:
        path, reason = source.skipped[0]
        which = "1 image" if count == 1 else f"{count} images"
        warn(f"skipped {which} of {len(source)} that cannot be read ({path}: {reason}{', ...' if count > 1 else ''}).")
    return count
