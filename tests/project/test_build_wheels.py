"""scripts/build_wheels.py accepts an extension only if its platform can load it. Nothing is compiled here."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from fqvit import _native
from tests.project.libraries import SYSTEM, MachO, elf, pe

ROOT = Path(__file__).resolve().parents[2]
DLLS = {"python3.dll": ("PyErr_Clear",), "KERNEL32.dll": ("Sleep",), "api-ms-win-crt-heap-l1-1-0.dll": ("malloc",)}
# A library that each platform loads.
LIBRARIES = {
    "linux-x86_64": elf(62),
    "linux-aarch64": elf(183),
    "macos-arm64": MachO("arm64").bytes(),
    "macos-x86_64": MachO("x86_64", signed=False).bytes(),
    "windows-x86_64": pe(DLLS),
}
BROKEN_MACHO = {
    "needs macOS 12.3.0, expected 11.0.0": MachO(oldest=(12, 3)),
    "needs /usr/local/lib/libc++.1.dylib, which is not a part of macOS": MachO(
        libraries=(SYSTEM, "/usr/local/lib/libc++.1.dylib")
    ),
    "png_read_image: in no library": MachO(imports=(("_png_read_image", -2),)),
    "PyErr_Clear: bound to a library, expected the interpreter": MachO(imports=(("_PyErr_Clear", 1),)),
    "_ZTI7Missing: weak, and not defined here": MachO(weak=("__ZTI7Missing",)),
    "does not export PyInit__native": MachO(exports=("_PyInit__other",)),
    "not signed": MachO(signed=False),
}
BROKEN_PE = {
    "compiled for ARM64, expected AMD64": pe(DLLS, machine=0xAA64),
    "not a DLL": pe(DLLS, dll=False),
    "needs libstdc++-6.dll, which is not a part of Windows": pe({**DLLS, "libstdc++-6.dll": ("_ZdlPv",)}),
    "needs python312.dll, which is not a part of Windows": pe({**DLLS, "python312.dll": ("PyErr_Clear",)}),
    "does not use python3.dll, the stable ABI": pe({"KERNEL32.dll": ("Sleep",)}),
    "does not export PyInit__native": pe(DLLS, exports=("PyInit__other",)),
}


@pytest.fixture(scope="module")
def headers() -> ModuleType:
    pytest.importorskip("lief")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        import wheel_headers

    return wheel_headers


@pytest.fixture(scope="module")
def script(headers: ModuleType) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        import build_wheels

    return build_wheels


@pytest.mark.parametrize("name", LIBRARIES)
def test_each_library_loads_on_one_platform_only(script: ModuleType, name: str) -> None:
    loads = [
        other
        for other, platform in script.PLATFORMS.items()
        if not script.problems(platform.system, platform.processor, LIBRARIES[name])
    ]
    assert loads == [name]


@pytest.mark.skipif(sys.platform != "linux", reason="the extension of this platform is not an ELF file")
def test_the_installed_extension_loads_on_its_platform_only(script: ModuleType) -> None:
    library = Path(str(_native.__file__)).read_bytes()
    assert sum(not script.problems(p.system, p.processor, library) for p in script.PLATFORMS.values()) == 1


@pytest.mark.parametrize("problem", BROKEN_MACHO)
def test_the_reason_why_macos_would_not_load_a_library_is_reported(headers: ModuleType, problem: str) -> None:
    assert headers.problems("Darwin", "arm64", BROKEN_MACHO[problem].bytes()) == [problem]


def test_a_change_after_signing_is_found(headers: ModuleType) -> None:
    library = bytearray(LIBRARIES["macos-arm64"])
    library[0x800] ^= 1
    assert headers.problems("Darwin", "arm64", bytes(library)) == ["its signature does not fit its content"]


@pytest.mark.parametrize("problem", BROKEN_PE)
def test_the_reason_why_windows_would_not_load_a_library_is_reported(headers: ModuleType, problem: str) -> None:
    assert headers.problems("Windows", "AMD64", BROKEN_PE[problem]) == [problem]


@pytest.mark.parametrize("system, processor", [("Linux", "x86_64"), ("Darwin", "arm64"), ("Windows", "AMD64")])
def test_a_file_of_another_kind_is_rejected(headers: ModuleType, system: str, processor: str) -> None:
    for content in (b"", b"MZ", b"\x7fELF", bytes(100)):
        (problem,) = headers.problems(system, processor, content)
        assert problem.startswith("not a")


def wheel_with(folder: Path, *files: tuple[str, bytes]) -> Path:
    wheel = folder / "fqvit.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files:
            archive.writestr(name, content)
    return wheel


def test_a_wheel_with_the_extension_of_another_platform_is_rejected(script: ModuleType, tmp_path: Path) -> None:
    wheel = wheel_with(tmp_path, ("fqvit/_native.abi3.so", LIBRARIES["linux-aarch64"]))
    with pytest.raises(SystemExit, match="does not fit manylinux_2_17_x86_64: compiled for AARCH64, expected x86_64"):
        script.check(wheel, script.PLATFORMS["linux-x86_64"])


def test_a_file_name_that_python_for_windows_does_not_look_for_is_rejected(script: ModuleType, tmp_path: Path) -> None:
    wheel = wheel_with(tmp_path, ("fqvit/_native.abi3.pyd", LIBRARIES["windows-x86_64"]))
    with pytest.raises(SystemExit, match=r"contains fqvit/_native.abi3.pyd, expected fqvit/_native.pyd"):
        script.check(wheel, script.PLATFORMS["windows-x86_64"])


def test_the_names_of_the_stable_abi_are_listed_by_the_standard_library(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match="expected the tests of the standard library"):
        script.stable_names()
    (tmp_path / "test").mkdir()
    listing = (
        'SYMBOL_NAMES = (\n\n    "PyErr_Clear",\n    "PyBool_Type",\n)\nif feature_macros["X"]:\n    SYMBOL_NAMES += ("PyX",)\n'
    )
    (tmp_path / "test" / "test_stable_abi_ctypes.py").write_text(listing)
    assert script.stable_names() == ["PyBool_Type", "PyErr_Clear"]


@pytest.mark.parametrize("option", ["-bundle", "-Wl,@/folder/darwin-ld-cpython.sym", "-c"])
def test_options_that_zig_does_not_support_are_replaced(script: ModuleType, tmp_path: Path, option: str) -> None:
    echo = tmp_path / "tool"
    echo.write_text(script.TOOL.format(python=sys.executable, zig="/bin/echo", words=["echo", "cc"]))
    echo.chmod(0o755)
    expected = {"-bundle": "-shared", "-c": "-c"}.get(option, "-Wl,-undefined,dynamic_lookup")
    assert subprocess.check_output([echo, option, "a.c"], text=True) == f"cc {expected} a.c\n"
