"""Which test runs which line of src/fqvit/ir and src/fqvit/quant, and how long it takes: what mutants.py chooses tests by."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "mutants"
MODULES = """
ir: fixed ops attention exptable nibbles value program emit kit moves resize grids batch file rules rules_attention rules_maps
    lower lower_detector
quant: qparams observers histogram weights similarity simulate plan recipe calibrate channels compensate bitsplit fit auto dealt
    walk calibration calibrate_detector
"""
TESTS = """
tests/ir tests/quant tests/golden tests/runtime/test_networks.py tests/runtime/test_exhaustive.py
tests/robustness/hostile/test_fqvit_files.py tests/robustness/hostile/test_relative_files.py
tests/detect/test_programs.py tests/detect/test_sizes.py tests/detect/test_batches.py tests/detect/test_shared_weights.py
tests/distributed/test_workers.py
"""
# Seconds each, where others run the same lines; or nothing of these files.
SLOW = "not stay_near_float and not it_beats and not little_more_than_its_weights and not engine_is_exact and not onnx_is_exact"
SLOW += " and not torchrun and not processes and not killed_worker and not ends_all and not without_torchrun"
# Without plugins that nobody asked for and without a garbage collection of all of torch for every mutant.
QUIET = ["-q", "-x", "--no-header", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "_hypothesis_pytestplugin"]
QUIET += [word for name in ("cacheprovider", "unraisableexception", "threadexception") for word in ("-p", f"no:{name}")]


def files() -> list[Path]:
    """In the order of MODULES."""
    found, folder = [], ""
    for word in MODULES.split():
        if word.endswith(":"):
            folder = word[:-1]
        else:
            found.append(Path("src", "fqvit", folder, f"{word}.py"))
    assert set(found) == {p.relative_to(ROOT) for f in ("ir", "quant") for p in (ROOT / "src/fqvit" / f).glob("[a-z]*.py")}
    return found


class Record:
    """A pytest plugin: the lines of our files that each test runs, and how long it takes.

    What a shared fixture runs counts for every test that asks for it; caches are emptied, so that each test runs what it needs.
    """

    def __init__(self) -> None:
        self.wanted = {str(ROOT / path): str(path) for path in files()}
        self.lines: set[tuple[str, int]] = set()  # of what runs now
        self.of_fixture: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.tests: dict[str, dict[str, Any]] = {}
        self.good: set[str] = set()

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        return self.line if frame.f_code.co_filename in self.wanted else None

    def line(self, frame: FrameType, event: str, arg: object) -> Any:
        self.lines.add((self.wanted[frame.f_code.co_filename], frame.f_lineno))
        return self.line

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
        before, self.lines = self.lines, set()
        try:
            return (yield)
        finally:
            self.of_fixture[fixturedef.argname] |= self.lines
            self.lines |= before

    def pytest_runtest_setup(self, item: Any) -> None:
        for thing in gc.get_objects():
            if type(thing).__name__ == "_lru_cache_wrapper" and str(getattr(thing, "__module__", "")).startswith(
                ("tests", "fqvit")
            ):
                thing.cache_clear()
        self.lines = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.good.add(report.nodeid)

    def pytest_runtest_teardown(self, item: Any) -> None:
        self.tests[item.nodeid] = {"lines": set(self.lines), "fixtures": list(item.fixturenames)}


class Clock:
    """A pytest plugin: how long each test takes."""

    def __init__(self) -> None:
        self.took: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call":
            self.took[report.nodeid] = report.duration


def record(tests: list[str]) -> None:
    plugin = Record()
    calm()
    words = [*(word for word in QUIET if word != "-x"), "-k", SLOW, *tests]
    threading.settrace(plugin.trace)  # workers of tests/distributed/together.py are threads
    sys.settrace(plugin.trace)
    pytest.main(words, plugins=[plugin])
    sys.settrace(None)
    threading.settrace(None)
    clock = Clock()  # once more, since tracing takes its time
    pytest.main(words, plugins=[clock])
    before = json.loads((OUT / "lines.json").read_text()) if (OUT / "lines.json").exists() else []
    result = [test for test in before if test["test"] not in plugin.tests]
    for test, seen in plugin.tests.items():
        if test in plugin.good:
            lines = seen["lines"].union(*(plugin.of_fixture[name] for name in seen["fixtures"]))
            by_file: dict[str, list[int]] = defaultdict(list)
            for path, line in sorted(lines):
                by_file[path].append(line)
            result.append({"test": test, "seconds": round(clock.took[test], 4), "lines": by_file})
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "lines.json").write_text(json.dumps(result))
    print(f"{len(result)} tests, {sum(r['seconds'] for r in result):.0f} s")


def calm() -> None:
    """The same examples every time, and none of them reduced: only whether a test fails is asked."""
    from hypothesis import Phase, settings

    settings.register_profile(
        "mutants", database=None, derandomize=True, phases=[Phase.explicit, Phase.generate], deadline=None
    )
    settings.load_profile("mutants")
    sys.path.insert(0, str(ROOT))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.dont_write_bytecode = False
