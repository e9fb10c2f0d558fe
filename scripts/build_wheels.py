"""Build wheels for Linux, macOS and Windows on one Linux machine, with the cross compiler Zig from PyPI: `make wheels`.

    python scripts/build_wheels.py [PLATFORM...] [-o dist]

The Python that runs this script must be 3.12 or later: its headers are used for every platform. The wheels use the stable ABI
of Python 3.12, which is the same in all later versions. Each wheel is checked by reading the headers of its extension
(wheel_headers.py). See also: wine_python.py (runs the Windows wheel under Wine), check_wheel.py (tests an installed wheel),
.github/workflows/wheels.yml (builds and tests wheels on machines of each platform).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

from wheel_headers import problems

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels"
PAGE = "fqvit/assets/web/index.html"


@dataclass(frozen=True)
class Platform:
    """A platform to build for.

    zig: target of the compiler   tag: platform tag of the wheel
    system, processor: CMAKE_SYSTEM_NAME and CMAKE_SYSTEM_PROCESSOR
    """

    zig: str
    tag: str
    system: str
    processor: str

    @property
    def extension(self) -> str:
        """The file name of the extension. Python for Windows does not look for files that end in .abi3.pyd."""
        return "_native.pyd" if self.system == "Windows" else "_native.abi3.so"


PLATFORMS = {
    "linux-x86_64": Platform("x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64", "Linux", "x86_64"),
    "linux-aarch64": Platform("aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64", "Linux", "aarch64"),
    "macos-arm64": Platform("aarch64-macos.11.0", "macosx_11_0_arm64", "Darwin", "arm64"),
    "macos-x86_64": Platform("x86_64-macos.11.0", "macosx_11_0_x86_64", "Darwin", "x86_64"),
    "windows-x86_64": Platform("x86_64-windows-gnu", "win_amd64", "Windows", "AMD64"),
}

# Runs Zig and replaces two options for Apple's linker, which CMake and nanobind pass but Zig's linker does not support: -bundle
# (Zig writes a dynamic library instead), and the list of the symbols that the interpreter provides.
TOOL = """\
#!{python} -S
import os, re, sys

replaced = {{"-bundle": "-shared"}}
arguments = ["-Wl,-undefined,dynamic_lookup" if re.fullmatch(r"-Wl,@.*\\.sym", a) else replaced.get(a, a) for a in sys.argv[1:]]
os.execv({zig!r}, {words!r} + arguments)
"""

# What Python.h needs to know about 64-bit Windows. The file pyconfig.h of this machine describes Linux.
WINDOWS_CONFIG = """\
#define MS_WIN64
#define MS_WIN32
#define MS_WINDOWS
#define NT_THREADS
#define WITH_THREAD 1
#define Py_ENABLE_SHARED 1
#define HAVE_DECLSPEC_DLL
#define PLATLIBDIR "DLLs"
#define SIZEOF_SHORT 2
#define SIZEOF_INT 4
#define SIZEOF_LONG 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_FLOAT 4
#define SIZEOF_DOUBLE 8
#define SIZEOF_VOID_P 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_TIME_T 8
#define SIZEOF_WCHAR_T 2
#define SIZEOF_PID_T 4
#define ALIGNOF_SIZE_T 8
#define ALIGNOF_MAX_ALIGN_T 16
#define HAVE_STDDEF_H 1
#define HAVE_WCHAR_H 1
#define HAVE_UINTPTR_T 1
#define HAVE_DYNAMIC_LOADING
#define RETSIGTYPE void
typedef long long Py_ssize_t;
#define HAVE_PY_SSIZE_T 1
#define PY_SSIZE_T_MAX 9223372036854775807LL
"""


class Build:
    """The build of one wheel. folder: contains everything that the build writes"""

    def __init__(self, name: str, jobs: int) -> None:
        self.platform, self.jobs = PLATFORMS[name], jobs
        self.folder = WORK / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.zig = zig()

    def tool(self, name: str) -> Path:
        """Write a script that runs `zig cc` or another command of Zig: CMake expects a compiler to be a single file."""
        # -s: without symbols. It is part of every command, because Zig compiles its C++ library once for each set of options.
        target = [] if name in ("ar", "ranlib") else ["-target", self.platform.zig, "-s"]
        path = self.folder / f"zig-{name}"
        path.write_text(TOOL.format(python=sys.executable, zig=str(self.zig), words=[str(self.zig), name, *target]))
        path.chmod(0o755)
        return path

    def headers(self) -> Path:
        """Return a folder with Python.h and a pyconfig.h that fits the platform."""
        installed = Path(sysconfig.get_path("include"))
        if self.platform.system != "Windows":
            return installed
        folder = self.folder / "include"
        shutil.copytree(installed, folder, dirs_exist_ok=True)
        (folder / "pyconfig.h").write_text(WINDOWS_CONFIG)
        return folder

    def import_library(self) -> Path:
        """Write the import library of python3.dll, which every Python for Windows has, with the names of the stable ABI."""
        definition, library = self.folder / "python3.def", self.folder / "libpython3.a"
        definition.write_text("LIBRARY python3.dll\nEXPORTS\n" + "".join(f"  {name}\n" for name in stable_names()))
        run(self.zig, "dlltool", "-m", "i386:x86-64", "-D", "python3.dll", "-d", definition, "-l", library)
        return library

    def defines(self) -> dict[str, object]:
        """Return the variables with which CMake compiles for the platform instead of for this machine."""
        found: dict[str, object] = {
            "CMAKE_SYSTEM_NAME": self.platform.system,
            "CMAKE_SYSTEM_PROCESSOR": self.platform.processor,
            "CMAKE_C_COMPILER": self.tool("cc"),
            "CMAKE_CXX_COMPILER": self.tool("c++"),
            "CMAKE_AR": self.tool("ar"),
            "CMAKE_RANLIB": self.tool("ranlib"),
            # nanobind uses stderr without its header, which libstdc++ includes and LLVM's C++ library does not.
            "CMAKE_CXX_FLAGS": "-include stdio.h",
            "Python_EXECUTABLE": sys.executable,
            "Python_INCLUDE_DIR": self.headers(),
            "SKBUILD_SOSABI": "" if self.platform.system == "Windows" else "abi3",
        }
        if self.platform.system == "Darwin":
            found |= {"CMAKE_INSTALL_NAME_TOOL": "/bin/true", "CMAKE_OSX_SYSROOT": "/"}
        if self.platform.system == "Windows":
            library = self.import_library()
            found |= {"Python_LIBRARY": library, "Python_SABI_LIBRARY": library}
        return found

    def wheel(self, out: Path) -> Path:
        """Build, name and check the wheel, and return its path in the folder `out`."""
        made = self.folder / "made"
        shutil.rmtree(made, ignore_errors=True)
        options = [f"cmake.define.{name}={value}" for name, value in self.defines().items()]
        options += [f"build-dir={self.folder / 'cmake'}", "cmake.build-type=Release"]
        settings = [word for option in options for word in ("-C", option)]
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps", "--no-build-isolation")
        run(*pip, "-w", made, *settings, ROOT, CMAKE_BUILD_PARALLEL_LEVEL=str(self.jobs))
        run(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", self.platform.tag, *made.glob("*.whl"))
        (wheel,) = made.glob("*.whl")
        check(wheel, self.platform)
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, out / wheel.name))


def zig() -> Path:
    """Return the path of the program zig in the Python package ziglang."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("ziglang: not installed. Run `make wheels`, which installs what this script needs.")
    return Path(spec.submodule_search_locations[0]) / "zig"


def stable_names() -> list[str]:
    """Return the names that the stable ABI has on every platform. A test of Python's standard library lists them."""
    listing = Path(sysconfig.get_path("stdlib")) / "test" / "test_stable_abi_ctypes.py"
    if not listing.is_file():
        sys.exit(f"{listing}: not found, expected the tests of the standard library. Use a Python that contains them.")
    common = listing.read_text().split("SYMBOL_NAMES = (", 1)[1].split("\n)", 1)[0]
    return sorted(set(re.findall(r'"(\w+)"', common)))


def check(wheel: Path, platform: Platform) -> None:
    """Exit unless the wheel has one extension, which the platform can load, and needs no newer system than its name says."""
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if re.search(r"\.(so|pyd|dylib|dll)$", name)]
        if found != [f"fqvit/{platform.extension}"]:
            sys.exit(f"{wheel.name}: contains {', '.join(found) or 'no library'}, expected fqvit/{platform.extension}.")
        if wrong := problems(platform.system, platform.processor, archive.read(found[0])):
            sys.exit(f"{wheel.name}: {found[0]} does not fit {platform.tag}: {'; '.join(wrong)}.")
        if (ROOT / "src" / PAGE).exists() and PAGE not in archive.namelist():
            sys.exit(f"{wheel.name}: {PAGE} is missing, expected the page that `make web` built.")
    run(sys.executable, "-m", "abi3audit", "--strict", wheel)
    if platform.system == "Linux":
        shown = run(sys.executable, "-m", "auditwheel", "show", wheel)
        if f'following platform tag: "{platform.tag}"' not in " ".join(shown.split()):
            sys.exit(f"{wheel.name}: does not fit {platform.tag}:\n{shown}")


def run(*words: object, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, words))}: failed\n{done.stdout}\n{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("platforms", nargs="*", metavar="PLATFORM", help=f"{', '.join(PLATFORMS)}; default: all")
    parser.add_argument("-o", dest="out", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--jobs", type=int, default=2, help="number of compilers that run at the same time")
    args = parser.parse_args()
    if unknown := [name for name in args.platforms if name not in PLATFORMS]:
        parser.error(f"{unknown[0]}: unknown platform, expected one of {', '.join(PLATFORMS)}")
    if sys.version_info < (3, 12):
        sys.exit(f"Python {sys.version.split()[0]}: too old, expected 3.12 or later. Run `make wheels PYTHON312=python3.12`.")
    if not (ROOT / "src" / PAGE).exists():
        print("Building wheels without the page of `fqvit web`. Run `make wasm web` first to include it.")
    for name in args.platforms or PLATFORMS:
        wheel = Build(name, args.jobs).wheel(args.out)
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()
