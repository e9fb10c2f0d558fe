"""Run one candidate in its own process.

Run as `python -m fqvit.bench.worker`: it answers every line of JSON on stdin with one line of JSON on stdout.
The first line says what to run. Every further line {"runs": n} runs the batch once untimed and n times timed. A worker imports
only what its candidate needs, so that peak memory is that of a process that runs nothing else.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Batch = np.ndarray[Any, Any]
Runner = Callable[[], Batch]


def fqvit(file: str, x: Batch, threads: int) -> Runner:
    from fqvit.runtime.native import Engine

    engine = Engine(file, threads)
    return lambda: engine.run(x)


def torch(file: str, x: Batch, threads: int) -> Runner:
    import torch

    from fqvit.bench.eager import quicken, read
    from fqvit.models.device import keep_freed_memory

    keep_freed_memory()  # otherwise a batch of 8 spends a tenth of its time in page faults
    torch.set_num_threads(threads)
    module = quicken(read(file))
    images = torch.from_numpy(x)

    def run() -> Batch:
        with torch.inference_mode():
            y: Batch = module(images).numpy()
            return y

    return run


def onnxruntime(file: str, x: Batch, threads: int) -> Runner:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_free_dimension_override_by_name("batch", len(x))  # fixes all shapes before the first run
    session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def run() -> Batch:
        y: Batch = session.run(None, {"images": x})[0]
        return y

    return run


def openvino(file: str, x: Batch, threads: int) -> Runner:
    import openvino as ov

    core = ov.Core()
    model = core.read_model(file)
    model.reshape(list(x.shape))
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",  # fp32 even on CPUs with bf16
        "ENABLE_CPU_PINNING": False,  # another process may use the core
    }
    request = core.compile_model(model, "CPU", settings).create_infer_request()

    def run() -> Batch:
        y: Batch = request.infer([x], share_inputs=True, share_outputs=True)[0]
        return y

    return run


def fqvit_detector(file: str, x: Batch, threads: int) -> Runner:
    from fqvit.bench.detector_runs import IntegerRun

    return IntegerRun(file, x, threads)


def torch_detector(file: str, x: Batch, threads: int) -> Runner:
    from fqvit.bench.detector_floats import float_run

    return float_run(file, x, threads)


KINDS: dict[str, Callable[[str, Batch, int], Runner]] = {
    "fqvit": fqvit,
    "torch": torch,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "fqvit detector": fqvit_detector,
    "torch detector": torch_detector,
}


def timed(run: Runner, runs: int) -> dict[str, object]:
    """Return the CPU and wall seconds of each run. An untimed run comes first: other candidates have used the caches.

    parts: for runners with an attribute `parts`, the seconds of each part, one number per run
    """
    run()
    cpu, wall = [], []
    parts: dict[str, list[float]] = {}
    for _ in range(runs):
        c, w = time.process_time(), time.perf_counter()
        run()
        cpu.append(time.process_time() - c)
        wall.append(time.perf_counter() - w)
        for name, seconds in getattr(run, "parts", {}).items():
            parts.setdefault(name, []).append(seconds)
    return {"cpu": cpu, "wall": wall, "memory": peak_memory(), "parts": parts}


def peak_memory() -> int | None:
    """Return the peak memory in bytes, None on Windows.

    On Linux ru_maxrss includes memory of the parent before exec, so VmHWM is preferred.
    """
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) * 1024
    except (OSError, StopIteration):
        try:
            import resource
        except ModuleNotFoundError:
            return None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    # Libraries may print: redirect their stdout to stderr, so that only answers go through the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(result: dict[str, object]) -> None:
        answers.write(json.dumps(result) + "\n")
        answers.flush()

    asked = json.loads(sys.stdin.readline())
    start = time.perf_counter()
    run = KINDS[asked["kind"]](asked["file"], np.load(asked["images"]), asked["threads"])
    first = run()
    answer({"load": time.perf_counter() - start, "first": first[0].astype(float).ravel()[:1000].tolist()})
    for line in sys.stdin:
        answer(timed(run, json.loads(line)["runs"]))


if __name__ == "__main__":
    main()
