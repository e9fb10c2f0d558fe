"""Define fixtures for all tests: the optional data folder, and timm as an optional oracle."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real weights and images next to the repository; skip the test if there is none."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs ../shared/data")
    return folder


@pytest.fixture(scope="session")
def timm() -> ModuleType:
    """Import timm, the oracle for float models and preprocessing; skip the test if that fails.

    A torchvision that was built for another torch has no native operators, and importing it fails unless the operators are
    declared. They are declared here and never called.
    """
    torch = pytest.importorskip("torch")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            declared = []
            try:
                importlib.import_module("torchvision")
            except (ImportError, RuntimeError):
                for name in ("nms", "qnms"):
                    if not hasattr(torch.ops.torchvision, name):
                        library = torch.library.Library("torchvision", "FRAGMENT")
                        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                        declared.append(library)
            module = importlib.import_module("timm")
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"timm cannot be imported: {error}")
    module._declared = declared  # type: ignore[attr-defined]  # a garbage-collected Library unregisters its operators
    return module
