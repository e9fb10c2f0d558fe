"""Test that other projects can use the library: installed and found by CMake or pkg-config, or as a CMake subdirectory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fqvit import _native
from fqvit.ir.program import Program
from fqvit.runtime.reference import Reference
from tests.native.compilers import NATIVE, run, tool
from tests.native.golden import GOLDEN
from tests.native.library import Library, configure, install, json_include, shared_folder

CONSUMER = Path(__file__).with_name("consumer")
MODEL = GOLDEN / "tiny_v1.fqvit"
LARGEST = 700_000  # bytes of the stripped shared library


@pytest.fixture(scope="module")
def expected() -> str:
    import numpy as np

    program = Program.load(MODEL)
    logits = Reference(program).run(np.zeros((1, *program.input_shape), np.uint8))
    return f"{program.header.model} {_native.version} {logits[0, 0]}\n"


def check_consumers(folder: Path, expected: str) -> None:
    run("cmake", "--build", folder, "--parallel", "2")
    for name in ("consumer_fqvit", "consumer_static"):
        assert run(folder / name, MODEL) == expected


def test_every_part_is_installed(library: Library) -> None:
    installed = {str(path.relative_to(library.prefix)) for path in library.prefix.rglob("*") if not path.is_dir()}
    assert installed == {
        "bin/fqvit-run",
        "include/fqvit.h",
        "lib/cmake/fqvit/fqvit-config-version.cmake",
        "lib/cmake/fqvit/fqvit-config.cmake",
        "lib/cmake/fqvit/fqvit-targets-release.cmake",
        "lib/cmake/fqvit/fqvit-targets.cmake",
        "lib/libfqvit.a",
        "lib/libfqvit.so",
        "lib/libfqvit.so.1",
        f"lib/libfqvit.so.{_native.version}",
        "lib/pkgconfig/fqvit.pc",
    }


def test_the_stripped_library_is_small(library: Library, tmp_path: Path) -> None:
    run(tool("strip"), "-o", tmp_path / "stripped.so", library.shared)
    assert (tmp_path / "stripped.so").stat().st_size <= LARGEST


def test_the_library_needs_only_the_c_and_cxx_standard_libraries(library: Library) -> None:
    needed = [
        line.split("[")[1].rstrip("]") for line in run(tool("readelf"), "-d", library.shared).splitlines() if "NEEDED" in line
    ]
    assert {name.split(".so")[0] for name in needed} <= {"libstdc++", "libm", "libgcc_s", "libc", "ld-linux-x86-64"}


def test_a_cmake_project_without_cxx_finds_the_package_even_if_it_was_moved(
    library: Library, tmp_path: Path, expected: str
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(library.prefix, moved, symlinks=True)
    configure(CONSUMER, tmp_path / "build", f"-DCMAKE_PREFIX_PATH={moved}")
    check_consumers(tmp_path / "build", expected)


@pytest.mark.slow
def test_a_project_can_include_the_sources_as_a_subdirectory(library: Library, tmp_path: Path, expected: str) -> None:
    options = (f"-DFQVIT_SOURCE={NATIVE}", f"-DFQVIT_JSON_INCLUDE={json_include()}", f"-DCMAKE_CXX_COMPILER={library.cxx}")
    configure(CONSUMER, tmp_path, *options)
    check_consumers(tmp_path, expected)


@pytest.mark.slow
def test_clang_builds_the_library(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, expected: str) -> None:
    with shared_folder(tmp_path_factory, "library_clang") as folder:
        library = install(folder, tool("clang"), tool("clang++"))
    configure(CONSUMER, tmp_path, f"-DCMAKE_PREFIX_PATH={library.prefix}", f"-DCMAKE_C_COMPILER={library.cc}")
    check_consumers(tmp_path, expected)


@pytest.mark.parametrize("flags", [(), ("-static",)], ids=["shared", "static"])
def test_pkg_config_gives_the_flags(
    library: Library, flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: str
) -> None:
    monkeypatch.setenv("PKG_CONFIG_PATH", str(library.prefix / "lib" / "pkgconfig"))
    words = ["--static"] if flags else []
    libraries = run(tool("pkg-config"), *words, "--cflags", "--libs", "fqvit").split()
    run(library.cc, *flags, CONSUMER / "consumer.c", *libraries, "-o", tmp_path / "consumer")
    monkeypatch.setenv("LD_LIBRARY_PATH", os.devnull if flags else str(library.prefix / "lib"))
    assert run(tmp_path / "consumer", MODEL) == expected
    assert run("pkg-config", "--modversion", "fqvit").strip() == _native.version
