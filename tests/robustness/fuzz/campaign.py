"""Load many mutated .fqvit files with the Python loader and the native loader, which must agree, and run the accepted files.

    python tests/robustness/fuzz/campaign.py --count 10000 --seed 1 --workers 1 [--native FILE]

A file depends only on the seed and its number; `--only NUMBER` writes and judges one file. --native: an extension module to
load instead of the installed one, such as one built with sanitizers (`make fuzz-files`). The report counts the files
that each stage rejected, and the accepted files that match the reference bit for bit. Files with findings are saved in
build/fuzz, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import importlib.util
import json
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
FINDINGS = ROOT / "build" / "fuzz"
MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())  # keeps the files off the disk
DETECTORS = 0.005  # share of detectors: one detector takes as long as forty small programs
NETWORKS = 0.04  # share of whole networks
HANGS = 120  # seconds per hundred files before a worker counts as hanging
CRASHES = 20  # restarts of dead workers, in total; each continues after the file that killed it


def use_native(path: Path) -> None:
    """Load a file as fqvit._native."""
    spec = importlib.util.spec_from_file_location("fqvit._native", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fqvit._native"] = module
    spec.loader.exec_module(module)


class Files:
    """Makes the mutated file that belongs to each number."""

    def __init__(self, seed: int) -> None:
        from tests.robustness.fuzz.mutate import Seed
        from tests.robustness.fuzz.seeds import golden, seeds_of

        self.seed = seed
        self.small = [Seed.of(raw) for _, raw in sorted(seeds_of("program").items())]
        self.networks = [Seed.of(raw) for _, raw in sorted(golden().items()) if len(raw) < 30_000]
        self.detectors = [Seed.of(raw) for _, raw in sorted(seeds_of("detector").items())]

    def make(self, number: int) -> tuple[str, bytes]:
        """Return the kind of file ("detector" or "program") and its bytes."""
        from tests.robustness.fuzz.mutate import mutated

        rng = random.Random(f"{self.seed} {number}")
        chance = rng.random()
        if chance < DETECTORS:
            return "detector", mutated(rng, rng.choice(self.detectors))
        return "program", mutated(rng, rng.choice(self.networks if chance < DETECTORS + NETWORKS else self.small))


def work(arguments: argparse.Namespace) -> None:
    """Judge the files first, first + step, ... and write the counts to FOLDER/first.json."""
    if arguments.native:
        use_native(arguments.native)
    from tests.robustness.fuzz.oracle import Finding, judge_detector, judge_program

    files, counts, findings = Files(arguments.seed), collections.Counter[str](), 0
    numbers = [arguments.only] if arguments.only is not None else range(arguments.first, arguments.count, arguments.step)
    for turn, number in enumerate(numbers):
        if turn % 100 == 0:
            faulthandler.dump_traceback_later(HANGS, exit=True)
            arguments.folder.joinpath(f"{arguments.first}.json").write_text(json.dumps(counts))
        kind, raw = files.make(number)
        path = arguments.folder / f"{number}.fqvit"
        path.write_bytes(raw)
        try:
            outcome = (judge_detector if kind == "detector" else judge_program)(path, number)
        except Finding as finding:
            outcome, findings = "FINDING", findings + 1
            FINDINGS.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, FINDINGS / f"file-{number}.fqvit")
            print(f"file {number}: {finding}", file=sys.stderr, flush=True)
        counts[f"{kind}: {_class(outcome, path)}"] += 1
        if arguments.only is not None:
            print(f"{kind}: {outcome}")
            continue
        path.unlink()
    faulthandler.cancel_dump_traceback_later()
    counts["peak MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    arguments.folder.joinpath(f"{arguments.first}.json").write_text(json.dumps(counts))
    raise SystemExit(findings > 0)


def _class(outcome: str, path: Path) -> str:
    """Reduce an outcome to its class by removing the names and numbers of this file."""
    said = outcome.replace(f"{path}: ", "").split(". ")[0]
    said = re.sub(r"(?:'[^']*'|\"[^\"]*\"|\[[^\]]*\])", "*", said)
    stage, _, said = said.partition(" | ")
    said = re.sub(r"^[^:*]{0,80}: ", "", said)  # remove the name of the op
    return f"{stage} | {re.sub(r'-?[0-9][0-9.e+]*', '#', said)[:70]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--native", type=Path)
    parser.add_argument("--only", type=int)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--step", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only is not None:
        arguments.folder = arguments.folder or FINDINGS
        arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.folder is not None:
        work(arguments)
    raise SystemExit(campaign(arguments))


def campaign(arguments: argparse.Namespace) -> int:
    """Run all workers, restart those that die, print the report, and return the exit code."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder, counts, bad = Path(name), collections.Counter[str](), 0
        running = {first: start(arguments, first, folder) for first in range(arguments.workers)}
        crashes = 0
        while running:
            for first, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[first]
                bad += process.returncode != 0
                done = folder / f"{first}.json"
                counts.update(json.loads(done.read_text()) if done.exists() else {})
                for path in folder.glob("*.fqvit"):  # left by a dead worker
                    number = int(path.stem)
                    if number % arguments.workers != first % arguments.workers:
                        continue
                    FINDINGS.mkdir(parents=True, exist_ok=True)
                    shutil.move(path, FINDINGS / f"file-{number}.fqvit")
                    print(f"file {number}: the process died ({process.returncode})", file=sys.stderr, flush=True)
                    crashes += 1
                    if crashes <= CRASHES:
                        again = number + arguments.workers
                        running[again] = start(arguments, again, folder)
            time.sleep(1)
        report(counts, time.monotonic() - begin)
    return 1 if bad else 0


def start(arguments: argparse.Namespace, first: int, folder: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        __file__,
        "--count",
        str(arguments.count),
        "--seed",
        str(arguments.seed),
        "--folder",
        str(folder),
    ]
    command += ["--first", str(first), "--step", str(arguments.workers)]
    command += ["--native", str(arguments.native)] if arguments.native else []
    return subprocess.Popen(command)


def report(counts: collections.Counter[str], seconds: float) -> None:
    peak = counts.pop("peak MB", 0)
    total = sum(counts.values())
    print(f"{total} files in {seconds:.0f} s, peak memory {peak} MB, summed over workers")
    stages = collections.Counter[str]()
    for name, count in counts.items():
        stages[name.partition(" | ")[0]] += count
    for name, count in sorted(stages.items()):
        print(f"{count:9}  {count / max(total, 1):6.2%}  {name}")
    print("Most frequent outcomes:")
    for name, count in counts.most_common(40):
        print(f"{count:9}  {count / max(total, 1):6.2%}  {name}")


if __name__ == "__main__":
    main()
