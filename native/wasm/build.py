"""Compile the engine to WebAssembly modules with the C interface of native/include/fqvit.h: `make wasm`.

The compiler is Zig from PyPI (`pip install ziglang`), which contains clang, wasm-ld and the sources of libc and libc++. Zig
compiles its C++ library without exceptions, so the files of LLVM that throw and catch are compiled here from the same package.
Zig keeps compiled files in a cache, so a second build is fast. The modules import nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gzip
import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

NATIVE = Path(__file__).resolve().parent.parent
HERE = NATIVE / "wasm"
STANDARD = ("-std=c++20", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-fvisibility-inlines-hidden")
# Compiled for speed; everything else for size, as in native/CMakeLists.txt.
FAST = re.compile(r"^kernels/|^image/|/(roialign|boxes|proposals|mask|image|exp|opencv_weights|weights)\.cpp$")
# As in native/CMakeLists.txt: floating-point weights of the resizing have the same bits on every platform.
EXACT = ("image/weights.cpp", "detect/opencv_weights.cpp")
PAGE = 65536
MAX_PAGES = 32768  # 2 GiB
STACK_BYTES = 1 << 20


@dataclass(frozen=True)
class Variant:
    """One module. kernel_features: features of the target that only the kernels for WebAssembly are compiled with"""

    name: str
    kernel_features: str = ""


VARIANTS = (Variant("scalar"), Variant("simd128", "+simd128"))
# The files of LLVM's C++ library that are linked: Zig's own build of it has no exceptions.
LIBCXX = ("algorithm", "exception", "functional", "hash", "memory", "new_helpers", "stdexcept", "string", "variant", "vector")
LIBCXXABI = (
    *("cxa_aux_runtime", "cxa_default_handlers", "cxa_exception", "cxa_exception_storage", "cxa_guard", "cxa_handlers"),
    *("cxa_personality", "cxa_virtual", "private_typeinfo", "stdlib_exception", "stdlib_new_delete", "stdlib_stdexcept"),
    *("fallback_malloc", "stdlib_typeinfo"),
)
RUNTIME_MACROS = (
    *("LIBCXX_BUILDING_LIBCXXABI", "_LIBCPP_BUILDING_LIBRARY", "_LIBCXXABI_BUILDING_LIBRARY", "_LIBCXXABI_HAS_NO_THREADS"),
    "LIBCXXABI_SILENT_TERMINATE",
)
FEATURES = "+bulk_memory+sign_ext+mutable_globals+nontrapping_fptoint+exception_handling"


def package(name: str, remedy: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{name}: not installed. Run `{remedy}`.")
    return Path(spec.submodule_search_locations[0])


def exports() -> list[str]:
    """Return the functions of fqvit.h, and malloc and free, with which callers manage memory inside the module."""
    declared = re.findall(r"^FQVIT_API [^;(]*?(fqvit_\w+)\(", (NATIVE / "include" / "fqvit.h").read_text(), re.MULTILINE)
    return sorted(declared) + ["malloc", "free"]


def sources() -> list[str]:
    """Return the sources of native/CMakeLists.txt. Kernels of other processors compile to nothing."""
    found = re.search(r"set\(FQVIT_CORE\s([^)]*)\)", (NATIVE / "CMakeLists.txt").read_text())
    assert found
    return found.group(1).split()


def version() -> str:
    found = re.search(r'^version = "([^"]+)"', (NATIVE.parent / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    return found.group(1)


class Build:
    def __init__(self, folder: Path, jobs: int) -> None:
        self.folder = folder
        self.zig = package("ziglang", "pip install ziglang")
        self.json = package("nlohmann_json", "pip install nlohmann-json") / "include"
        self.pool = concurrent.futures.ThreadPoolExecutor(jobs)

    def compile(self, source: Path, features: str, *flags: str) -> concurrent.futures.Future[Path]:
        name = re.sub(r"\W+", "_", f"{source.relative_to(NATIVE if source.is_relative_to(NATIVE) else self.zig)}{features}")
        to = self.folder / "objects" / f"{name}.o"
        to.parent.mkdir(parents=True, exist_ok=True)
        language = "c++" if source.suffix == ".cpp" else "cc"
        return self.pool.submit(self.run, to, language, *self.target(features), *flags, "-c", str(source))

    def target(self, features: str) -> tuple[str, ...]:
        return ("-target", "wasm32-wasi", f"-mcpu=mvp{FEATURES}{features}", "-fwasm-exceptions", "-g0")

    def run(self, to: Path, language: str, *flags: str) -> Path:
        command = [str(self.zig / "zig"), language, *flags, "-o", str(to)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"zig {language}: failed for {to.name}\n{done.stderr}")
        return to

    def runtime(self) -> list[concurrent.futures.Future[Path]]:
        """Compile the parts of LLVM's C++ library that the engine uses, with C++ exceptions enabled."""
        lib = self.zig / "lib"
        folders = [f"-I{lib / name}" for name in ("libcxxabi/include", "libcxx/src", "libunwind/include", "libunwind/src")]
        flags = ("-Os", "-DNDEBUG", "-fvisibility=hidden", "-fvisibility-inlines-hidden", *folders)
        macros = (
            "LIBCXX_BUILDING_LIBCXXABI",
            "_LIBCPP_BUILDING_LIBRARY",
            "_LIBCXXABI_BUILDING_LIBRARY",
            "_LIBCXXABI_HAS_NO_THREADS",
        )
        cxx = ("-std=c++26", *(f"-D{name}" for name in (*macros, "LIBCXXABI_SILENT_TERMINATE")), *flags)
        return [
            *(self.compile(lib / f"libcxx/src/{name}.cpp", "", *cxx) for name in LIBCXX),
            *(self.compile(lib / f"libcxxabi/src/{name}.cpp", "", *cxx) for name in LIBCXXABI),
            self.compile(lib / "libunwind/src/Unwind-wasm.c", "", "-std=c23", "-D_LIBUNWIND_HIDE_SYMBOLS", *flags),
            self.compile(HERE / "tag.S", ""),
        ]

    def engine(self, variant: Variant) -> list[concurrent.futures.Future[Path]]:
        names = [*sources(), "wasm/layout.cpp", "wasm/system.cpp"]
        flags = (*STANDARD, f"-I{NATIVE}", f"-I{NATIVE / 'include'}", "-isystem", str(self.json), "-DFQVIT_BUILDING")
        flags = (*flags, f'-DFQVIT_VERSION="{version()}"')
        return [
            self.compile(
                NATIVE / name,
                variant.kernel_features if name.startswith("kernels/wasm/") else "",
                "-O3" if FAST.search(name) else "-Os",
                *(("-ffp-contract=off",) if name in EXACT else ()),
                *flags,
            )
            for name in names
        ]

    def link(self, variant: Variant, objects: list[Path]) -> Path:
        to = self.folder / f"fqvit-{variant.name}.wasm"
        linker = [f"--export={name}" for name in exports()]
        linker += [
            "--gc-sections",
            "--strip-all",
            f"--max-memory={PAGE * MAX_PAGES}",
            "-z",
            f"stack-size={STACK_BYTES}",
        ]
        flags = [*self.target(variant.kernel_features), "-O3", "-mexec-model=reactor", "-s"]
        return self.run(to, "cc", *flags, *(f"-Wl,{flag}" for flag in linker), *map(str, objects))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", dest="folder", type=Path, default=NATIVE.parent / "build" / "wasm", help="folder of the modules")
    parser.add_argument("--jobs", type=int, default=2, help="number of compilers that run at the same time")
    args = parser.parse_args()
    build = Build(args.folder, args.jobs)
    common = build.runtime()
    engines = {variant: build.engine(variant) for variant in VARIANTS}
    for variant, engine in engines.items():
        module = build.link(variant, [done.result() for done in (*common, *engine)])
        data = module.read_bytes()
        print(f"{module}: {len(data)} bytes, {len(gzip.compress(data, 9))} with gzip")


if __name__ == "__main__":
    main()
