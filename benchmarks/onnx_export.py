"""Time an integer-only ONNX export and the fp32 model, both in ONNX Runtime, and the native engine.

    .venv/bin/python benchmarks/onnx_export.py deit_tiny.fqvit [--rounds 40]

All three take turns in one process, on one thread, one image at a time. Prints the minimum and median CPU time. The fp32 model
has random weights (its own if it is an embedded model); its time does not depend on them. Also compares the logits of the
export with those of the engine on random images.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime

from fqvit import Program
from fqvit.bench import prepare
from fqvit.export.onnx import export
from fqvit.ir.ops import Linear
from fqvit.runtime.native import Engine


def session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def float_session(program: Program, folder: Path) -> Any:
    """Return a session of the fp32 model that has the same shapes as the program."""
    first = next(op for op in program.ops if isinstance(op, Linear))
    inputs, classes = (program.unpacked().constants[op.part("w")].shape for op in (first, program.ops[-1]))
    patch = math.isqrt(inputs[1] // program.input_shape[2])
    model = prepare.float_model(program.header.model, None, list(program.input_shape), patch, classes[0])
    return session(prepare.export(model, folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    asked = parser.parse_args()
    program = Program.load(asked.file)
    rng = np.random.default_rng(0)
    height, width, channels = program.input_shape
    pixels = rng.integers(0, 256, (8, height, width, channels), dtype=np.uint8)
    floats = rng.random((1, channels, height, width), np.float32)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "integer.onnx"
        export(program, path)
        integer, fp32, engine = session(path), float_session(program, Path(name)), Engine(program, 1)
        equal = sum(np.array_equal(integer.run(None, {"pixels": x[None]})[0], engine.run(x[None])) for x in pixels)
        runs: dict[str, Callable[[], object]] = {
            "onnxruntime fp32": lambda: fp32.run(None, {"images": floats}),
            "integer-only onnx": lambda: integer.run(None, {"pixels": pixels[:1]}),
            "engine": lambda: engine.run(pixels[:1]),
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(asked.rounds):
            for name, run in runs.items():
                run()  # warm-up: the other candidates have replaced the contents of the caches
                start = time.process_time()
                run()
                times[name].append(1000 * (time.process_time() - start))
    base = median(times["onnxruntime fp32"])
    print(f"{program.header.model}: logits of {equal} of {len(pixels)} random images equal the engine's")
    for name, found in times.items():
        print(f"{name:20} min {min(found):6.1f} ms  median {median(found):6.1f} ms  {median(found) / base:.2f} x fp32")


if __name__ == "__main__":
    main()
