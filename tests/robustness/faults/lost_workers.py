"""Kill a torchrun worker (kill -9) at a random time: all workers must exit soon, with a one-line error and no partial file."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.robustness.faults.signals import clean, unfinished
from tests.robustness.faults.terminal import QUIET, alive

COMMANDS: dict[str, tuple[object, ...]] = {
    "quantize": ("quantize", "--images", 512, "-o", "out.fqvit"),
    "eval": ("eval", "new.fqvit", "--limit", 400, "--backend", "reference"),
    "embed": ("embed", "new.fqvit", "photos", "--batch", 1, "-o", "out.safetensors"),
    "table": ("table", "--models", "fmnist_vit", "--methods", "minmax,fq-vit", "--limit", 200, "--cache", "cells"),
}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "fqvit")
PATIENCE = 45.0  # seconds; torchrun itself allows 30 between its SIGTERM and SIGKILL


def campaign(name: str, home: Path, times: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Kill a random worker `times` times. Return the count of each outcome, and the faults.

    Before the workers are connected, in the first seconds of imports, only torchrun can report the lost worker. From then on
    one of the workers must report it, until the result is printed.
    """
    rng = random.Random(f"{name} {seed}")
    began = time.monotonic()
    process, _ = started(name, home)
    said = process.communicate()[1]
    assert process.returncode == 0, said
    seconds = time.monotonic() - began
    counts: Counter[str] = Counter()
    faults: list[str] = []
    for number in range(times):
        clean(home)
        process, workers = started(name, home)
        lost, after = rng.randrange(len(workers)), seconds * (number + rng.random()) / times
        time.sleep(after)
        over = process.poll() is not None
        connected = all(map(has_sockets, workers))
        try:
            os.kill(workers[lost], signal.SIGKILL)
        except ProcessLookupError:
            over = True
        killed = time.monotonic()
        answer, said = process.communicate(timeout=300)
        spent = time.monotonic() - killed
        ours = [line for line in said.splitlines() if line.startswith("fqvit: ")]
        over = over or bool(answer) or (home / "out.fqvit").exists()
        counts["finished" if over else "one line" if ours else "connected, no line" if connected else "not connected"] += 1
        found = [] if over else unfinished(home)
        if not over and (len(ours) > 1 or (connected and not ours) or "src/fqvit" in said or spent > PATIENCE):
            found.append(f"{spent:.0f} s, {ours}, {said[-1500:]}")
        found += [f"left running: {left}"] if (left := alive(process.pid)) else []
        # Worker 0 writes all files. If it is killed, it cannot remove its temporary ones.
        faults += [
            f"worker {lost}, {after:.1f} s of {seconds:.1f}: {each}" for each in found if lost or not each.startswith("left .")
        ]
    clean(home)
    return counts, faults


def started(name: str, home: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """Start torchrun, and return its process and the process ids of its workers by rank."""
    process = subprocess.Popen(
        [sys.executable, *TORCHRUN, *map(str, COMMANDS[name])],
        cwd=home,
        env={**os.environ, **QUIET, "FQVIT_LOST_AFTER": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while process.poll() is None:
        ranked = {rank: pid for pid in children(process.pid) if (rank := rank_of(pid)) is not None}
        if len(ranked) == 2:
            return process, [ranked[0], ranked[1]]
        time.sleep(0.02)
    raise AssertionError(process.communicate()[1])


def children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(entry.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def rank_of(pid: int) -> int | None:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(word[5:]) for word in words if word.startswith(b"RANK=")), None)


def has_sockets(pid: int) -> bool:
    """Return whether a worker has begun to connect to others. Before that it has no socket."""
    try:
        return any(os.readlink(file).startswith("socket:") for file in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
