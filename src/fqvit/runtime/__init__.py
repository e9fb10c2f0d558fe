"""Runtimes of programs: native engine, reference and ONNX Runtime, each imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fqvit.runtime import native as native
    from fqvit.runtime import onnx as onnx
    from fqvit.runtime import reference as reference


def __getattr__(name: str) -> Any:
    # fqvit.runtime.reference must work after a plain `import fqvit`.
    if name in ("native", "onnx", "reference"):
        return import_module(f"fqvit.runtime.{name}")
    raise AttributeError(f"module 'fqvit.runtime' has no attribute {name!r}")
