"""Provide compilers as fixtures. All tests of a session share their object files."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tests.native.compilers import Compiler, run, session_folder, tool
from tests.native.library import Library, install, shared_folder


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Compiler:
    def static() -> Path:
        library: Library = request.getfixturevalue("library")
        return library.static

    folder = session_folder(tmp_path_factory, "native")
    return Compiler(tool("g++", "c++"), folder, library=static if platform.system() == "Linux" else None)


@pytest.fixture(scope="session")
def x86_compiler(compiler: Compiler) -> Compiler:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("needs x86-64")
    return compiler


@pytest.fixture(scope="session")
def gcc(x86_compiler: Compiler) -> Compiler:
    if "Free Software Foundation" not in run(x86_compiler.command, "--version"):
        pytest.skip("needs GCC, whose -mgeneral-regs-only rejects floats; clang with this option rejects the standard headers")
    return x86_compiler


@pytest.fixture(scope="session")
def aarch64_compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(tool("aarch64-linux-gnu-g++"), session_folder(tmp_path_factory, "aarch64"))


@pytest.fixture(scope="session")
def s390x_compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(tool("s390x-linux-gnu-g++"), session_folder(tmp_path_factory, "s390x"))


@pytest.fixture(scope="session")
def windows_compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(tool("x86_64-w64-mingw32-g++-posix"), session_folder(tmp_path_factory, "windows"), ".exe", ("-static",))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Return libfqvit, installed as a user would install it."""
    if platform.system() != "Linux":
        pytest.skip("needs Linux")
    with shared_folder(tmp_path_factory, "library") as folder:
        return install(folder, tool("gcc", "cc"), tool("g++", "c++"))
