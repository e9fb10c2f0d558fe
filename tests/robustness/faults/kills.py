"""Kill a command (kill -9) at a random moment, and check that its output is the complete old one or the complete new one.

Commands run in forks of this process, which has imported everything, so that kills happen during work and not during imports.
Hence this module runs in a separate process (scripts/faults.py). Of every four kills, two happen at random moments, one shortly
after a temporary file appears, and one at a random line of the code that writes files.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from fqvit.errors import FqvitError
from tests.robustness.faults.jobs import JOBS, Job, digest, leftovers

TraceFunction = Callable[[FrameType, str, object], Any]
WRITING = (
    "fqvit/system/files.py",
    "fqvit/export/folder.py",
    "fqvit/export/vectors.py",
    "fqvit/export/c/writer.py",
    "fqvit/inference/embed.py",
    "fqvit/inference/formats.py",
)
READ = ("old.fqvit", "new.fqvit", "shapes.safetensors", "train", "photos")


def warm_up() -> None:
    """Import the modules that commands import when they run. Lower embed.PART_ROWS, so that a few images make several parts."""
    import importlib

    from fqvit.inference import embed

    embed.PART_ROWS = 16

    for name in (
        "cli.app",
        "cli.commands.detect_quantize",
        "cli.commands.embed",
        "detect.calibrate",
        "detect.lower",
        "detect.program",
        "export.c",
        "export.onnx",
        "export.qdq",
        "export.vectors",
        "lowering.lower",
        "quant.calibrate",
        "study.cells",
        "study.table",
    ):
        importlib.import_module(f"fqvit.{name}")


def start(words: tuple[object, ...], folder: Path, steps: int | None = None) -> int:
    """Start a command in a fork and return its process id. Its output goes to folder/.said.

    steps: kill the process after this many lines of the writing code; 0: count the lines and write the number to folder/.steps.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.chdir(folder)
        said = os.open(".said", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.stdout, sys.stderr = (io.TextIOWrapper(os.fdopen(number, "wb", 0), write_through=True) for number in (1, 2))
        sys.argv = ["fqvit", *map(str, words)]
        from fqvit.cli.app import main

        counted = count_lines(steps) if steps is not None else []
        try:
            main()
        finally:
            if steps == 0:
                sys.settrace(None)
                Path(".steps").write_text(str(len(counted)))
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def count_lines(last: int) -> list[int]:
    """Return a list that grows by one for each executed line of the writing code. Kill this process at line `last`."""
    lines: list[int] = []

    def inside(frame: FrameType, event: str, _: object) -> TraceFunction:
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == last:
                os.kill(os.getpid(), signal.SIGKILL)
        return inside

    sys.settrace(lambda frame, *_: inside if frame.f_code.co_filename.endswith(WRITING) else None)
    return lines


def finish(words: tuple[object, ...], folder: Path) -> float:
    """Run a command to the end and return the seconds that it took."""
    began = time.monotonic()
    status = os.waitstatus_to_exitcode(os.waitpid(start(words, folder), 0)[1])
    assert status == 0, (words, status, (folder / ".said").read_text())
    return time.monotonic() - began


@dataclass
class Tally:
    """Results of a campaign.

    counts: number of kills per stage. before: no file was being written; writing: there were temporary files; between: the old
        output folder had been moved away, and the new one was not yet in place; after: the new output was in place.
    reruns: complete runs after a kill   seconds: median duration of an uninterrupted run
    """

    job: str
    counts: Counter[str] = field(default_factory=Counter)
    reruns: int = 0
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Campaign:
    """Kill one job many times, in a separate folder inside `home`. `home` has the input files."""

    def __init__(self, job: Job, home: Path, seed: int = 0) -> None:
        self.job, self.rng, self.tally = job, random.Random(f"{job.name} {seed}"), Tally(job.name)
        self.folder = home / job.name.replace(" ", "_")
        self.folder.mkdir()
        for name in READ:
            os.symlink(home / name, self.folder / name)
        self.out = self.folder / job.out
        finish(job.before, self.folder)
        self.old = digest(self.out)
        self.kept = home / f"{self.folder.name}.old"
        self.out.rename(self.kept)
        self.tally.seconds = statistics.median(self._timed() for _ in range(3))
        job.load(self.out)
        self.new = digest(self.out)
        assert None not in (self.old, self.new) and self.old != self.new
        self.window = self._window()
        self._reset()
        os.waitpid(start(job.words, self.folder, 0), 0)
        self.steps = int((self.folder / ".steps").read_text())

    def _timed(self) -> float:
        self._reset()
        return finish(self.job.words, self.folder)

    def _reset(self) -> None:
        for path in (self.out, *(self.folder / name for name in (self.job.cells or "cells", "out.csv"))):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def trial(self, number: int) -> None:
        """Run and kill the job once. Every second group of eight trials starts with an old output."""
        self._reset()
        older = number // 8 % 2 == 1
        if older and self.kept.is_dir():
            shutil.copytree(self.kept, self.out)
        elif older:
            shutil.copyfile(self.kept, self.out)
        kind, step = number % 4, self.rng.randrange(self.steps) + 1
        if number % 8 < 4:
            step = max(1, self.steps - step % 30)  # among the last lines, where the new output replaces the old one
        process = start(self.job.words, self.folder, step if kind == 3 else None)
        if kind < 2:
            moment = f"after {(wait := self.rng.random() * 1.05 * self.tally.seconds):.3f} s"
            time.sleep(wait)
        elif kind == 2:
            moment = self._wait_for_writing(process, 1 + self.rng.randrange(7 if self.job.cells else 1))
        else:
            moment = f"at line {step} of {self.steps}"
            os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        stage = self._look(older, f"trial {number}, killed {moment}")
        self.tally.counts[stage] += 1
        if self.job.cells or number % 10 == 9:
            finish(self.job.words, self.folder)
            self.tally.reruns += 1
            if digest(self.out) != self.new:
                self.tally.faults.append(
                    f"trial {number}: the output of the next run differs from that of an uninterrupted run"
                )
            for path in leftovers(self.folder):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _window(self) -> float:
        """Return the median lifetime of temporary files during one run, in seconds."""
        self._reset()
        process = start(self.job.words, self.folder)
        began: dict[Path, float] = {}
        spans: dict[Path, float] = {}
        while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            now, there = time.monotonic(), self._unfinished()
            began |= dict.fromkeys(there - began.keys(), now)
            spans |= {path: now - began[path] for path in there}
        os.waitpid(process, 0)
        return statistics.median(spans.values()) if spans else 0.01

    def _unfinished(self) -> set[Path]:
        places = [self.folder, *([self.folder / self.job.cells] if self.job.cells else [])]
        return {path for place in places if place.is_dir() for path in leftovers(place)}

    def _wait_for_writing(self, process: int, appearances: int) -> str:
        """Wait until this many temporary files have appeared, and then for a random fraction of the time that a write takes."""
        known = self._unfinished()
        while appearances > 0 and os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            appearances -= len(self._unfinished() - known)
            known |= self._unfinished()
        time.sleep(wait := self.rng.random() * 1.2 * self.window)
        return f"{1000 * wait:.1f} ms after a write began"

    def _look(self, older: bool, when: str) -> str:
        """Check the files after a kill, and return the stage at which the kill happened."""
        expected = {"after": self.new, "before": self.old if older else None}
        try:
            found = digest(self.out)
        except ValueError:
            found = "damaged"
        left = leftovers(self.folder)
        aside = [path for path in left if path.suffix == ".old" and digest(path) == self.old]
        between = older and found is None and bool(aside)
        if found not in expected.values() and not between:
            self.tally.faults.append(f"{when}: the output is neither the old nor the new one")
        others = {self.out.name, "out.csv", ".said", ".steps", self.job.cells, *READ}
        strange = [path.name for path in self.folder.iterdir() if path.name not in others and path not in left]
        if strange:
            self.tally.faults.append(f"{when}: unexpected files {strange}")
        for cell in self._cells():
            try:
                json.loads(cell.read_bytes()) if cell.suffix == ".json" else self.job.load(cell)
            except (ValueError, FqvitError):
                self.tally.faults.append(f"{when}: {cell.name} is incomplete")
        unfinished = bool(left) or any(path.name.startswith(".") for path in self._cells(unfinished=True))
        for path in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return "between" if between else "after" if found == self.new else "writing" if unfinished else "before"

    def _cells(self, unfinished: bool = False) -> Iterator[Path]:
        folder = self.folder / (self.job.cells or "cells")
        if folder.is_dir():
            yield from (path for path in folder.iterdir() if unfinished or not path.name.startswith("."))


def campaign(name: str, home: Path, kills: int, seed: int = 0) -> Tally:
    """Kill a job `kills` times."""
    one = Campaign(JOBS[name], home, seed)
    for number in range(kills):
        one.trial(number)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(one.folder)
    return one.tally
