"""What tests share: the optional data folder and the optional oracle."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real weights and images beside the repository; the tests that want them skip elsewhere."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs ../shared/data")
    return folder


@pytest.fixture(scope="session")
def timm() -> ModuleType:
    """The timm package, the oracle for float models and preprocessing; skips where it cannot be imported.

    torchvision built for another torch has no native operators, and its Python half stops at the first one that it
    describes unless somebody declared it. Nothing here calls them.
    """
    torch = pytest.importorskip("torch")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            declared = []
            for name in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, name):
                    library = torch.library.Library("torchvision", "FRAGMENT")
                    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                    declared.append(library)
            module = importlib.import_module("timm")
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"timm cannot be imported: {error}")
    module._declared = declared  # type: ignore[attr-defined]  # a Library unregisters when collected
    return module
