"""Test that scripts/build_wheels.py finds the platform of an extension in its header and rejects wheels for other platforms."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from fqvit import _native

ROOT = Path(__file__).resolve().parents[2]
# The first bytes of a library of each platform.
ELF = bytes.fromhex("7f454c46020101" + 9 * "00" + "0300")
LIBRARIES = {
    "linux-x86_64": ELF + b"\x3e\x00",
    "linux-aarch64": ELF + b"\xb7\x00",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_wheels", ROOT / "scripts" / "build_wheels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_wheels"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", LIBRARIES)
def test_each_header_belongs_to_one_platform(script: ModuleType, name: str) -> None:
    assert [other for other in script.PLATFORMS if script.fits(script.PLATFORMS[other], LIBRARIES[name])] == [name]


@pytest.mark.skipif(sys.platform != "linux", reason="the extension of this platform is not an ELF file")
def test_the_installed_extension_has_the_header_of_its_platform(script: ModuleType) -> None:
    library = Path(str(_native.__file__)).read_bytes()
    assert sum(script.fits(platform, library) for platform in script.PLATFORMS.values()) == 1


def test_a_wheel_with_the_extension_of_another_platform_is_rejected(script: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "fqvit.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fqvit/_native.abi3.so", LIBRARIES["linux-aarch64"])
    with pytest.raises(SystemExit, match="expected one extension for manylinux_2_17_x86_64"):
        script.check(wheel, script.PLATFORMS["linux-x86_64"])
