"""Cross-compile libfqvit with Zig, run it under emulators, and compare its outputs with the golden files.

Needs the Python package ziglang. Running the results needs the Debian packages qemu-user (AArch64) and wine64 (Windows).
Programs for macOS are compiled and linked, but not run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from fqvit import _native
from tests.native.compilers import NATIVE, run, tool
from tests.native.golden import GOLDEN, NAMES, write_golden
from tests.native.library import configure, json_include, shared_folder
from tests.native.test_gemm import ARM_SETS

pytestmark = pytest.mark.nightly
TINY = GOLDEN / "tiny_v1.fqvit"
PASSED = re.compile(r"\d{4,} passed, 0 failed")


def zig() -> list[str]:
    if found := shutil.which("zig"):
        return [found]
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("needs ziglang: pip install ziglang")
    return [sys.executable, "-m", "ziglang"]


class Cross:
    """libfqvit, built by Zig for a target."""

    def __init__(self, folder: Path, target: str, *options: str) -> None:
        self.folder = folder / "build"
        self.cc, cxx, ar = (self._script(folder, name, target) for name in ("cc", "c++", "ar"))
        if not (folder / "done").exists():
            tools = (
                f"-DCMAKE_C_COMPILER={self.cc}",
                f"-DCMAKE_CXX_COMPILER={cxx}",
                f"-DCMAKE_AR={ar}",
                "-DCMAKE_RANLIB=/bin/true",
            )
            speed = ("-DCMAKE_CXX_FLAGS_RELEASE=-O1", "-DFQVIT_WARNINGS_ARE_ERRORS=ON")
            configure(NATIVE, self.folder, f"-DFQVIT_JSON_INCLUDE={json_include()}", *tools, *speed, *options)
            run("cmake", "--build", self.folder, "--parallel", "2")
            (folder / "done").touch()

    def _script(self, folder: Path, name: str, target: str) -> Path:
        """Write a script that runs `zig cc` or another command of Zig: CMake expects a compiler to be a single file."""
        words = [*zig(), name, *([] if name == "ar" else ["-target", target])]
        path = folder / f"zig-{name}"
        path.write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
        path.chmod(0o755)
        return path

    def capi_test(self, to: Path, *flags: str | Path) -> Path:
        """Compile native/test/capi_test.c; `flags` link it to the library."""
        source, include = NATIVE / "test" / "capi_test.c", NATIVE / "include"
        run(self.cc, "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-I", include, source, *flags, "-o", to)
        return to


def cross(factory: pytest.TempPathFactory, target: str, system: str, processor: str, *options: str) -> Cross:
    with shared_folder(factory, target) as folder:
        machine = (f"-DCMAKE_SYSTEM_NAME={system}", f"-DCMAKE_SYSTEM_PROCESSOR={processor}")
        return Cross(folder, target, *machine, *options)


@pytest.fixture(scope="module")
def wine(tmp_path_factory: pytest.TempPathFactory) -> str:
    command = tool("wine64", "/usr/lib/wine/wine64", "wine")
    prefix = str(tmp_path_factory.mktemp("wine"))
    os.environ |= {"WINEPREFIX": prefix, "WINEDEBUG": "-all", "WINEDLLOVERRIDES": "mscoree=;mshtml="}
    return command


def test_aarch64_gives_the_golden_bits(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    built = cross(tmp_path_factory, "aarch64-linux-musl", "Linux", "aarch64")
    qemu = (tool("qemu-aarch64"), "-cpu", "max")
    write_golden(tmp_path)
    test = built.capi_test(tmp_path / "capi_test", built.folder / "libfqvit.a", "-lc++", "-static")
    *isas, last = run(*qemu, test, tmp_path, *NAMES).splitlines()
    assert isas == ARM_SETS["max"] and PASSED.fullmatch(last)
    assert run(*qemu, built.folder / "fqvit-run", "--isa", "list").split() == isas


def test_aarch64_with_glibc_is_compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    built = cross(tmp_path_factory, "aarch64-linux-gnu", "Linux", "aarch64")
    assert (built.folder / "libfqvit.so").exists()


def test_windows_gives_the_golden_bits(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, wine: str) -> None:
    built = cross(tmp_path_factory, "x86_64-windows-gnu", "Windows", "x86_64")
    write_golden(tmp_path)
    shutil.copy(built.folder / "libfqvit.dll", tmp_path)
    dynamic = built.capi_test(tmp_path / "dynamic.exe", "-DFQVIT_SHARED", built.folder / "libfqvit.dll.a")
    static = built.capi_test(tmp_path / "static.exe", built.folder / "libfqvit.a", "-lc++")
    for test in (dynamic, static):
        *isas, last = run(wine, test, tmp_path, *NAMES).splitlines()
        assert isas == _native.instruction_sets() and PASSED.fullmatch(last)


def test_windows_opens_files_of_any_name(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, wine: str) -> None:
    built = cross(tmp_path_factory, "x86_64-windows-gnu", "Windows", "x86_64")
    model, image = tmp_path / "mödel €.fqvit", tmp_path / "图 é.ppm"
    model.write_bytes(TINY.read_bytes())
    image.write_bytes(b"P6 2 2 255\n" + bytes(12))
    (found,) = map(json.loads, run(wine, built.folder / "fqvit-run.exe", model, image, "--json").splitlines())
    assert found["image"] == str(image) and found["model"] == "vit"
    run(wine, built.folder / "fqvit-run.exe", tmp_path / "ab€sent", image, code=2)


def test_macos_is_compiled_and_linked(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    built = cross(tmp_path_factory, "aarch64-macos", "Darwin", "arm64", "-DCMAKE_INSTALL_NAME_TOOL=/bin/true")
    test = built.capi_test(tmp_path / "capi_test", built.folder / "libfqvit.a", "-lc++")
    for path in (test, built.folder / "fqvit-run", built.folder / "libfqvit.dylib"):
        assert path.read_bytes()[:8] == bytes.fromhex("cffaedfe 0c000001")  # Mach-O for arm64
