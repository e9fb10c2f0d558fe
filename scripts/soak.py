"""Run engines and detectors in many threads and several processes for a long time: `make soak`.

Every result must match the reference bit for bit, every damaged file must be rejected, and memory must not grow.

    python scripts/soak.py --seconds 600 --processes 2 --threads 8

The parent process creates programs and computes their results with the reference. Workers, which never import torch, run them.
A folder of programs has the layout of tests/golden: NAME.fqvit, and NAME.npz with `images` and `output`. A detector is named
detector.fqvit; detector.npz has `image0`, `boxes0`, `scores0`, `labels0` and `probabilities0`, then `image1`, and so on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import fqvit
from fqvit import Engine, FqvitError
from fqvit.ir.ops import Linear
from fqvit.ir.program import Program

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
FOUND = ("boxes", "scores", "labels", "probabilities")
EVERY = 0.5  # seconds between samples of memory use
WARM = 0.2  # share of the run that does not count towards growth, because caches and allocators are still filling
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


# The parent process


def prepare(folder: Path) -> None:
    """Write programs of the two embedded models and a small random detector, with the results of the reference."""
    sys.path.insert(0, str(ROOT))
    from fqvit.models import embedded
    from fqvit.runtime.reference import Reference
    from tests.detect.saved import program as detector_program
    from tests.detect.test_programs import sample_images

    calibration, (images, _) = embedded.calibration_images(), embedded.test_images()
    for name in embedded.MODELS:
        model = fqvit.load_model(name)
        program = fqvit.lower(model, fqvit.calibrate(model, calibration[:64], fqvit.load_recipe("fqvit")))
        program.save(folder / f"{name}.fqvit")
        np.savez(folder / f"{name}.npz", images=images[:6], output=Reference(program).run(images[:6]))
    detector = detector_program("mask r-cnn")
    detector.save(folder / "detector.fqvit")
    slow, arrays = detector.ready(backend="reference"), {}
    for number, image in enumerate(sample_images()):
        arrays[f"image{number}"] = np.asarray(image)
        found = slow.detect(detector.prepare(image))
        arrays |= {f"{name}{number}": getattr(found, name) for name in FOUND}
    np.savez(folder / "detector.npz", **arrays)


def soak(folders: list[Path], seconds: float, processes: int, threads: int) -> list[dict[str, Any]]:
    """Run the workers and return the result of each one."""
    words = [sys.executable, __file__, "--worker", *map(str, folders), "--seconds", str(seconds), "--threads", str(threads)]
    workers = [
        subprocess.Popen(
            [*words, "--seed", str(seed)], stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        for seed in range(processes)
    ]
    found = [json.loads(worker.communicate()[0] or '{"wrong": ["no result"]}') for worker in workers]
    for worker, one in zip(workers, found, strict=True):
        one["code"] = worker.returncode
    return found


# A worker


class Case:
    """A program with images and the results of the reference."""

    def __init__(self, path: Path) -> None:
        self.path = path
        known = np.load(path.with_suffix(".npz"))
        self.images, self.output = known["images"], known["output"]
        self.shared = Engine(path, 2)
        self.invalid = invalid(Program.load(path))

    def check(self, engine: Engine, rng: random.Random) -> bool:
        first = rng.randrange(len(self.images))
        count = rng.randrange(len(self.images) - first) + 1
        some = slice(first, first + count)
        return bool(np.array_equal(engine.run(self.images[some]), self.output[some]))


def invalid(program: Program) -> list[Program]:
    """Return programs whose error the engine finds only after it has built a part of them."""
    ops = list(program.ops)
    last = max(i for i, op in enumerate(ops) if isinstance(op, Linear))
    wide = [*ops[:last], msgspec.structs.replace(ops[last], out="codes", bits=99), *ops[last + 1 :]]
    without = {name: array for name, array in program.constants.items() if name != ops[last].part("bias")}
    return [
        Program(msgspec.structs.replace(program.header, ops=tuple(wide)), program.constants),
        Program(program.header, without),
    ]


class DetectorCase:
    """A detector that all threads share, with images and the results of the reference."""

    def __init__(self, path: Path) -> None:
        from PIL import Image

        from fqvit.detect.program import DetectorProgram

        program, known = DetectorProgram.load(path), np.load(path.with_suffix(".npz"))
        self.ready = program.ready(2)
        numbers = range(sum(name.startswith("image") for name in known.files))
        self.images = [program.prepare(Image.fromarray(known[f"image{n}"])) for n in numbers]
        self.found = [[known[f"{name}{n}"] for name in FOUND] for n in numbers]

    def check(self, rng: random.Random) -> bool:
        number = rng.randrange(len(self.images))
        found = self.ready.detect(self.images[number])
        return all(np.array_equal(getattr(found, name), known) for name, known in zip(FOUND, self.found[number]))


class Load:
    """The work that threads repeat until the time is over."""

    def __init__(self, folders: list[Path], seconds: float, scratch: Path) -> None:
        paths = sorted(path for folder in folders for path in folder.glob("*.fqvit") if path.with_suffix(".npz").exists())
        self.cases = [Case(path) for path in paths if path.stem != "detector"]
        self.detectors = [DetectorCase(path) for path in paths if path.stem == "detector"]
        self.scratch, self.end = scratch, time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.lock = threading.Lock()

    def work(self, seed: int) -> None:
        """Run one thread: mostly on shared engines, sometimes on engines that only this thread uses."""
        rng = random.Random(seed)
        case = rng.choice(self.cases)
        own = Engine(case.path, 1)
        while time.monotonic() < self.end:
            what = rng.choices(("shared", "own", "new", "rejected", "detect"), (60, 20, 4, 12, 4 * len(self.detectors)))[0]
            try:
                if what == "shared":
                    any_case = rng.choice(self.cases)
                    right = any_case.check(any_case.shared, rng)
                elif what == "own":
                    right = case.check(own, rng)
                elif what == "new":
                    case = rng.choice(self.cases)
                    own = Engine(case.path, rng.choice((1, 2, 3)))
                    right = case.check(own, rng)
                elif what == "rejected":
                    right = self.rejects_bad_input(rng.choice(self.cases), seed, rng)
                else:
                    right = rng.choice(self.detectors).check(rng)
            except Exception as error:
                right, what = False, f"{what}: {type(error).__name__}: {error}"
            with self.lock:
                self.counts[what] += 1
                if not right:
                    self.wrong.append(what)

    def rejects_bad_input(self, case: Case, seed: int, rng: random.Random) -> bool:
        """Return whether a damaged file and an invalid program are rejected. Leaks in error paths show up as memory growth."""
        data = bytearray(case.path.read_bytes())
        if rng.random() < 0.5:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        else:
            del data[rng.randrange(len(data)) :]
        bad = self.scratch / f"bad{seed}.fqvit"
        bad.write_bytes(data)
        try:
            Engine(bad)
            return False
        except FqvitError:
            pass
        try:
            Engine(rng.choice(case.invalid), 2)
            return False
        except FqvitError:
            return True


def memory() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    except OSError:
        return 0


def handles() -> int:
    """Return the number of open files; 0 if the system does not report it."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def worker(folders: list[Path], seconds: float, threads: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fqvit-soak-") as scratch:
        load = Load(folders, seconds, Path(scratch))
        before, began = handles(), time.monotonic()
        running = [threading.Thread(target=load.work, args=(1000 * seed + number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        samples = []
        while any(thread.is_alive() for thread in running):
            time.sleep(EVERY)
            samples.append((time.monotonic() - began, memory()))
        for thread in running:
            thread.join()
        after = handles()
    return {"counts": load.counts, "wrong": load.wrong[:5], "files": after - before, **growth(samples)}


def growth(samples: list[tuple[float, int]]) -> dict[str, Any]:
    """Summarize memory after the warm-up: means of the first and last tenth, maximum, and slope of a fitted line."""
    late = np.array(samples[int(WARM * len(samples)) :], np.float64)
    tenth = max(1, len(late) // 10)
    slope = np.polyfit(late[:, 0], late[:, 1], 1)[0] if len(late) > 2 else 0.0
    first, last = late[:tenth, 1].mean(), late[-tenth:, 1].mean()
    return {
        "first_mb": first / 1e6,
        "last_mb": last / 1e6,
        "most_mb": late[:, 1].max() / 1e6,
        "mb_per_hour": slope * 3600 / 1e6,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--worker",
        nargs="+",
        type=Path,
        help="run as a worker on these folders of programs; without it, prepare a folder and start workers",
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--growth", type=float, default=5.0, help="largest accepted memory growth in percent")
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(worker(given.worker, given.seconds, given.threads, given.seed)))
        return 0
    with tempfile.TemporaryDirectory(prefix="fqvit-soak-") as folder:
        prepare(Path(folder))
        found = soak([Path(folder), GOLDEN], given.seconds, given.processes, given.threads)
    bad = False
    for number, one in enumerate(found):
        print(f"process {number}:", json.dumps(one))
        grown = one.get("last_mb", 1) > (1 + given.growth / 100) * one.get("first_mb", 0)
        bad = bad or bool(one["wrong"]) or one["code"] != 0 or grown or one.get("files", 1) != 0
    print("FAILED" if bad else "all results bit-exact, no memory growth")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
