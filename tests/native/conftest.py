"""Provide compilers as fixtures. All tests of a session share their object files."""

from __future__ import annotations

import platform

import pytest

from tests.native.compilers import Compiler, run, tool
from tests.native.library import Library, install, shared_folder


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(tool("g++", "c++"), tmp_path_factory.mktemp("native"))


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
    return Compiler(tool("aarch64-linux-gnu-g++"), tmp_path_factory.mktemp("aarch64"))


@pytest.fixture(scope="session")
def s390x_compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(tool("s390x-linux-gnu-g++"), tmp_path_factory.mktemp("s390x"))


@pytest.fixture(scope="session")
def windows_compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(tool("x86_64-w64-mingw32-g++-posix"), tmp_path_factory.mktemp("windows"), ".exe", ("-static",))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Return libfqvit, installed as a user would install it."""
    if platform.system() != "Linux":
        pytest.skip("needs Linux")
    with shared_folder(tmp_path_factory, "library") as folder:
        return install(folder, tool("gcc", "cc"), tool("g++", "c++"))
