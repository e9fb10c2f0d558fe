"""Export a program as QDQ ONNX: float ops with QuantizeLinear and DequantizeLinear at its quantized tensors."""

from __future__ import annotations

from fqvit.export.qdq.writer import build as build
from fqvit.export.qdq.writer import export as export
