"""Export a program as integer-only ONNX, QDQ ONNX, C99 or golden vectors."""
