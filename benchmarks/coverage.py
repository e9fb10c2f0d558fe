"""Check which models of timm and transformers can be captured, quantized and run.

    .venv/bin/python benchmarks/coverage.py [--library timm] [--modules swin_transformer ...] [--names NAME ...] [--stage ...]

Prints one line per model and writes benchmarks/results/coverage.csv. Stage capture compares the float outputs of module and
graph. Stage quantize also calibrates on two random images with the default recipe, lowers, and compares the native engine with
the reference on a third image, bit for bit; `cosine` is the lowest cosine similarity between an integer and a float output.
Stage whole is the same with images of the model's own size; in the other stages images are as small as the architecture allows.

Weights are random. Models with more than 100 million parameters are built with two blocks, or with one or two per stage of the
network (see column `blocks`); with --shallow, all models are built this way. Names of timm that build the same module share one
run: column `run` is the name that was built. Two names build the same module if all their submodules have the same classes,
attributes and tensor shapes.

Models that the CSV already has at this stage are left out, so that an interrupted run resumes; --redo runs them again. Without
--shallow, models of up to 100 million parameters that the CSV records with fewer blocks are run again with all blocks.
Every model runs in a process of its own. Needs timm or transformers.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import json
import multiprocessing
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import coverage_models as models
import numpy as np
import torch
from torch import nn

import fqvit
from fqvit.frontend.capture import capture
from fqvit.models.graph import Captured
from fqvit.runtime.reference import Reference

RESULTS = Path(__file__).parent / "results" / "coverage.csv"
FIELDS = ["library", "module", "name", "stage", "result", "parity", "cosine", "parameters", "blocks", "side", "seconds"]
FIELDS += ["run", "reason"]
Row = dict[str, str]
Key = tuple[str, str, str]


def quantize(name: str, captured: Captured, size: tuple[int, int, int]) -> float:
    """Quantize with the default recipe, compare the engine with the reference, and return the lowest cosine to float.

    Raises FqvitError if the model cannot be quantized or an output differs.
    """
    channels, height, width = size
    statistics = ((0.5,) * channels, (0.25,) * channels)
    preprocess = fqvit.Preprocess(height, width, channels, min(height, width), "bicubic", *statistics)  # type: ignore[arg-type]
    model = fqvit.FloatModel(name, captured, preprocess, None, "random weights")
    images = np.random.default_rng(0).integers(0, 256, (3, height, width, channels), dtype=np.uint8)
    program = fqvit.lower(model, fqvit.calibrate(model, [images[:2]], fqvit.load_recipe("fqvit")))
    last = images[2:]
    wanted = Reference(program).run_all(last)
    have = fqvit.Engine(program, 1).run_all(last)
    for i, (a, b) in enumerate(zip(wanted, have, strict=True)):
        if not np.array_equal(a, b):
            raise fqvit.FqvitError(f"{name}: output {i} of the native engine differs from the reference.")
    pixels = torch.from_numpy(last).permute(0, 3, 1, 2).float()
    with torch.no_grad():
        *others, main = captured.graph.run_all((pixels / 255 - 0.5) / 0.25)
    values = []
    for output, codes in zip(program.header.outputs, have, strict=True):
        alpha = 0 if output.alpha is None else program.constants[output.alpha].astype(np.int64)
        values.append((codes.astype(np.float64) - output.zero) * output.scale * 2.0**alpha)
    return min(_cosine(x.ravel(), y.double().numpy().ravel()) for x, y in zip(values, [main, *others], strict=True))


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-30))


def examine(library: str, name: str, stage: str, plan: models.Plan | None) -> Row:
    """Build and examine one model."""
    row = {"result": "ok"}
    try:
        built = models.build(plan) if plan is not None else models.transformers_model(name)
        module, size = built.module, built.size
        row.update(parameters=f"{built.millions:.1f}", blocks="two" if built.shallow else "all", side=str(size[1]))
        captured = capture(module, size)
        row["parity"] = f"{captured.parity:.1e}"
        if stage != "capture":
            row["cosine"] = f"{quantize(name, captured, size):.4f}"
    except fqvit.FqvitError as error:
        row.update(result="refused", reason=str(error))
    except Exception as error:  # the run must continue with the next model
        row.update(result="error", reason=f"{type(error).__name__}: {error}".splitlines()[0])
    return row


def warm_up() -> None:
    """Run everything once on a small module, so that forked processes need not import what torch imports lazily."""
    module = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(2), nn.Linear(4, 8), nn.LayerNorm(8)).eval()
    quantize("small", capture(module, (3, 8, 8)), (3, 8, 8))


def _work(pipe: Connection, library: str, name: str, stage: str, plan: models.Plan | None) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start = time.process_time()
    row = examine(library, name, stage, plan)
    pipe.send({**row, "seconds": f"{time.process_time() - start:.1f}"})


class Job:
    """One model in a process of its own, so that its memory is freed at the end."""

    def __init__(self, library: str, name: str, stage: str, plan: models.Plan | None) -> None:
        context = multiprocessing.get_context("fork")  # the parent has imported the libraries
        self.name = name
        self.pipe, sender = context.Pipe(duplex=False)
        self.process: ForkProcess = context.Process(target=_work, args=(sender, library, name, stage, plan))
        self.start = time.monotonic()
        self.process.start()
        sender.close()

    def finish(self, timeout: float) -> Row:
        row = {"result": "error", "reason": f"no result after {timeout:.0f} s"}
        try:
            if self.pipe.poll():
                row = self.pipe.recv()
        except EOFError:
            row["reason"] = "the process died"
        self.process.kill()
        self.process.join()
        return row


def run(jobs: Iterator[Job], workers: int, timeout: float) -> Iterator[tuple[str, Row]]:
    """Run jobs, `workers` at a time, and yield names and results as they arrive."""
    running: list[Job] = []
    while True:
        while len(running) < workers and (job := next(jobs, None)) is not None:
            running.append(job)
        if not running:
            return
        ready = wait([job.pipe for job in running], 5)
        for job in [job for job in running if job.pipe in ready or time.monotonic() - job.start > timeout]:
            running.remove(job)
            yield job.name, job.finish(timeout)


def plans_of(names: list[str], shallow: bool, whole: bool, workers: int) -> tuple[dict[str, models.Plan], dict[str, str]]:
    """Return the plan of each timm name, and the reason for each name that cannot be built.

    Plans are kept in build/coverage, because finding them takes minutes.
    """
    path = Path("build/coverage")
    path.mkdir(parents=True, exist_ok=True)
    version = models.library("timm").__version__
    files = {name: path / f"{name}-{version}{'-shallow' * shallow}{'-whole' * whole}.json" for name in names}
    problems = {}
    missing = [(name, file, shallow, whole) for name, file in files.items() if not file.exists()]
    if missing:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            problems = {name: problem for name, problem in pool.imap_unordered(_plan, missing) if problem}
    plans = {}
    for name in names:
        if name not in problems:
            fields = json.loads(files[name].read_text())
            plans[name] = models.Plan(**{**fields, "size": tuple(fields["size"])})
    return plans, problems


def _plan(arguments: tuple[str, Path, bool, bool]) -> tuple[str, str]:
    """Store the plan of a model. Returns the name, and the reason if it cannot be built."""
    name, file, shallow, whole = arguments
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        file.write_text(json.dumps(asdict(models.plan(name, shallow, whole))))
    except ValueError as error:
        return name, str(error)
    return name, ""


def names_of(library: str, modules: list[str]) -> dict[str, str]:
    """Return {name: module} of the models to examine."""
    if library == "transformers":
        return dict.fromkeys(models.TRANSFORMERS, "transformers")
    timm = models.library("timm")
    return {name: module for module in modules for name in timm.list_models(module=module)}


def key_of(row: Row) -> Key:
    return row["library"], row["name"], row["stage"]


def read_rows() -> dict[Key, Row]:
    if not RESULTS.exists():
        return {}
    with RESULTS.open(newline="") as file:
        return {key_of(row): row for row in csv.DictReader(file)}


def write_rows(rows: dict[Key, Row]) -> None:
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows.values(), key=lambda row: [row[field] for field in FIELDS[:4]]))


def record(rows: dict[Key, Row], row: Row) -> None:
    """Add a row to the CSV and print it."""
    with Path("build/coverage.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows.update(read_rows())  # another process may have added rows
        rows[key_of(row)] = row
        write_rows(rows)
    columns = [row.get(field, "") for field in ("parity", "cosine", "side", "seconds", "reason")]
    print(
        f"{row['result']:8}{row['name']:50}{columns[0]:>8} {columns[1]:>7} {columns[2]:>4} px {columns[3]:>5} s  {columns[4]}",
        flush=True,
    )


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", choices=["timm", "transformers"], default="timm")
    parser.add_argument("--modules", nargs="+", default=[*models.TIMM_90, *models.TIMM_60], help="modules of timm")
    parser.add_argument("--names", nargs="+", help="only these models")
    parser.add_argument("--stage", choices=["capture", "quantize", "whole"], default="capture")
    parser.add_argument("--redo", action="store_true", help="also run models that the CSV has already")
    parser.add_argument("--failed", action="store_true", help="also rerun models that failed")
    parser.add_argument("--shallow", action="store_true", help="build all models with two blocks, or one or two per stage")
    parser.add_argument("--workers", type=int, default=1, help="models at a time")
    parser.add_argument("--timeout", type=float, default=900, help="seconds per model")
    return parser.parse_args()


def main() -> None:
    arguments = options()
    library, stage = arguments.library, arguments.stage
    torch.set_num_threads(1)
    models.library(library)
    modules = names_of(library, arguments.modules)
    rows = read_rows()

    def is_todo(name: str) -> bool:
        known = rows.get((library, name, stage))
        if known is None or arguments.redo or (arguments.failed and known["result"] != "ok"):
            return True
        return known["blocks"] == "two" and not arguments.shallow and float(known["parameters"]) <= models.MANY

    names = [name for name in modules if not arguments.names or name in arguments.names]
    todo = [name for name in names if is_todo(name)]
    plans: dict[str, models.Plan] = {}
    same: dict[str, list[str]] = {}  # names that build the same module as the key

    def identity(name: str) -> Row:
        return {"library": library, "module": modules[name], "name": name, "stage": stage}

    def jobs() -> Iterator[Job]:
        for module in dict.fromkeys(modules[name] for name in todo):
            some = [name for name in todo if modules[name] == module]
            if library == "timm":
                found, problems = plans_of(some, arguments.shallow, stage == "whole", arguments.workers)
                plans.update(found)
                some = sorted(found, key=lambda name: (found[name].shallow, found[name].millions, name))
                for name, problem in problems.items():
                    record(rows, {**identity(name), "result": "error", "run": name, "reason": problem})
            groups: dict[str, list[str]] = {}
            for name in some:
                groups.setdefault(plans[name].configuration if name in plans else name, []).append(name)
            same.update((group[0], group) for group in groups.values())
            yield from (Job(library, group[0], stage, plans.get(group[0])) for group in groups.values())

    warm_up()
    for built, result in run(jobs(), arguments.workers, arguments.timeout):
        for name in same[built]:
            own = {"parameters": f"{plans[name].millions:.1f}"} if name in plans else {}
            record(rows, {**identity(name), **result, **own, "run": built})
    for module in dict.fromkeys(modules[name] for name in names):
        results = [rows[library, name, stage]["result"] for name in names if modules[name] == module]
        print(f"{module:32}{results.count('ok'):4} of {len(results):4}  {results.count('ok') / len(results):.0%}")


if __name__ == "__main__":
    main()
