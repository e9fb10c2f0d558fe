"""The native module is built from this version and reports the CPU features correctly."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

import pytest

from fqvit import _native


def test_the_native_module_has_the_version_of_the_package() -> None:
    assert _native.version == version("fqvit")


def test_the_same_feature_names_are_reported_on_every_machine() -> None:
    features = _native.cpu_features()
    assert set(features) == {"avx2", "avx_vnni", "avx512_vnni", "avx512_vbmi", "neon", "neon_dotprod", "neon_i8mm"}
    assert all(type(value) is bool for value in features.values())
    assert features["neon"] == (platform.machine() in ("aarch64", "arm64"))


def test_the_features_are_those_in_proc_cpuinfo() -> None:
    listing = Path("/proc/cpuinfo")
    if not listing.exists() or platform.machine() != "x86_64":
        pytest.skip("needs /proc/cpuinfo of x86-64")
    flags = next(line for line in listing.read_text().splitlines() if line.startswith("flags")).split()
    features = _native.cpu_features()
    assert features["avx2"] == ("avx2" in flags)
    assert features["avx_vnni"] == ("avx_vnni" in flags)
    assert features["avx512_vnni"] == ({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"} <= set(flags))
    assert features["avx512_vbmi"] == (
        {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512ifma", "avx512vbmi"} <= set(flags)
    )
