"""Test `fqvit doctor` on a complete and on a broken installation."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from fqvit import _native
from fqvit.cli.commands import doctor
from tests.cli.command_line import fqvit

ROOT = Path(__file__).parents[2]


def test_doctor_lists_the_core_the_cpu_and_every_package() -> None:
    done = fqvit("doctor", "--json")
    assert done.code == 0, done.err
    assert done.json["core"] == done.json["fqvit"] == _native.version
    assert done.json["kernels"] == _native.instruction_sets() and done.json["kernels"][-1] == "scalar"
    assert done.json["problems"] == []
    assert done.json["packages"]["numpy"] == np.__version__
    shown = fqvit("doctor")
    assert shown.code == 0 and all(package.name in shown.out for package in doctor.PACKAGES)


def test_doctor_shows_how_to_install_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    here = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("torch", "openvino") else here(name))
    done = fqvit("doctor")
    assert done.code == 0
    lines = {line.split()[0]: line for line in done.out.splitlines() if line}
    assert lines["torch"].endswith("pip install 'fqvit[quantize]'") and "missing" in lines["torch"]
    assert lines["openvino"].endswith("pip install openvino")


def test_the_extra_of_every_package_contains_that_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package in doctor.PACKAGES:
        if package.extra is not None:
            assert any(line.startswith(package.name) for line in extras[package.extra]), package


def test_a_core_that_cannot_be_loaded_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fqvit._native", None)
    done = fqvit("doctor", "--json")
    assert done.code == 2 and "compiled core cannot be loaded" in done.err and len(done.err.splitlines()) == 1


def test_kernels_with_wrong_results_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "matches_reference", lambda isa: isa != "scalar")
    done = fqvit("doctor")
    assert done.code == 2 and "the scalar kernels give wrong results" in done.err and "Install fqvit again" in done.err
