"""Compile parts of native/ for tests, without CMake and Python headers, each file once per session.

See also: conftest.py (the compilers), library.py (the whole engine, built with CMake).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NATIVE = ROOT / "native"
STANDARD = ("-std=c++20", "-Wall", "-Wextra", "-Werror")
# As in native/CMakeLists.txt.
FLAGS = dict.fromkeys(("detect/opencv_weights.cpp", "image/weights.cpp"), ("-ffp-contract=off",))


def json_headers() -> Path:
    """Return the header folder of the Python package nlohmann-json; skip the test if the package is not installed."""
    spec = importlib.util.find_spec("nlohmann_json")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package nlohmann-json")
    return Path(spec.submodule_search_locations[0]) / "include"


def core() -> list[str]:
    """Return the sources listed in native/CMakeLists.txt, as paths below native/, without the C interface."""
    found = re.search(r"set\(FQVIT_CORE\s([^)]*)\)", (NATIVE / "CMakeLists.txt").read_text())
    assert found
    return [name for name in found.group(1).split() if not name.startswith("capi/")]


def tool(*names: str) -> str:
    """Return the first of these programs that is installed; skip the test if none is."""
    for name in names:
        if path := shutil.which(name):
            return path
    pytest.skip(f"needs {' or '.join(names)}")


def run(*command: str | Path, code: int = 0) -> str:
    """Run a program and return what it prints; fail with its output if the exit code differs from `code`."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    problem = f"{' '.join(map(str, command))}: exit code {done.returncode}, expected {code}"
    assert done.returncode == code, f"{problem}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def session_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder that all pytest-xdist workers of this session share."""
    root = factory.getbasetemp()
    folder = (root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root) / name
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def one_worker(lock: Path) -> Iterator[None]:
    """Admit one worker at a time."""
    import fcntl

    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Compiler:
    """A C++ compiler and a folder with what it made, which all workers of a session share.

    library: returns a static library with the whole engine; None: its sources are compiled with little optimization
    """

    def __init__(
        self,
        command: str,
        folder: Path,
        suffix: str = "",
        link: tuple[str, ...] = (),
        library: Callable[[], Path] | None = None,
    ) -> None:
        self.command = command
        self.folder = folder
        self.suffix, self.link = suffix, link
        self.library = library

    def object(self, source: str | Path, *flags: str) -> Path:
        """Compile a file, given by its path below native/ or by an absolute path."""
        flags = flags or ("-O2",)
        name = re.sub(r"\W+", "_", " ".join((str(source), *flags)))
        to = self.folder / f"{name}.o"
        with one_worker(to.with_suffix(".lock")):
            if not to.exists():
                flags = (*flags, *FLAGS.get(str(source), ()))
                run(self.command, *STANDARD, *flags, "-I", NATIVE, "-isystem", json_headers(), "-c", NATIVE / source, "-o", to)
        return to

    def engine(self) -> list[Path]:
        """Return the whole engine, which must be linked last."""
        return [self.library()] if self.library else [self.object(name, "-O1") for name in core()]

    def avx512_shim(self) -> list[Path]:
        """Compile the AVX-512 kernels with emulated instructions."""
        return [self.object(name, "-O1", "-DFQVIT_AVX512_SHIM") for name in core() if name.startswith("kernels/avx512/")]

    def program(self, *objects: Path) -> Path:
        to = self.folder / f"{objects[0].stem}{self.suffix}"
        with one_worker(self.folder / f"{objects[0].stem}.program.lock"):
            if not to.exists():
                run(self.command, *objects, "-pthread", *self.link, "-o", to)
        return to
