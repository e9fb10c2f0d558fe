"""Run an exported ONNX file with ONNX Runtime: the same integers as the engine.

Needs only onnxruntime and the file, whose metadata contain the preprocessing and the class names. See also:
export/onnx/writer.py (writes the file), native.py (faster), reference.py (defines the results).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.ir.program import INPUT, Output
from fqvit.runtime.outputs import OutputInfo
from fqvit.runtime.pixels import checked_images

INSTALL = 'which is not installed. Run `pip install "fqvit[onnx]"`.'
Integers = np.ndarray[Any, Any]
DTYPES = {"tensor(uint8)": "u8", "tensor(uint16)": "u16", "tensor(int32)": "i32"}


class Session:
    """An ONNX file written by `fqvit export`, or its bytes, ready to run on the CPU.

    target: the runtime that a QDQ file was written for, None for integer-only files. Outputs of QDQ files are float values.
    threads: None lets ONNX Runtime choose. The results do not depend on the number of threads.
    """

    def __init__(self, source: str | Path | bytes, threads: int | None = None) -> None:
        try:
            import onnxruntime
        except ModuleNotFoundError:
            raise FqvitError(f"running ONNX: needs onnxruntime, {INSTALL}") from None
        name = "the exported program" if isinstance(source, bytes) else str(source)
        if not isinstance(source, bytes) and not Path(source).is_file():
            raise FqvitError(f"{name}: no such file. Pass a file written by `fqvit export --to onnx`.")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        options.log_severity_level = 3  # only errors, which are raised as exceptions too
        try:
            self._session = onnxruntime.InferenceSession(
                source if isinstance(source, bytes) else str(source), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime has no common base class for its exceptions
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise FqvitError(f"{name}: ONNX Runtime cannot load it ({reason}).") from None
        facts = self._session.get_modelmeta().custom_metadata_map
        try:
            self.model: str = facts["fqvit.model"]
            self.preprocess = msgspec.json.decode(facts["fqvit.preprocess"], type=Preprocess)
            self.output = msgspec.json.decode(facts["fqvit.output"], type=Output)
            self.outputs = self._described(facts)
        except (KeyError, ValueError, msgspec.DecodeError):
            raise FqvitError(f"{name}: has no fqvit metadata. Pass a file written by this version of `fqvit export`.") from None
        self.target = facts.get("fqvit.target")
        self.classes = tuple(facts["fqvit.classes"].split("\n")) if "fqvit.classes" in facts else None
        self.input_shape = (self.preprocess.height, self.preprocess.width, self.preprocess.channels)
        self._names = [output.name for output in self._session.get_outputs()]  # in the graph
        self.output_shape: tuple[int, ...] = self.outputs[0].shape

    def _described(self, facts: Mapping[str, str]) -> tuple[OutputInfo, ...]:
        """Return the descriptions of all outputs. Files of version 0.1.0 describe only the first output, without exponents."""
        found = self._session.get_outputs()
        if "fqvit.target" in facts:
            kinds = [row["kind"] for row in msgspec.json.decode(facts["fqvit.outputs"], type=list[dict[str, str]])]
            return tuple(
                OutputInfo(one.name, kind, 1.0, 0, "f32", tuple(one.shape[1:])) for one, kind in zip(found, kinds, strict=True)
            )
        if "fqvit.outputs" in facts:
            described = msgspec.json.decode(facts["fqvit.outputs"], type=tuple[OutputInfo, ...])
            if len(described) != len(found):
                raise msgspec.DecodeError
            return described
        dtype = DTYPES.get(found[0].type, found[0].type)
        return (
            OutputInfo(
                self.output.label, self.output.kind, self.output.scale, self.output.zero, dtype, tuple(found[0].shape[1:])
            ),
        )

    def run(self, images: NDArray[np.uint8]) -> Integers:
        """Return the first output for images uint8 [N, H, W, C]: int32 logits [N, classes], or codes of features."""
        return self._run(images, self._names[:1])[0]

    def run_all(self, images: NDArray[np.uint8]) -> tuple[Integers, ...]:
        """Like run, but return all outputs, in the order of `outputs`."""
        return self._run(images, self._names)

    def _run(self, images: NDArray[np.uint8], names: list[str]) -> tuple[Integers, ...]:
        images = checked_images(images, self.input_shape)
        if len(images) == 0:  # ONNX Runtime cannot infer shapes for an empty batch
            return tuple(found[:0] for found in self._run(np.zeros((1, *self.input_shape), np.uint8), names))
        return tuple(self._session.run(names, {INPUT: images}))
