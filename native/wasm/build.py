"""Compile the engine to WebAssembly modules with the C interface of native/include/fqvit.h: `make wasm`.

The compiler is Zig from PyPI (`pip install ziglang`), which contains clang, wasm-ld and the sources of libc and libc++. Zig
compiles its C++ library without exceptions, so the files of LLVM that throw and catch are compiled here from the same package.
Zig keeps compiled files in a cache, so a second build is fast. Modules without threads import nothing; those with threads
import only their memory.
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
# Compiled with -ffp-contract=off, as in native/CMakeLists.txt, so that floating-point weights are the same on every platform.
EXACT = ("image/weights.cpp", "detect/opencv_weights.cpp")
PAGE = 65536
MAX_PAGES = 32768  # 2 GiB
INITIAL_PAGES = 128  # 8 MiB, for modules with threads; the JavaScript code that creates their memory must use the same number
STACK_BYTES = 1 << 20


@dataclass(frozen=True)
class Variant:
    """One module. vector_features: features of the target that the files compiled for speed may use"""

    name: str
    vector_features: str = ""
    has_threads: bool = False

    @property
    def features(self) -> str:
        return "+atomics" if self.has_threads else ""


VARIANTS = (
    Variant("scalar"),
    Variant("simd128", "+simd128"),
    Variant("relaxed_simd", "+simd128+relaxed_simd"),
    Variant("simd128-threads", "+simd128", True),
    Variant("relaxed_simd-threads", "+simd128+relaxed_simd", True),
)
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
# The programs of native/test that need no files, and the modules whose kernels and threads they test.
TESTS = ("gemm", "kernels", "attention", "engine", "preprocess", "roialign")
THREAD_TESTS = ("thread_pool", "engine", "roialign")
TEST_VARIANTS = {"relaxed_simd": TESTS, "relaxed_simd-threads": THREAD_TESTS}
THREAD_EXPORTS = ("fqvit_thread_run", "fqvit_threads_reserve")
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
        self.objects: dict[Path, concurrent.futures.Future[Path]] = {}

    def compile(self, source: Path, features: str, *flags: str) -> concurrent.futures.Future[Path]:
        """Compile a file, once for all modules that need it with the same features."""
        name = re.sub(r"\W+", "_", f"{source.relative_to(NATIVE if source.is_relative_to(NATIVE) else self.zig)}{features}")
        to = self.folder / "objects" / f"{name}.o"
        to.parent.mkdir(parents=True, exist_ok=True)
        language = "c++" if source.suffix == ".cpp" else "cc"
        if to not in self.objects:
            self.objects[to] = self.pool.submit(self.run, to, language, *self.target(features), *flags, "-c", str(source))
        return self.objects[to]

    def target(self, features: str) -> tuple[str, ...]:
        return ("-target", "wasm32-wasi", f"-mcpu=mvp{FEATURES}{features}", "-fwasm-exceptions", "-g0")

    def run(self, to: Path, language: str, *flags: str) -> Path:
        command = [str(self.zig / "zig"), language, *flags, "-o", str(to)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"zig {language}: failed for {to.name}\n{done.stderr}")
        return to

    def runtime(self, features: str) -> list[concurrent.futures.Future[Path]]:
        """Compile the parts of LLVM's C++ library that the engine uses, with C++ exceptions enabled."""
        lib = self.zig / "lib"
        folders = [f"-I{lib / name}" for name in ("libcxxabi/include", "libcxx/src", "libunwind/include", "libunwind/src")]
        flags = ("-Os", "-DNDEBUG", "-fvisibility=hidden", "-fvisibility-inlines-hidden", *folders)
        cxx = ("-std=c++26", *(f"-D{name}" for name in RUNTIME_MACROS), *flags)
        return [
            *(self.compile(lib / f"libcxx/src/{name}.cpp", features, *cxx) for name in LIBCXX),
            *(self.compile(lib / f"libcxxabi/src/{name}.cpp", features, *cxx) for name in LIBCXXABI),
            self.compile(lib / "libunwind/src/Unwind-wasm.c", features, "-std=c23", "-D_LIBUNWIND_HIDE_SYMBOLS", *flags),
            self.compile(HERE / "tag.S", features),
        ]

    def engine(self, variant: Variant) -> list[concurrent.futures.Future[Path]]:
        names = [*sources(), "wasm/layout.cpp", "wasm/system.cpp", "wasm/threads.cpp"]
        objects = [self.engine_file(variant, name) for name in names]
        return [*objects, *([self.compile(HERE / "threads.S", variant.features)] if variant.has_threads else [])]

    def engine_file(self, variant: Variant, name: str) -> concurrent.futures.Future[Path]:
        is_fast = FAST.search(name) is not None
        return self.compile(
            NATIVE / name,
            variant.features + (variant.vector_features if is_fast else ""),
            "-O3" if is_fast else "-Os",
            *(("-ffp-contract=off",) if name in EXACT else ()),
            *STANDARD,
            *(f"-I{NATIVE}", f"-I{NATIVE / 'include'}", "-isystem", str(self.json)),
            *("-DFQVIT_BUILDING", f'-DFQVIT_VERSION="{version()}"'),
        )

    def link(self, variant: Variant, objects: list[Path]) -> Path:
        to = self.folder / f"fqvit-{variant.name}.wasm"
        linker = [f"--export={name}" for name in exports()]
        return self.link_with(to, variant, objects, linker, "-mexec-model=reactor")

    def link_test(self, variant: Variant, name: str, objects: list[Path]) -> Path:
        to = self.folder / "tests" / f"{name}-{variant.name}.wasm"
        to.parent.mkdir(exist_ok=True)
        return self.link_with(to, variant, objects, [])

    def link_with(self, to: Path, variant: Variant, objects: list[Path], linker: list[str], *flags: str) -> Path:
        linker = [
            *linker,
            "--gc-sections",
            "--strip-all",
            f"--max-memory={PAGE * MAX_PAGES}",
            "-z",
            f"stack-size={STACK_BYTES}",
        ]
        if variant.has_threads:
            linker += [f"--export={name}" for name in THREAD_EXPORTS]
            linker += ["--shared-memory", "--import-memory", f"--initial-memory={PAGE * INITIAL_PAGES}"]
        features = self.target(variant.features + variant.vector_features)
        return self.run(to, "cc", *features, "-O3", "-s", *flags, *(f"-Wl,{flag}" for flag in linker), *map(str, objects))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", dest="folder", type=Path, default=NATIVE.parent / "build" / "wasm", help="folder of the modules")
    parser.add_argument("--tests", action="store_true", help="also compile the test programs, into its subfolder tests")
    parser.add_argument("--jobs", type=int, default=2, help="number of compilers that run at the same time")
    args = parser.parse_args()
    build = Build(args.folder, args.jobs)
    parts = {variant: [*build.runtime(variant.features), *build.engine(variant)] for variant in VARIANTS}
    for variant, objects in parts.items():
        module = build.link(variant, [done.result() for done in objects])
        data = module.read_bytes()
        print(f"{module}: {len(data)} bytes, {len(gzip.compress(data, 9))} with gzip")
    for variant in VARIANTS if args.tests else ():
        for name in TEST_VARIANTS.get(variant.name, ()):
            test = build.engine_file(variant, f"test/{name}_test.cpp")
            build.link_test(variant, name, [done.result() for done in (*parts[variant], test)])


if __name__ == "__main__":
    main()
