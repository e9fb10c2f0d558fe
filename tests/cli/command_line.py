"""Run fqvit commands in the test process, and return the exit code, stdout and stderr."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass

import pytest

from fqvit.cli.app import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        """Return the object on the last line of stdout, where --json prints it."""
        assert self.code == 0, self.err
        return json.loads(self.out.splitlines()[-1])


def fqvit(*words: object) -> Outcome:
    """Run `fqvit WORDS`."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["fqvit", *map(str, words)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
            main()
    finally:
        sys.argv = before
    return Outcome(end.value.code or 0, out.getvalue(), err.getvalue())  # type: ignore[arg-type]


def assert_rejected(done: Outcome, *words: str) -> None:
    """Assert that the command failed with exit code 2 and one line on stderr, which contains all `words`."""
    assert done.code == 2
    assert done.err.startswith("fqvit: ") and len(done.err.splitlines()) == 1, done.err
    for word in words:
        assert word in done.err
