"""Compare the speed of several builds of libfqvit, such as two commits, in one process.

    make library
    git worktree add build/before 8086a9e && make -C build/before library
    .venv/bin/python benchmarks/libraries.py build/before/build/library/lib/libfqvit.so build/library/lib/libfqvit.so \\
        --isa avx2 --files build/speed/deit_small.fqvit.fqvit,build/speed/vit_base.fqvit.fqvit

Every library loads every file. In each round the libraries take turns, in alternating order: one run without timing, then
as many timed runs as fit into 0.2 s. The table has the median CPU time of a run on one image and one thread, and the
change relative to the first library. All libraries must return the same bits. benchmarks/speed.py creates programs with
random weights in build/speed.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fqvit import Engine
from fqvit.bench.measure import smooth_images

TURN_S = 0.2  # seconds of timed runs per library and round


class Options(ctypes.Structure):
    """fqvit_options of fqvit.h."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("threads", ctypes.c_uint32),
        ("instruction_set", ctypes.c_char_p),
        ("max_run_bytes", ctypes.c_uint64),
    )


class Model:
    """A file, loaded by one library."""

    def __init__(self, library: Path, file: Path, isa: str | None, output: NDArray[np.generic]) -> None:
        """Load a file. output: array to which runs write"""
        self._library = ctypes.CDLL(str(library.resolve()))
        self._library.fqvit_last_error.restype = ctypes.c_char_p
        self._handle = ctypes.c_void_p()
        self._output = output
        options = Options(ctypes.sizeof(Options), 1, None if isa is None else isa.encode(), 0)
        self._check(self._library.fqvit_model_load(str(file).encode(), ctypes.byref(options), ctypes.byref(self._handle)))
        self.times: list[float] = []

    def run(self, image: NDArray[np.uint8]) -> None:
        """Run one image."""
        pixels, output = image.ctypes.data_as(ctypes.c_void_p), self._output.ctypes.data_as(ctypes.c_void_p)
        size = ctypes.c_size_t(self._output.nbytes)
        self._check(self._library.fqvit_model_run(self._handle, pixels, ctypes.c_size_t(1), output, size))

    def take_turn(self, image: NDArray[np.uint8]) -> None:
        """Append the CPU times of this turn to `times`."""
        self.run(image)
        end = time.perf_counter() + TURN_S
        while True:
            start = time.process_time()
            self.run(image)
            self.times.append(1e3 * (time.process_time() - start))
            if time.perf_counter() > end:
                return

    def _check(self, status: int) -> None:
        if status != 0:
            raise SystemExit(self._library.fqvit_last_error().decode())


def compare(libraries: list[Path], file: Path, isa: str | None, rounds: int) -> list[float]:
    """Return the median CPU time of each library, in ms. Stops the program if their results differ."""
    image = smooth_images((1, *Engine(file, 1, isa=isa).input_shape), seed=1)
    expected = Engine(file, 1, isa=isa).run(image)
    outputs = [np.zeros_like(expected) for _ in libraries]
    models = [Model(library, file, isa, output) for library, output in zip(libraries, outputs, strict=True)]
    for number in range(rounds):
        for model in models if number % 2 == 0 else models[::-1]:
            model.take_turn(image)
    for library, output in zip(libraries, outputs, strict=True):
        if not np.array_equal(output, expected):
            raise SystemExit(f"{library}: the result for {file} differs from that of the installed package")
    return [statistics.median(model.times) for model in models]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="+", type=Path, metavar="LIBRARY", help="the first one is the baseline")
    parser.add_argument("--files", required=True, help="comma-separated .fqvit files")
    parser.add_argument("--isa", help="instruction set, for example avx2; default: the fastest one")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    for name in arguments.files.split(","):
        first, *others = compare(arguments.libraries, Path(name), arguments.isa, arguments.rounds)
        changes = "".join(f"  {ms:8.2f} ms {100 * (ms / first - 1):+6.1f} %" for ms in others)
        print(f"{Path(name).name:40} {first:8.2f} ms{changes}", flush=True)


if __name__ == "__main__":
    main()
