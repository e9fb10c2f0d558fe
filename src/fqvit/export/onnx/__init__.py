"""Export a program as integer-only ONNX that matches the reference bit for bit."""

from __future__ import annotations

from fqvit.export.onnx.writer import export as export
from fqvit.export.onnx.writer import model as model
