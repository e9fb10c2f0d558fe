"""Build Linux wheels for x86-64 and AArch64 that also run on old systems, with the cross compiler Zig from PyPI: `make wheels`.

    python scripts/build_wheels.py [PLATFORM...] [-o dist]

The Python that runs this script must be 3.12 or later: its headers are used for every platform. The wheels use the stable ABI
of Python 3.12, which is the same in all later versions. Each wheel is checked by reading the header of its
extension. See also: .github/workflows/wheels.yml (builds and tests wheels on each platform), check_wheel.py (tests one).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels"
PAGE = "fqvit/assets/web/index.html"


@dataclass(frozen=True)
class Platform:
    """A platform to build for.

    zig: target of the compiler   tag: platform tag of the wheel   processor: CMAKE_SYSTEM_PROCESSOR
    magic: regular expression that matches the first bytes of a shared library, in hexadecimal
    """

    zig: str
    tag: str
    processor: str
    magic: str


PLATFORMS = {
    # ELF: class, byte order and version, then (after 8 bytes of padding) type and machine
    "linux-x86_64": Platform(
        "x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64", "x86_64", "7f454c46020101..................03003e00"
    ),
    "linux-aarch64": Platform(
        "aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64", "aarch64", "7f454c46020101..................0300b700"
    ),
}


class Build:
    """The build of one wheel. folder: contains everything that the build writes"""

    def __init__(self, name: str, jobs: int) -> None:
        self.platform, self.jobs = PLATFORMS[name], jobs
        self.folder = WORK / name
        self.folder.mkdir(parents=True, exist_ok=True)
        spec = importlib.util.find_spec("ziglang")
        if spec is None or not spec.submodule_search_locations:
            sys.exit("ziglang: not installed. Run `make wheels`, which installs what this script needs.")
        self.zig = Path(spec.submodule_search_locations[0]) / "zig"

    def tool(self, name: str) -> Path:
        """Write a script that runs `zig cc` or another command of Zig: CMake expects a compiler to be a single file."""
        # -s: without symbols. It is part of every command, because Zig compiles its C++ library once for each set of options.
        target = [] if name in ("ar", "ranlib") else ["-target", self.platform.zig, "-s"]
        words = [str(self.zig), name, *target]
        path = self.folder / f"zig-{name}"
        path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        path.chmod(0o755)
        return path

    def defines(self) -> dict[str, object]:
        """Return the variables with which CMake compiles for the platform instead of for this machine."""
        return {
            "CMAKE_SYSTEM_NAME": "Linux",
            "CMAKE_SYSTEM_PROCESSOR": self.platform.processor,
            "CMAKE_C_COMPILER": self.tool("cc"),
            "CMAKE_CXX_COMPILER": self.tool("c++"),
            "CMAKE_AR": self.tool("ar"),
            "CMAKE_RANLIB": self.tool("ranlib"),
            # nanobind uses stderr without its header, which libstdc++ includes and LLVM's C++ library does not.
            "CMAKE_CXX_FLAGS": "-include stdio.h",
            "Python_EXECUTABLE": sys.executable,
            "Python_INCLUDE_DIR": sysconfig.get_path("include"),
            "NB_SUFFIX_S": ".abi3.so",
        }

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


def check(wheel: Path, platform: Platform) -> None:
    """Exit unless the wheel has one extension for the platform and needs no newer system than its name says."""
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if re.search(r"\.(so|pyd|dylib|dll)$", name)]
        if len(found) != 1 or not fits(platform, archive.read(found[0])):
            sys.exit(f"{wheel.name}: {', '.join(found) or 'no extension'}, expected one extension for {platform.tag}.")
        if (ROOT / "src" / PAGE).exists() and PAGE not in archive.namelist():
            sys.exit(f"{wheel.name}: {PAGE} is missing, expected the page that `make web` built.")
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel)
    if f'following platform tag: "{platform.tag}"' not in " ".join(shown.split()):
        sys.exit(f"{wheel.name}: does not fit {platform.tag}:\n{shown}")


def fits(platform: Platform, library: bytes) -> bool:
    """Return whether a shared library was compiled for the platform, according to its header."""
    return re.match(platform.magic, library[:32].hex()) is not None


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
