"""Compile C exports for tests and run them on several images."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fqvit.export.c import export
from fqvit.ir.program import Program
from tests.native.compilers import run

TARGETS = Path(__file__).parent / "targets"
STRICT = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic")
MODEL = ("model.c", "fqvit_ops.c")


def sources(folder: Path) -> list[Path]:
    """Return the files that firmware links: all except main.c."""
    return [*(folder / name for name in MODEL), *sorted(folder.glob("weights*.c"))]


class Builder:
    """Exports and compiles programs. fqvit_ops.c is the same in all exports and is compiled once per set of flags."""

    def __init__(self, command: str, folder: Path) -> None:
        self.command, self.folder, self.count = command, folder, 0
        self._sanitizers: tuple[str, ...] | None = None

    @property
    def sanitizers(self) -> tuple[str, ...]:
        """Return flags that stop a program at undefined behaviour and out-of-bounds accesses, or () if not supported."""
        if self._sanitizers is None:
            flags = ("-fsanitize=undefined,address", "-fno-sanitize-recover=all")
            (self.folder / "nothing.c").write_text("int main(void) { return 0; }\n")
            command = [self.command, *flags, "nothing.c", "-o", "nothing"]
            works = subprocess.run(command, cwd=self.folder, capture_output=True, check=False).returncode == 0
            self._sanitizers = flags if works else ()
        return self._sanitizers

    def built(self, program: Program, *flags: str) -> Path:
        """Return an executable that reads images from stdin and prints their outputs."""
        self.count += 1
        folder = self.folder / str(self.count)
        export(program, folder)
        rest = [path for path in sources(folder) if path.name != "fqvit_ops.c"]
        to = folder / "batch"
        run(self.command, *STRICT, *flags, "-I", folder, TARGETS / "batch.c", *rest, self.ops(folder, flags), "-o", to)
        return to

    def ops(self, folder: Path, flags: tuple[str, ...]) -> Path:
        to = self.folder / f"ops{'_'.join(flags).translate(dict.fromkeys(map(ord, '-=,'), '_'))}.o"
        if not to.exists():
            run(self.command, *STRICT, *flags, "-O1", "-c", folder / "fqvit_ops.c", "-o", to)
        return to

    def outputs(self, program: Program, images: NDArray[np.uint8], *flags: str) -> NDArray[np.int64]:
        """Return the outputs [N, outputs] of the compiled program."""
        return outputs_of([self.built(program, *flags)], images)

    def all_outputs(self, program: Program, images: NDArray[np.uint8], *flags: str) -> list[NDArray[np.int64]]:
        """Return every output [N, ...] of the compiled program."""
        buffers = program.verify().buffers
        shapes = [buffers[output.buffer].shape for output in program.header.outputs]
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        parts = np.split(self.outputs(program, images, *flags), ends[:-1], axis=1)
        return [part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]


def outputs_of(command: list[Any], images: NDArray[np.uint8]) -> NDArray[np.int64]:
    done = subprocess.run([str(part) for part in command], input=images.tobytes(), capture_output=True, check=False)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stderr.decode()}"
    return np.array(done.stdout.split(), np.int64).reshape(len(images), -1)
