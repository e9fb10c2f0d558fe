"""Run a command on a pseudo terminal, and send it a signal at some moment, as Ctrl-C and `kill` do."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import fqvit

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
BEFORE_FQVIT = ("Failed to import the site module", "Could not import runpy module", "<frozen runpy>")
OURS = str(Path(fqvit.__file__).with_name("__main__.py"))  # from its first line on, fqvit handles signals
QUIET = {"OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "100"}


@dataclass(frozen=True)
class Ended:
    """The result of a command. code: as in Popen, negative for a signal. screen: all output. left: processes still running."""

    code: int
    screen: str
    seconds: float
    left: list[int] = field(default_factory=list)

    def faults(self, codes: Sequence[int]) -> list[str]:
        """List the violations after a signal. codes: the allowed exit codes."""
        if any(words in self.screen for words in BEFORE_FQVIT) and OURS not in self.screen:
            return []  # the signal came in the first 0.1 s, before any line of fqvit ran
        found = []
        if self.code not in codes:
            found.append(f"exit code {self.code}")
        if "Traceback" in self.screen or "Error" in self.screen or "Exception ignored" in self.screen:
            found.append(f"a traceback: {self.screen[-2000:]!r}")
        if self.screen.rfind(HIDE) > self.screen.rfind(SHOW):
            found.append("the cursor is hidden")
        if self.screen and not self.screen.endswith("\n") and not self.screen.endswith(SHOW):
            found.append(f"the last line has no newline: {self.screen[-200:]!r}")
        if self.left:
            found.append(f"processes left running: {self.left}")
        return found


def run(
    words: Sequence[object],
    folder: Path,
    signum: int | None = None,
    after: float = 0.0,
    *,
    group: bool = True,
    limit: float = 120.0,
    **environment: str,
) -> Ended:
    """Run `python WORDS` in `folder`. signum: a signal to send when `after` seconds have passed.

    group: send the signal to the whole process group, as a terminal does; if False, to the process only.
    """
    master, slave = pty.openpty()
    # A child inherits ignored signals (SIGINT after a shell's `&`, SIGHUP under nohup), but not handlers.
    before = {number: signal.signal(number, _nothing) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=folder,
        env={**os.environ, **QUIET, **environment},
        start_new_session=True,
    )
    for number, handler in before.items():
        signal.signal(number, handler)
    os.close(slave)
    screen, sent = bytearray(), signum is None
    try:
        while process.poll() is None:
            now = time.monotonic() - began
            if not sent and now >= after:
                (os.killpg if group else os.kill)(process.pid, signum)  # type: ignore[arg-type]
                sent = True
            if now > limit:
                process.kill()
            wait = min(0.05, max(0.0, after - now)) if not sent else 0.05
            if select.select([master], [], [], wait)[0]:
                screen += _read(master)
        seconds = time.monotonic() - began
        while select.select([master], [], [], 0.0)[0] and (more := _read(master)):
            screen += more
    finally:
        os.close(master)
    left = alive(process.pid)
    for one in left:
        os.kill(one, signal.SIGKILL)
    return Ended(process.returncode, screen.decode(errors="replace").replace("\r\n", "\n"), seconds, left)


def _nothing(number: int, frame: object) -> None:
    pass


def _read(master: int) -> bytes:
    try:
        return os.read(master, 65536)
    except OSError:  # the other end is closed
        return b""


def alive(session: int, patience: float = 5.0) -> list[int]:
    """Return the processes of a session that still run after `patience` seconds. Empty on systems without /proc."""
    end = time.monotonic() + patience
    while (found := members(session)) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def members(session: int) -> list[int]:
    """Return the processes of a session, oldest first."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, own = entry.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(own) == session and state != "Z":
            found.append(int(entry.parent.name))
    return sorted(found)
