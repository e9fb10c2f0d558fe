"""Estimate the speed of the engine and of PyTorch: alternating runs, one image, one thread, one process.

For careful measurements use `fqvit bench`. See also: bench/ (one process per runtime, more runtimes, memory), gather.py.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fqvit.bench.eager import quicken
from fqvit.bench.rounds import COARSE
from fqvit.ir.program import Program
from fqvit.models.device import one_thread
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.runtime.native import Engine

# Stop after this many seconds or rounds, whichever comes first.
SECONDS = 3.0
ROUNDS = 15


@dataclass(frozen=True)
class Speed:
    """Median CPU time per image in milliseconds (wall time where the CPU clock is coarse).

    integer_ms: the engine   float_ms: the float model in PyTorch   isa: the instruction set of the engine
    """

    integer_ms: float
    float_ms: float
    isa: str
    rounds: int

    @property
    def ratio(self) -> float:
        """Speedup of the engine over PyTorch."""
        return self.float_ms / self.integer_ms


def quick_look(program: Program, model: FloatModel, image: NDArray[np.uint8]) -> Speed:
    """Time the engine and PyTorch on one image u8 [H, W, C].

    The float model uses fused attention, and its pixels are normalized before the clock starts. For a captured model, the
    original module is timed.
    """
    engine = Engine(program, threads=1)
    module = quicken(copy.deepcopy(model.original or model.module).eval())  # quicken modifies its argument
    pixels = image[None]
    floats = normalise(pixels, program.header.preprocess)
    with one_thread(), torch.inference_mode():
        times = alternate(lambda: engine.run(pixels), lambda: module(floats))
    integer_ms, float_ms = (statistics.median(own) for own in times)
    return Speed(integer_ms, float_ms, engine.isa, len(times[0]))


def alternate(*runs: Callable[[], object]) -> list[list[float]]:
    """Run the functions in turn and return their times in milliseconds, one list per function."""
    clock = time.perf_counter if COARSE else time.process_time  # CPU time depends least on other processes
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:  # warm up: the first run allocates memory
        run()
    end = time.perf_counter() + SECONDS
    while len(times[-1]) < ROUNDS and (not times[-1] or time.perf_counter() < end):
        for run, own in zip(runs, times):
            start = clock()
            run()
            own.append(1000 * (clock() - start))
    return times
