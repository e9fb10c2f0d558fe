"""The native engine: run a program on compiled kernels, bit for bit like the reference.

The engine reads and verifies the file itself (native/ir, native/core/model.cpp); this module only passes a path or bytes. It
imports the program's Python types only when they are asked for: they need 11 MB, and running a file needs none of them.
See also: reference.py, docs/explanation/engine.md.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fqvit import _native
from fqvit.distributed.workers import cores
from fqvit.errors import FqvitError
from fqvit.runtime.limits import MOST_BYTES
from fqvit.runtime.outputs import OutputInfo, unique_names
from fqvit.runtime.pixels import checked_images

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from fqvit.ir.program import Header, Program

Integers = np.ndarray[Any, Any]
ISA = "FQVIT_ISA"  # environment variable that selects the instruction set, for tests and comparisons


class Engine:
    """A program, from a file or from memory, that is ready to run natively.

    threads: None uses every core available to this process. Results are bit-identical for every number of threads.
    Several Python threads may share an engine; their runs wait for each other. For parallel runs create one engine per thread.
    """

    def __init__(
        self,
        program: Program | str | Path,
        threads: int | None = None,
        *,
        isa: str | None = None,
        keep: bool = False,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Load a program. Raises FqvitError if it does not verify or needs too much memory.

        isa: one of `instruction_sets()`; None uses $FQVIT_ISA, or else the best one
        keep: keep every buffer, as `buffers` requires; this is slower and raises the memory limit to 8 * most_bytes
        most_bytes: limit on the memory that the buffers of one image need, in bytes
        """
        if threads is not None and threads < 1:
            raise FqvitError(f"threads: {threads}, expected 1 or more.")
        options = threads or cores(), instruction_set(isa), keep, 8 * most_bytes if keep else most_bytes
        try:
            if isinstance(program, (str, os.PathLike)):
                self._model = _native.load_file(os.fsencode(program), *options)
            elif hasattr(program, "header"):
                self._model = _native.load_memory(_encoded(program), *options)
            else:
                raise FqvitError(f"engine: {type(program).__name__}, expected a Program or the path of a .fqvit file.")
        except _native.BadProgram as error:
            where = f"{program}: " if isinstance(program, (str, os.PathLike)) else ""
            raise FqvitError(f"{where}{error}.") from None

    @cached_property
    def header(self) -> Header:
        """The program without its constants."""
        import msgspec

        from fqvit.ir.program import Header

        return msgspec.json.decode(self._model.header, type=Header)

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        """Class names in the order of the logits; None if the program has none."""
        names = self._model.classes
        return None if names is None else tuple(names.decode("utf-8", "replace").split("\n"))

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the program, in hexadecimal. Equal programs have equal fingerprints."""
        return self._model.fingerprint

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the input."""
        return self._model.input_shape

    @property
    def isa(self) -> str:
        """The instruction set of the matrix kernels."""
        return self._model.instruction_set

    @property
    def macs(self) -> int:
        """The multiply-accumulates of the matrix products for one image."""
        return self._model.macs

    @property
    def threads(self) -> int:
        """The number of threads of a run."""
        return self._model.threads

    @cached_property
    def outputs(self) -> tuple[OutputInfo, ...]:
        """The outputs of `run_all`, in order; `run` returns the first."""
        found = [OutputInfo(*row) for row in self._model.outputs]
        names = unique_names([info.name for info in found])
        return tuple(replace(info, name=name) for info, name in zip(found, names, strict=True))

    def run(self, images: NDArray[np.uint8]) -> Integers:
        """Return int32 logits [N, classes], or codes of features, for images uint8 [N, H, W, C]."""
        return self._model.run(self._checked(images), False)[0]

    def run_all(self, images: NDArray[np.uint8]) -> tuple[Integers, ...]:
        """Like run, but return all outputs, in the order of the header."""
        return tuple(self._model.run(self._checked(images), True))

    def _checked(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return checked_images(images, self.input_shape)

    def classify(self, images: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Return the class with the highest score per image, i64 [N], for images uint8 [N, H, W, C]. Ties: the first class."""
        if self._model.output_kind != "logits":
            raise FqvitError(f"{self.header.model}: gives features ({self._model.output_kind}), not classes.")
        best: NDArray[np.int64] = self.run(images).argmax(-1)
        return best

    def buffers(self, image: NDArray[np.uint8]) -> dict[str, Integers]:
        """Run one image, uint8 [H, W, C], and return every buffer by name. Needs an engine created with keep=True."""
        names = [op.y for op in self.header.ops]
        return dict(zip(names, self._model.buffers(self._one(image), names), strict=True))

    def profile(self, image: NDArray[np.uint8], rounds: int = 20) -> list[OpTime]:
        """Measure every op, after fusion, for one image uint8 [H, W, C] on one thread: the fastest of `rounds` runs."""
        return [OpTime(*row) for row in self._model.profile(self._one(image), rounds)]

    def _one(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return self._checked(image[None] if isinstance(image, np.ndarray) else image)


@dataclass(frozen=True)
class Peak:
    """The speed of the micro-kernel of the matrix products on one thread. gmacs: 10^9 multiply-accumulates per second"""

    isa: str
    gmacs: float


def measure_peak(isa: str | None = None) -> Peak:
    """Measure the micro-kernel of the matrix products on data in the L1 cache, for about 30 ms. isa: as in Engine"""
    name, macs = _native.peak(instruction_set(isa))
    return Peak(name, macs / 1e9)


@dataclass(frozen=True)
class OpTime:
    """The time of one op. buffer: the buffer that it writes; macs: multiply-accumulates of its matrix products."""

    buffer: str
    op: str
    seconds: float
    macs: int


def instruction_sets() -> list[str]:
    """Return the instruction sets that this build contains and this CPU supports, best first."""
    return _native.instruction_sets()


def instruction_set(isa: str | None) -> str:
    """Return the requested instruction set after checking it; "" stands for the best."""
    where, name = ("isa", isa) if isa else (ISA, os.environ.get(ISA, ""))
    if name and name not in instruction_sets():
        known = ", ".join(instruction_sets())
        raise FqvitError(f"{where}: instruction set {name}: not in this build or not on this CPU, expected one of {known}.")
    return name


def _encoded(program: Program) -> bytes:
    """Return the program as the bytes of a .fqvit file."""
    from fqvit.ir.file import PROGRAM, container
    from fqvit.ir.program import encode_header

    return container(PROGRAM, encode_header(program.header), program.fingerprint(), program.constants)
