"""Time candidates in interleaved rounds: each runs in its own process, and the processes take turns.

Other load on the machine then affects all candidates alike, and allocations of one do not affect the others.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fqvit.errors import FqvitError
from fqvit.system.progress import Progress

TURN = 0.2  # target duration of a turn in seconds; a turn has at least one run
MAX_RUNS = 50  # per turn
PAUSE = 0.25  # seconds to wait after a turn with several threads, because idle threads spin before they sleep
MILLI = 1000
COARSE = sys.platform == "win32"  # CPU time is counted in units of 1/64 s, longer than a run of a small model


@dataclass(frozen=True)
class Candidate:
    """A program or peer to time. kind: key of worker.KINDS   images: .npy file with one batch in the layout of this kind"""

    name: str
    kind: str
    file: Path
    images: Path


@dataclass
class Timing:
    """Times of one candidate in one setting.

    cpu, wall: seconds per batch, one number per timed run   memory: peak in bytes, None if the system does not report it
    load: seconds to import the runtime, load the file and compute the first result   first: the first logits
    failure: why it failed, or None   parts: wall seconds of each part of a detector, one number per timed run
    """

    name: str
    threads: int
    batch: int
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    memory: int | None = None
    load: float = 0.0
    first: list[float] = field(default_factory=list)
    failure: str | None = None
    parts: dict[str, list[float]] = field(default_factory=dict)

    def median(self, clock: str) -> float:
        """Return the median of all timed runs in milliseconds per image. clock: cpu or wall"""
        return MILLI * statistics.median(self.seconds(clock)) / self.batch

    def least(self, clock: str) -> float:
        """Return the minimum of all timed runs in milliseconds per image."""
        return MILLI * min(self.seconds(clock)) / self.batch

    def seconds(self, clock: str) -> list[float]:
        return self.cpu if clock == "cpu" else self.wall


class WorkerFailed(Exception):
    """A worker process ended. The message is the last line that it wrote to stderr."""


class Worker:
    """A process that answers each line of JSON with one line of JSON."""

    def __init__(self, module: str, threads: int) -> None:
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the worker
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, **dict.fromkeys(THREADS, str(threads))},
            text=True,
        )

    def ask(self, question: dict[str, object]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # broken pipe: the process has ended, and its last message says why
        line = self.process.stdout.readline()
        if not line:
            raise WorkerFailed(self.failure_message())
        return json.loads(line)  # type: ignore[no-any-return]

    def failure_message(self) -> str:
        code = self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return said[-1].removeprefix("fqvit.errors.FqvitError: ") if said else f"ended with exit code {code} and no message"

    def stop(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):  # BrokenPipeError, or EINVAL on Windows
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.close()


# Set in the environment, because some libraries start their threads on import.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def run_rounds(candidates: Sequence[Candidate], threads: int, batch: int, rounds: int, track: Progress) -> list[Timing]:
    """Return one timing per candidate, in order. If a candidate fails, its timing says why and the others continue."""
    timings = [Timing(candidate.name, threads, batch) for candidate in candidates]
    running: list[tuple[Timing, Worker, int]] = []
    try:
        for candidate, timing in zip(candidates, timings):
            worker = Worker("fqvit.bench.worker", threads)
            running.append((timing, worker, 0))
            with _record_failure(timing):
                question = {
                    "kind": candidate.kind,
                    "file": str(candidate.file),
                    "images": str(candidate.images),
                    "threads": threads,
                }
                ready = worker.ask(question)
                timing.load, timing.first = ready["load"], ready["first"]
                once = worker.ask({"runs": 1})["cpu"][0] / threads  # wall time would include other processes
                running[-1] = timing, worker, max(1, min(MAX_RUNS, round(TURN / once))) if once else MAX_RUNS
        label = f"{threads} {'thread' if threads == 1 else 'threads'}, batch {batch}"
        for number in track(range(rounds), rounds, label):
            for timing, worker, runs in _rotated(running, number):
                if timing.failure is None:
                    with _record_failure(timing):
                        done = worker.ask({"runs": runs})
                        timing.cpu += done["cpu"]
                        timing.wall += done["wall"]
                        timing.memory = done["memory"]
                        for name, seconds in done["parts"].items():
                            timing.parts.setdefault(name, []).extend(seconds)
                    if threads > 1:
                        time.sleep(PAUSE)
    finally:
        for _, worker, _ in running:
            worker.stop()
    return timings


@contextlib.contextmanager
def _record_failure(timing: Timing) -> Any:
    try:
        yield
    except WorkerFailed as failed:
        timing.failure = str(failed)


def _rotated(items: Sequence[Any], by: int) -> Iterable[Any]:
    """Rotate the order each round, so that candidates do not always run after the same one."""
    start = by % len(items)
    return [*items[start:], *items[:start]]


def differing_logits(timings: Sequence[Timing], names: Iterable[str], tolerance: float = 1e-2) -> dict[str, float]:
    """Return the candidates in `names` whose logits differ from those of the first one, and their relative difference."""
    same = [timing for timing in timings if timing.name in set(names) and timing.first and timing.failure is None]
    found: dict[str, float] = {}
    for timing in same[1:]:
        expected = same[0].first
        size = max(map(abs, expected))
        off = max((abs(a - b) for a, b in zip(expected, timing.first)), default=math.inf) / (size or 1.0)
        if len(timing.first) != len(expected) or off > tolerance:
            found[timing.name] = off
    return found


def ask_once(module: str, question: dict[str, object]) -> dict[str, Any]:
    """Start a process, ask it one question and stop it."""
    worker = Worker(module, os.cpu_count() or 1)
    try:
        return worker.ask(question)
    except WorkerFailed as failed:
        raise FqvitError(f"peers: preparing their files failed ({failed}). Leave them out with --against none.") from None
    finally:
        worker.stop()
