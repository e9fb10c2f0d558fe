"""Measure how long loading a .fqvit file takes and how much memory a process that runs it needs, as JSON.

    make library
    .venv/bin/python benchmarks/load.py build/speed/deit_small.fqvit.fqvit --library build/library
    .venv/bin/python benchmarks/load.py FILE --library build/library --against OTHER/src      # another version of the package

Candidates take turns, each in a fresh process with one thread. `load_ms` is CPU time; in Python, it is that of
`fqvit.Engine(path)` after the imports. `peak_mb` is the peak memory after loading and one run; `other_mb` is `peak_mb` minus
the packed weights and the buffers of a run. All are medians. benchmarks/speed.py creates programs with random weights in
build/speed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from version import commit

from fqvit.bench import report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "load.json"

# Imports first, so that load_ms is the time of loading only.
PYTHON = """
import json, sys, time
import numpy as np
from fqvit import Engine
start = time.process_time()
engine = Engine(sys.argv[1], 1)
loaded = time.process_time()
engine.run(np.zeros((1, *engine.input_shape), np.uint8))
with open("/proc/self/status") as status:
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
native = getattr(engine, "_model", None)
sizes = {name: getattr(native, of, 0) for name, of in (("weight_bytes", "constant_bytes"), ("run_bytes", "run_bytes"))}
print(json.dumps({"load_ms": 1e3 * (loaded - start), "peak_bytes": peak * 1024, **sizes}))
"""


def compiled(library: Path, folder: Path) -> list[str]:
    """Compile load.c against an installed library; return the command."""
    program = folder / "load"
    flags = [f"-I{library}/include", f"-L{library}/lib", f"-Wl,-rpath,{library.resolve()}/lib", "-lfqvit"]
    subprocess.run(["cc", "-O2", str(ROOT / "benchmarks" / "load.c"), *flags, "-o", str(program)], check=True)
    return [str(program)]


def measure(command: list[str], source: Path | None, file: Path) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if source is not None:
        environment["PYTHONPATH"] = str(source)
    done = subprocess.run([*command, str(file)], capture_output=True, text=True, check=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return medians; sizes in MB of 10^6 bytes."""
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    out = {"load_ms": round(median["load_ms"], 1), "peak_mb": round(median["peak_bytes"] / 1e6, 1)}
    if median["weight_bytes"]:
        rest = median["peak_bytes"] - median["weight_bytes"] - median["run_bytes"]
        out |= {"weights_mb": round(median["weight_bytes"] / 1e6, 1), "run_mb": round(median["run_bytes"] / 1e6, 1)}
        out["other_mb"] = round(rest / 1e6, 1)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--library", type=Path, help="folder into which libfqvit was installed")
    parser.add_argument("--against", type=Path, help="the src folder of another version, with its compiled module")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dry", action="store_true", help="print only, do not write the JSON file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        python = [sys.executable, "-c", PYTHON]
        candidates: dict[str, tuple[list[str], Path | None]] = {"python": (python, ROOT / "src")}
        if arguments.against:
            candidates["python, other version"] = (python, arguments.against)
        if arguments.library:
            candidates["c"] = (compiled(arguments.library, Path(folder)), None)
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in candidates}
        for _ in range(arguments.rounds):
            for name, (command, source) in candidates.items():
                rows[name].append(measure(command, source, arguments.file))
    result = {
        "file": arguments.file.name,
        "file_mb": round(arguments.file.stat().st_size / 1e6, 1),
        "rounds": arguments.rounds,
        "commit": commit(),
        "cpu": report.machine()["cpu"],
        **{name: summary(found) for name, found in rows.items()},
    }
    text = json.dumps(result, indent=1) + "\n"
    print(text, end="")
    if not arguments.dry:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
