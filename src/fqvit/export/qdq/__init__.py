"""Export a program as QDQ ONNX."""

from __future__ import annotations

from fqvit.export.qdq.writer import build as build
from fqvit.export.qdq.writer import export as export
