"""Install a wheel for Windows into a Python for Windows, and run Python commands there under Wine: `make wheels-windows`.

    python scripts/wine_python.py WHEEL COMMAND...

The DLLs of the interpreter are those of python.org, taken from the wheel of panda3d on PyPI, which contains them for the
applications that it packages. Zig compiles the two files that this wheel lacks: python.exe, and python3.dll, which forwards the
stable ABI to python312.dll. The standard library is copied from the Python that runs this script, which must be 3.12, too.
Needs wine64 and the packages that `make wheels` installs. See also: check_wheel.py, the command that tests a wheel.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

from build_wheels import WORK, run, stable_names, zig

VERSION = "3.12"
PANDA = "panda3d==1.10.16"
# colorama: typer needs it on Windows only. The others have versions that Wine 8 can load; later versions need
# Windows functions that Wine 8 lacks.
PACKAGES = ("colorama", "numpy==1.26.4", "safetensors==0.4.3", "typer==0.16.1")
MAIN = """\
#include <wchar.h>
__declspec(dllimport) int Py_Main(int argc, wchar_t **argv);
int wmain(int argc, wchar_t **argv) { return Py_Main(argc, argv); }
"""
LEFT_OUT = {"_wmi.pyd"}  # calls a function that Wine 8 does not have; Python works without it


def download(folder: Path, *packages: str) -> Path:
    """Download wheels for Windows, without their dependencies."""
    platform = ("--platform", "win_amd64", "--python-version", VERSION, "--implementation", "cp", "--only-binary", ":all:")
    run(
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "-q",
        "--no-deps",
        *platform,
        "-d",
        folder,
        *packages,
    )
    return folder


def interpreter(folder: Path) -> None:
    """Assemble Python for Windows in a folder: python.exe, DLLs and the standard library."""
    (wheel,) = download(folder / "download", PANDA).glob("panda3d-*.whl")
    modules = folder / "DLLs"
    modules.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            file = Path(name).name
            if not name.startswith("deploy_libs/") or file.startswith("api-ms-win-") or file in LEFT_OUT:
                continue  # Wine has its own Universal C Runtime
            target = folder if file.lower().startswith(("python3", "vcruntime")) else modules
            (target / file).write_bytes(archive.read(name))
    ignored = shutil.ignore_patterns("test", "site-packages", "lib-dynload", "__pycache__", "config-*")
    shutil.copytree(sysconfig.get_path("stdlib"), folder / "Lib", ignore=ignored, dirs_exist_ok=True)
    compile_python(folder, folder / "download")


def compile_python(folder: Path, work: Path) -> None:
    """Compile python3.dll, which only forwards, and python.exe, which only calls Py_Main."""
    names, dll = stable_names(), f"python{VERSION.replace('.', '')}"
    (work / "empty.c").write_text("int unused;\n")
    (work / "python3.def").write_text("LIBRARY python3.dll\nEXPORTS\n" + "".join(f"  {name}={dll}.{name}\n" for name in names))
    (work / "imports.def").write_text("LIBRARY python3.dll\nEXPORTS\n  Py_Main\n")
    (work / "main.c").write_text(MAIN)
    cc = (zig(), "cc", "-target", "x86_64-windows-gnu", "-s")
    run(*cc, "-shared", work / "empty.c", work / "python3.def", "-o", folder / "python3.dll")
    run(zig(), "dlltool", "-m", "i386:x86-64", "-D", "python3.dll", "-d", work / "imports.def", "-l", work / "libpython3.a")
    run(*cc, "-municode", work / "main.c", work / "libpython3.a", "-o", folder / "python.exe")


def install(wheel: Path, folder: Path) -> None:
    """Install a wheel for Windows and its dependencies with the pip of this machine."""
    site = folder / "Lib" / "site-packages"
    shutil.rmtree(site, ignore_errors=True)
    platform = ("--platform", "win_amd64", "--python-version", VERSION, "--implementation", "cp", "--only-binary", ":all:")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-compile")
    run(*pip, "--target", site, *platform, wheel, *PACKAGES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, help="fqvit-*-win_amd64.whl")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="arguments of python.exe")
    args = parser.parse_args()
    if sysconfig.get_python_version() != VERSION:
        sys.exit(f"Python {sysconfig.get_python_version()}: expected {VERSION}, the version of the interpreter under Wine.")
    wine = shutil.which("wine64", path=f"{os.environ['PATH']}:/usr/lib/wine") or shutil.which("wine")
    if wine is None:
        sys.exit("wine64: not found. Install it (Debian: apt install wine64).")
    folder = WORK / "wine"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "python.exe").exists():
        interpreter(folder)
    install(args.wheel, folder)
    environment = {
        "WINEPREFIX": str(folder / "prefix"),
        "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": "mscoree=;mshtml=",
        "PYTHONUTF8": "1",
    }
    # Under Wine, Python needs an open standard input and cannot write to a file of this machine as its standard output.
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([wine, folder / "python.exe", *args.command], env={**os.environ, **environment}, **pipes) as python:
        for line in python.stdout or ():
            sys.stdout.write(line.decode(errors="replace"))
            sys.stdout.flush()
    sys.exit(python.returncode)


if __name__ == "__main__":
    main()
