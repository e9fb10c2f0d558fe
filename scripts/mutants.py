"""Which small mistakes in the numerics would the tests not notice? Results: docs/measurements/mutants.md.

    python scripts/mutants.py record             which test runs which line: build/mutants/lines.json, ten minutes
    python scripts/mutants.py run                every mutant of src/fqvit/ir and src/fqvit/quant: build/mutants/results.jsonl
    python scripts/mutants.py run --again        those that survived, once more, with more time for each
    python scripts/mutants.py show               counts of every module, and the survivors

A mutant is a function with other code in a fork of a process that has collected all tests; constants, defaults and the like,
and all mutants with --again, run in forks of one that has imported nothing of ours. It gets the tests that run its line, as
many as fit `--seconds`, until one fails. A run that is stopped goes on where it was. Tools that do this skip
functions with decorators (mutmut; all lowering rules are such) or start Python and torch anew for each mutant (cosmic-ray).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import random
import resource
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from mutant_lines import OUT, QUIET, ROOT, TESTS, calm, files, record
from mutations import Mutation, mutated, mutations

PRELOADED = "numpy torch torch.fx torch.nn.functional hypothesis hypothesis.extra.numpy msgspec PIL.Image safetensors.numpy"


def key(path: Path, m: Mutation) -> str:
    return f"{path}:{m.line}:{m.number}"


def tests_of(path: Path, m: Mutation, recorded: list[Any], seconds: float) -> list[str]:
    """Those that run its line, or else its statement, quick ones that run little else first; of what runs on import, those that
    use the file."""
    by_line, by_statement, by_file = [], [], []
    for test in recorded:
        lines = test["lines"].get(str(path))
        if lines:
            by_file.append(test)
            if m.line in lines:
                by_line.append(test)
            if m.statement and any(m.statement[0] <= line <= m.statement[1] for line in lines):
                by_statement.append(test)
    if m.statement:
        chosen = sorted(by_line or by_statement, key=lambda t: (0.02 + t["seconds"]) * sum(map(len, t["lines"].values())))
    else:  # those that see much of the file in little time
        chosen = sorted(by_file, key=lambda t: (0.05 + t["seconds"]) / len(t["lines"][str(path)]))
    names, total = [], 0.0
    for test in chosen:
        total += test["seconds"]
        if total > seconds and names:
            break
        names.append(test["test"])
    turn = {name.split("::")[0]: i for i, name in reversed(list(enumerate(names)))}  # of each file, by its first test
    return names[:10] + sorted(names[10:], key=lambda name: turn[name.split("::")[0]])  # a file's fixtures are made once


class Mutated(importlib.abc.MetaPathFinder):
    """Imports one module of ours from another tree."""

    def __init__(self, path: Path, code: CodeType) -> None:
        self.name, self.path, self.code = ".".join(path.with_suffix("").parts[1:]), path, code

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        loader = importlib.machinery.SourceFileLoader(fullname, str(ROOT / self.path))
        loader.get_code = lambda _: self.code  # type: ignore[method-assign, assignment]
        return importlib.util.spec_from_file_location(fullname, ROOT / self.path, loader=loader)


def functions(code: CodeType) -> dict[tuple[str, int], CodeType]:
    """The functions and methods of a module, by name and line; what is inside of them belongs to them."""
    found = {}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & inspect.CO_NEWLOCALS and constant.co_flags & inspect.CO_OPTIMIZED:
                found[constant.co_qualname, constant.co_firstlineno] = constant
            else:
                found |= functions(constant)  # the body of a class
    return found


class Collected:
    """A pytest plugin that runs mutants in the place of tests. Tests are collected once; forks run what they are given.

    items: by name. functions: all that there are, by file, name and line. failed: the first test that did, in this process.
    """

    def __init__(self, mutants: Callable[[Collected], None]) -> None:
        self.mutants, self.failed = mutants, ""
        self.items: dict[str, pytest.Item] = {}
        self.functions: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        for f in gc.get_objects():
            if type(f) is FunctionType:
                self.functions[f.__code__.co_filename, f.__code__.co_qualname, f.__code__.co_firstlineno].append(f)
        gc.freeze()
        self.mutants(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def run(self, tests: list[str]) -> str:
        """ "survived", or the first test that failed."""
        items = [self.items[name] for name in tests]
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return self.failed
        return "survived"


def swap(path: Path, m: Mutation, live_functions: dict[tuple[str, str, int], list[FunctionType]]) -> bool:
    """Gives the functions that the mutation changes their new code; False where that is not enough."""
    source, file = (ROOT / path).read_text(), str(ROOT / path)
    before, after = (functions(compile(tree, file, "exec")) for tree in (ast.parse(source), mutated(source, m.number)))
    changed = [name for name in before if before[name] != after.get(name)]
    live = [(f, after[name]) for name in changed if name in after for f in live_functions.get((file, *name), [])]
    if not live or any(f.__code__.co_freevars != code.co_freevars for f, code in live):
        return False
    for f, code in live:
        f.__code__ = code
    return True


def attempt(path: Path, m: Mutation, tests: list[str], limit: float, warm: Collected | None) -> str:
    """In a fork: "survived", or what noticed it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgrp()
        with contextlib.suppress(BaseException):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
            _child(path, m, tests, writer, warm)
        os._exit(0)
    os.close(writer)
    end = time.monotonic() + limit
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reader)
            return "timeout"
        time.sleep(0.01)
    verdict = os.read(reader, 4096).decode()
    os.close(reader)
    return verdict or "died"


def _child(path: Path, m: Mutation, tests: list[str], writer: int, warm: Collected | None) -> None:
    if warm is None:
        source = (ROOT / path).read_text()
        sys.meta_path.insert(0, Mutated(path, compile(mutated(source, m.number), str(ROOT / path), "exec")))
        verdict = _import_and_run(tests)
    elif swap(path, m, warm.functions):
        verdict = warm.run(tests)
    else:
        verdict = "cold"
    os.write(writer, verdict[:4000].encode())


def _import_and_run(tests: list[str]) -> str:
    verdicts: list[str] = []
    plugin = Collected(lambda collected: verdicts.append(collected.run(tests)))
    status = pytest.main([*QUIET, *{name.split("::")[0]: None for name in tests}], plugins=[plugin])
    return verdicts[0] if verdicts else f"collecting ({int(status)})"


def run(options: argparse.Namespace) -> None:
    recorded = json.loads((OUT / "lines.json").read_text())
    results = read_results()
    todo = []
    for path in files():
        if options.only and not any(word in str(path) for word in options.only.split(",")):
            continue
        every = mutations((ROOT / path).read_text())
        random.Random(f"{options.seed} {path}").shuffle(every)
        for m in every[: round(len(every) * options.sample)]:
            before = results.get(key(path, m))
            if before is None or (options.again and before["verdict"] in ("survived", "no test")):
                todo.append((path, m))
    print(f"{len(todo)} mutants", flush=True)
    for name in PRELOADED.split():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    calm()
    os.chdir(ROOT)
    gc.disable()
    gc.freeze()
    workers = []
    for share in range(options.jobs):
        pid = os.fork()
        if pid == 0:
            work(todo[share :: options.jobs], recorded, options)
            os._exit(0)
        workers.append(pid)
    for pid in workers:
        os.waitpid(pid, 0)
    show()


def work(todo: list[tuple[Path, Mutation]], recorded: list[Any], options: argparse.Namespace) -> None:
    """First what a process that has imported everything can run."""

    def one(path: Path, m: Mutation, warm: Collected | None) -> bool:
        tests = tests_of(path, m, recorded, options.seconds)
        start = time.monotonic()
        verdict = attempt(path, m, tests, 20 + 6 * options.seconds, warm) if tests else "no test"
        line = {"key": key(path, m), "verdict": verdict, "was": m.was, "now": m.now, "tests": len(tests)}
        line["seconds"] = round(time.monotonic() - start, 2)
        if verdict != "cold":
            with (OUT / "results.jsonl").open("a") as f:
                f.write(json.dumps(line) + "\n")
        return verdict != "cold"

    cold = [(path, m) for path, m in todo if m.statement is None or options.again]
    warmer = os.fork()
    if warmer == 0:

        def all_warm(collected: Collected) -> None:
            with (OUT / f"cold{os.getpid()}").open("w") as f:
                for item in todo:
                    if item not in cold and not one(*item, collected):
                        f.write(f"{key(*item)}\n")

        pytest.main([*QUIET, "-s", *TESTS.split()], plugins=[Collected(all_warm)])
        os._exit(0)
    os.waitpid(warmer, 0)
    left = OUT / f"cold{warmer}"
    keys = set(left.read_text().split())
    left.unlink()
    for path, m in todo:
        if (path, m) in cold or key(path, m) in keys:
            one(path, m, None)


def read_results() -> dict[str, dict[str, Any]]:
    """By key; a later one replaces an earlier one."""
    path = OUT / "results.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {r["key"]: r for r in map(json.loads, lines)}


def show() -> None:
    results = read_results()
    print(f"{'module':32} {'mutants':>8} {'run':>6} {'killed':>7} {'timeout':>8} {'survived':>9} {'no test':>8}")
    for path in files():
        keys = {key(path, m) for m in mutations((ROOT / path).read_text())}
        verdicts = Counter(r["verdict"] for k, r in results.items() if k in keys)
        ran = sum(verdicts.values())
        timeout, survived, untested = verdicts["timeout"], verdicts["survived"], verdicts["no test"]
        killed = ran - timeout - survived - untested
        print(f"{path!s:32} {len(keys):8} {ran:6} {killed:7} {timeout:8} {survived:9} {untested:8}")
    for k, r in sorted(results.items()):
        if r["verdict"] in ("survived", "no test"):
            print(f"{k}  {r['verdict']}: {r['was']}  ->  {r['now']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "run", "show"])
    parser.add_argument("--tests", default=TESTS)
    parser.add_argument("--only", default="", help="words, with commas; files whose path has one of them")
    parser.add_argument("--sample", type=float, default=1.0, help="the part of each file's mutants to run, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=6.0, help="of tests for a mutant")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="also those that survived before")
    options = parser.parse_args()
    if options.what == "record":
        record(options.tests.split())
    elif options.what == "run":
        run(options)
    else:
        show()


if __name__ == "__main__":
    main()
