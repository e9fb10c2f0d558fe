"""Check which models of timm and transformers the front end captures, and whether the result quantizes and runs.

    .venv/bin/python benchmarks/coverage.py [--library timm] [--modules swin_transformer ...] [--names NAME ...] [--stage ...]

Prints one line per model and writes benchmarks/results/coverage.csv. Stage capture compares the float outputs of module and
graph. Stage quantize also calibrates on random images with the default recipe, lowers, and compares the native engine with
the reference. Models that the CSV already has at this stage are left out, so that an interrupted run resumes; --redo runs them
again. Column blocks is "two" for models that were built with two blocks: large ones, and with --shallow all whose constructor
has an option for it. Every model runs in a process of its own. Needs timm or transformers.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import re
import time
import warnings
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import coverage_models as models
import numpy as np
import torch

import fqvit
from fqvit.frontend.capture import capture, check
from fqvit.models.graph import Captured
from fqvit.runtime.reference import Reference

RESULTS = Path(__file__).parent / "results" / "coverage.csv"
FIELDS = ["library", "module", "name", "stage", "result", "parity", "parameters", "blocks", "side", "seconds", "reason"]
LARGE = re.compile("large|huge|giant|gigantic|enormous|so400m|so150m|_[137]b_|_l_|_xl_|7b")
Row = dict[str, str]
EMPTY: Row = {"result": "ok", "parity": "", "parameters": "", "blocks": "", "side": "", "reason": ""}


def quantize(name: str, captured: Captured, size: tuple[int, int, int]) -> None:
    """Quantize with the default recipe and compare the native engine with the reference. Raises FqvitError."""
    channels, height, width = size
    statistics = ((0.5,) * channels, (0.25,) * channels)
    preprocess = fqvit.Preprocess(height, width, channels, min(height, width), "bicubic", *statistics)  # type: ignore[arg-type]
    model = fqvit.FloatModel(name, captured, preprocess, None, "random weights")
    images = np.random.default_rng(0).integers(0, 256, (4, height, width, channels), dtype=np.uint8)
    program = fqvit.lower(model, fqvit.calibrate(model, [images], fqvit.load_recipe("fqvit")))
    wanted = Reference(program).run_all(images[:2])
    have = fqvit.Engine(program, 1).run_all(images[:2])
    for i, (a, b) in enumerate(zip(wanted, have, strict=True)):
        if not np.array_equal(a, b):
            raise fqvit.FqvitError(f"{name}: output {i} of the native engine differs from the reference.")


def examine(library: str, name: str, stage: str, shallow: bool) -> Row:
    """Build and examine one model. shallow: with two blocks"""
    row = {**EMPTY}
    try:
        built = models.timm_model(name, shallow) if library == "timm" else models.transformers_model(name)
        module, size = built.module, built.size
        row.update(parameters=f"{built.millions:.1f}", blocks="two" if built.shallow else "all", side=str(size[1]))
        captured = capture(module, size)
        row["parity"] = f"{check(module, captured, size):.1e}"
        if stage == "quantize":
            quantize(name, captured, size)
    except fqvit.FqvitError as error:
        row.update(result="refused", reason=str(error))
    except Exception as error:  # the report must go on with the next model
        row.update(result="error", reason=f"{type(error).__name__}: {error}".splitlines()[0])
    return row


def _work(pipe: Connection, library: str, name: str, stage: str, shallow: bool) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pipe.send(examine(library, name, stage, shallow))


def isolated(library: str, name: str, stage: str, shallow: bool, timeout: float) -> Row:
    """Examine one model in a process of its own, so that its memory is returned."""
    context = multiprocessing.get_context("fork")  # the parent has imported the libraries
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, library, name, stage, shallow))
    start = time.monotonic()
    process.start()
    sender.close()
    row = {**EMPTY, "result": "error", "reason": f"no result after {timeout:.0f} s"}
    try:
        if receiver.poll(timeout):
            row = receiver.recv()
    except EOFError:
        row["reason"] = "the process died"
    process.kill()
    process.join()
    return {**row, "seconds": f"{time.monotonic() - start:.0f}"}


def names_of(library: str, modules: list[str]) -> list[tuple[str, str]]:
    """Return (module, name) of the models to examine."""
    if library == "transformers":
        return [("transformers", name) for name in models.TRANSFORMERS]
    timm = models.library("timm")
    found = [(module, name) for module in modules for name in timm.list_models(module=module)]
    order = {pair: [name for module, name in found if module == pair[0]].index(pair[1]) for pair in found}
    return sorted(
        found, key=lambda pair: (LARGE.search(pair[1]) is not None, order[pair])
    )  # all modules in turn, large models last


def read_rows() -> dict[tuple[str, str, str], Row]:
    if not RESULTS.exists():
        return {}
    with RESULTS.open(newline="") as file:
        return {(row["library"], row["name"], row["stage"]): row for row in csv.DictReader(file)}


def write_rows(rows: dict[tuple[str, str, str], Row]) -> None:
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows.values(), key=lambda row: [row[field] for field in FIELDS[:4]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", choices=["timm", "transformers"], default="timm")
    parser.add_argument("--modules", nargs="+", default=[*models.TIMM_90, *models.TIMM_60], help="modules of timm")
    parser.add_argument("--names", nargs="+", help="only these models")
    parser.add_argument("--stage", choices=["capture", "quantize"], default="capture")
    parser.add_argument("--redo", action="store_true", help="also run models that the CSV has already")
    parser.add_argument("--failed", action="store_true", help="run again what failed")
    parser.add_argument(
        "--shallow", action="store_true", help="build all models with two blocks, which takes a third of the time"
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds per model")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models.library(arguments.library)
    rows = read_rows()
    todo = [x for x in names_of(arguments.library, arguments.modules) if not arguments.names or x[1] in arguments.names]
    for module, name in todo:
        key = (arguments.library, name, arguments.stage)
        known = rows.get(key)
        if known is not None and not arguments.redo and not (arguments.failed and known["result"] != "ok"):
            continue
        row = isolated(arguments.library, name, arguments.stage, arguments.shallow, arguments.timeout)
        row = {"library": arguments.library, "module": module, "name": name, "stage": arguments.stage, **row}
        rows = {**read_rows(), key: row}  # another process may have added rows
        write_rows(rows)
        print(
            f"{row['result']:8}{name:50}{row['parity']:>8} {row['side']:>4} px {row['seconds']:>4} s  {row['reason']}",
            flush=True,
        )
    count = Counter((module, rows[arguments.library, name, arguments.stage]["result"] == "ok") for module, name in todo)
    for module in dict.fromkeys(module for module, _ in todo):
        good, bad = count[module, True], count[module, False]
        print(f"{module:32}{good:4} of {good + bad:4}  {good / (good + bad):.0%}")


if __name__ == "__main__":
    main()
