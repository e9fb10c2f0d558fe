"""Export a program as integer-only ONNX that gives the bits of the reference."""

from __future__ import annotations

from fqvit.export.onnx.writer import export as export
from fqvit.export.onnx.writer import model as model
