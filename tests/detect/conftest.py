"""Fixtures for the tests of detectors."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def torchvision_ops() -> ModuleType:
    """Import torchvision.ops as an oracle; skip the test if its compiled operators do not load.

    Without them torchvision falls back to Python versions, which treat samples outside the feature map differently.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ops = importlib.import_module("torchvision.ops")
            loaded = importlib.import_module("torchvision.extension")._has_ops()
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        pytest.skip(f"torchvision cannot be imported: {error}")
    if not loaded:
        pytest.skip("torchvision's compiled operators do not load; they must match the installed torch")
    return ops
