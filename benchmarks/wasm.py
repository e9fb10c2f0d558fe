"""Compare the WebAssembly modules with onnxruntime-web and with the native engine: DeiT-Tiny, one thread, one image, CPU time.

    make wasm && npm install --prefix build/npm onnxruntime-web
    .venv/bin/python benchmarks/wasm.py [--rounds 15]

All peers take turns in one run, the modules and onnxruntime-web in one process of node. onnxruntime-web uses its wasm backend
with SIMD on one thread, on the fp32 model and on a QDQ int8 model made by quantize_static of ONNX Runtime. Writes
benchmarks/results/wasm.csv: median CPU milliseconds and the ratio to the module with SIMD128.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import time
from pathlib import Path
from statistics import median

import numpy as np
from speed_models import prepare
from version import commit

from fqvit import Engine
from fqvit.bench.prepare import export, float_model, quantize

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "wasm.csv"
NAME, SIZE = "deit_tiny", [224, 224, 3]
MINE = "fqvit simd128"
SLOW_ROUNDS = 3  # rounds of the scalar kernels, which take about a second per image


def make_files(data: Path, folder: Path) -> None:
    """Write the program, the fp32 model and the int8 model, unless they exist."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "model.s8.onnx").exists():
        return
    programs = ROOT / "build" / "speed"
    programs.mkdir(parents=True, exist_ok=True)
    model = prepare(NAME, ("fqvit",), data, programs)
    shutil.copy(model.programs["fqvit"], folder / "model.fqvit")
    onnx = export(float_model(NAME, str(model.weights), SIZE, 16, 1000), folder)
    images = np.random.default_rng(0).standard_normal((8, 3, 224, 224)).astype(np.float32)
    quantize(onnx, folder / "model.s8.onnx", images, "s8")


def measure(folder: Path, library: Path, rounds: int) -> dict[str, list[float]]:
    """Return the CPU milliseconds of every peer."""
    command = ["node", str(ROOT / "benchmarks" / "wasm.mjs"), str(folder), str(library), str(ROOT / "build" / "wasm")]
    node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert node.stdin and node.stdout
    peers = json.loads(node.stdout.readline())
    image = np.random.default_rng(0).integers(0, 256, (1, *SIZE)).astype(np.uint8)
    engines = {f"native {isa}": Engine(folder / "model.fqvit", 1, isa=isa) for isa in ("avx2", "scalar")}
    times: dict[str, list[float]] = {name: [] for name in (*peers, *engines)}
    for turn in range(rounds + 2):  # the first two are a warm-up, in which V8 compiles
        for name in times:
            if "scalar" in name and len(times[name]) == SLOW_ROUNDS:
                continue
            if name in engines:
                start = time.process_time()
                engines[name].run(image)
                taken = 1000 * (time.process_time() - start)
            else:
                node.stdin.write(f"{name}\n")
                node.stdin.flush()
                taken = float(node.stdout.readline())
            if turn >= 2:
                times[name].append(taken)
    node.communicate()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--library", type=Path, default=ROOT / "build/npm/node_modules/onnxruntime-web")
    args = parser.parse_args()
    folder = ROOT / "build" / "wasm-speed"
    make_files(args.data_root, folder)
    times = measure(folder, args.library, args.rounds)
    version = json.loads((args.library / "package.json").read_text())["version"]
    node = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    mine = median(times[MINE])
    with RESULTS.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["model", "peer", "CPU ms", "CPU ms least", "ratio", "rounds", "node", "onnxruntime-web", "commit"])
        for name, taken in times.items():
            middle, least = median(taken), min(taken)
            row = [NAME, name, f"{middle:.1f}", f"{least:.1f}", f"{middle / mine:.2f}", len(taken), node, version, commit()]
            rows.writerow(row)
            print(f"{name:24} {middle:8.1f} ms  {middle / mine:6.2f} x the time of {MINE}")


if __name__ == "__main__":
    main()
