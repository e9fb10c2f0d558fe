"""The compiled part, built from native/bind.cpp."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

version: str
"""Of the sources it was built from; differs from the package's only in a stale build."""

class BadProgram(ValueError):
    """A program that breaks a rule, or a machine that cannot run it."""

def cpu_features() -> dict[str, bool]:
    """Integer instruction sets that this machine can run: avx2, avx_vnni, avx512_vnni, neon, neon_dotprod, neon_i8mm."""

def instruction_sets() -> list[str]:
    """Families of kernels that this build has and this CPU can run, best first."""

def roi_align(
    map: NDArray[np.uint8],
    boxes: NDArray[np.int64],
    side: int,
    cell: int,
    zero: int,
    mult: int,
    shift: int,
    head_zero: int,
    last: int,
    threads: int,
    instruction_set: str = "",
) -> NDArray[np.uint8]:
    """native/roialign.h: [h, w, C] and boxes [n, 4] -> [n, side, side, C]. BadProgram where a limit is passed."""

class Engine:
    """native/engine.h. Values are known by number: 0 are the pixels, the others as constant() and add() return them."""

    def __init__(self, image: list[int], instruction_set: str, threads: int) -> None: ...
    def constant(self, array: np.ndarray[Any, Any], /) -> int: ...
    def add(self, name: str, tag: str, inputs: list[int], ints: list[int], arrays: list[np.ndarray[Any, Any]]) -> int: ...
    def finish(self, output: int, keep: bool, others: list[int] = []) -> None: ...
    def run(self, images: NDArray[np.uint8], /) -> np.ndarray[Any, Any]: ...
    def run_all(self, images: NDArray[np.uint8], /) -> list[np.ndarray[Any, Any]]: ...
    def profile(self, image: NDArray[np.uint8], rounds: int) -> list[tuple[str, str, float, int]]: ...
    def buffers(self, image: NDArray[np.uint8], numbers: list[int]) -> list[np.ndarray[Any, Any]]: ...
    @property
    def instruction_set(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def run_bytes(self) -> int: ...
    @property
    def constant_bytes(self) -> int: ...
