"""Session-scoped fixtures: the embedded ViT as a program, its C export, and a C compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from fqvit.export.c import export
from fqvit.ir.program import Program
from tests.export.compiled import Builder
from tests.factories import embedded_program
from tests.factories import few_steps as few_steps
from tests.factories import one_thread as one_thread
from tests.native.compilers import tool


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(tool("cc", "gcc", "clang"), tmp_path_factory.mktemp("c"))


@pytest.fixture(scope="session")
def fmnist_vit() -> Program:
    return embedded_program("fmnist_vit")


@pytest.fixture(scope="session")
def exported_vit(fmnist_vit: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C export of the embedded ViT. Tests must not build in this folder."""
    folder = tmp_path_factory.mktemp("vit") / "c"
    export(fmnist_vit, folder)
    return folder
