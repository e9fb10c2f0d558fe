"""The embedded ViT as a program, and compilers, for all tests of a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from fqvit.export.c import export
from fqvit.ir.lower import lower
from fqvit.ir.program import Program
from fqvit.models.embedded import calibration_images
from fqvit.models.load import load_model
from fqvit.quant.calibrate import calibrate
from fqvit.quant.recipe import load_recipe
from tests.export.compiled import Builder
from tests.factories import one_thread as one_thread
from tests.native.compilers import tool


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(tool("cc", "gcc", "clang"), tmp_path_factory.mktemp("c"))


@pytest.fixture(scope="session")
def fmnist_vit() -> Program:
    model = load_model("fmnist_vit")
    return lower(model, calibrate(model, [calibration_images()[:64]], load_recipe("fqvit")))


@pytest.fixture(scope="session")
def exported_vit(fmnist_vit: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its C export, not built. Tests build elsewhere."""
    folder = tmp_path_factory.mktemp("vit") / "c"
    export(fmnist_vit, folder)
    return folder
