"""Build and install libfqvit with CMake for tests, once per session.

See also: capi.py (calls the library through ctypes).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.native.compilers import NATIVE, one_worker, run, session_folder, tool


@dataclass(frozen=True)
class Library:
    """Where libfqvit was installed, and the compilers that built it."""

    prefix: Path
    cc: str
    cxx: str

    @property
    def shared(self) -> Path:
        return self.prefix / "lib" / "libfqvit.so"

    @property
    def static(self) -> Path:
        return self.prefix / "lib" / "libfqvit.a"

    @property
    def command(self) -> Path:
        return self.prefix / "bin" / "fqvit-run"

    def compile(self, source: Path, to: Path, *flags: str | Path) -> Path:
        """Compile a C file and link it to the shared library."""
        folders = (f"-I{self.prefix}/include", f"-L{self.prefix}/lib", f"-Wl,-rpath,{self.prefix}/lib")
        run(self.cc, *flags, source, *folders, "-lfqvit", "-pthread", "-o", to)
        return to


def json_include() -> Path:
    """Return the folder that contains nlohmann/json.hpp: $FQVIT_JSON_INCLUDE, the Python package's or a system folder."""
    spec = importlib.util.find_spec("nlohmann_json")
    folders = [Path(os.environ.get("FQVIT_JSON_INCLUDE", "absent")), Path("/usr/include"), Path("/usr/local/include")]
    folders[1:1] = [Path(place) / "include" for place in (spec.submodule_search_locations or ())] if spec else []
    for folder in folders:
        if (folder / "nlohmann" / "json.hpp").exists():
            return folder
    pytest.skip("needs nlohmann/json.hpp: pip install nlohmann-json")


def configure(source: Path, folder: Path, *options: str) -> None:
    """Call CMake for a C or C++ project."""
    cache = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    run(tool("cmake"), "-S", source, "-B", folder, *cache, *options)


def install(folder: Path, cc: str, cxx: str, *options: str) -> Library:
    """Build native/ as a user does, in Release mode, and install it below the folder, unless that is done already."""
    prefix = folder / "prefix"
    if not (folder / "done").exists():
        json = f"-DFQVIT_JSON_INCLUDE={json_include()}"
        compilers = (f"-DCMAKE_C_COMPILER={cc}", f"-DCMAKE_CXX_COMPILER={cxx}")
        configure(
            NATIVE, folder / "build", json, *compilers, "-DCMAKE_INSTALL_LIBDIR=lib", "-DFQVIT_WARNINGS_ARE_ERRORS=ON", *options
        )
        run("cmake", "--build", folder / "build", "--parallel", "2")
        run("cmake", "--install", folder / "build", "--prefix", prefix)
        (folder / "done").touch()
    return Library(prefix, cc, cxx)


@contextmanager
def shared_folder(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """Yield a folder that all pytest-xdist workers of this session share; a lock admits one worker at a time."""
    folder = session_folder(factory, name)
    with one_worker(folder / "lock"):
        yield folder
