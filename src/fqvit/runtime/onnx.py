"""Running an exported ONNX file with ONNX Runtime: the same images in, the same integers out.

Needs onnxruntime, and nothing else but the file: export/onnx/writer.py has put preprocessing and class names into its metadata.
Its neighbours are native.py, which is faster, and reference.py, which says what is right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.ir.program import INPUT, Output

INSTALL = 'which is not installed. Run `pip install "fqvit[onnx]"`.'
Integers = np.ndarray[Any, Any]


class Session:
    """A file that `fqvit export` wrote, or its bytes, made ready to run on the CPU. threads: None leaves the choice to ONNX
    Runtime; the bits are the same for every number of them."""

    def __init__(self, source: str | Path | bytes, threads: int | None = None) -> None:
        try:
            import onnxruntime
        except ModuleNotFoundError:
            raise FqvitError(f"running ONNX: needs onnxruntime, {INSTALL}") from None
        name = "the exported program" if isinstance(source, bytes) else str(source)
        if not isinstance(source, bytes) and not Path(source).is_file():
            raise FqvitError(f"{name}: no such file. Pass one that `fqvit export --to onnx` wrote.")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        options.log_severity_level = 3  # errors, which come as exceptions too
        try:
            self._session = onnxruntime.InferenceSession(
                source if isinstance(source, bytes) else str(source), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime has a class for each kind of fault and no common one
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise FqvitError(f"{name}: ONNX Runtime cannot load it ({reason}).") from None
        facts = self._session.get_modelmeta().custom_metadata_map
        try:
            self.model: str = facts["fqvit.model"]
            self.preprocess = msgspec.json.decode(facts["fqvit.preprocess"], type=Preprocess)
            self.output = msgspec.json.decode(facts["fqvit.output"], type=Output)
        except (KeyError, msgspec.DecodeError):
            raise FqvitError(f"{name}: has no metadata of fqvit. Pass a file that `fqvit export --to onnx` wrote.") from None
        self.classes = tuple(facts["fqvit.classes"].split("\n")) if "fqvit.classes" in facts else None
        self.input_shape = (self.preprocess.height, self.preprocess.width, self.preprocess.channels)
        self.output_shape: tuple[int, ...] = tuple(self._session.get_outputs()[0].shape[1:])

    def run(self, images: NDArray[np.uint8]) -> Integers:
        """uint8 [N, H, W, C] -> int32 logits [N, classes] (or the codes of features)."""
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != self.input_shape:
            takes = ", ".join(map(str, self.input_shape))
            raise FqvitError(f"images of {images.dtype} {list(images.shape)}: this program takes uint8 [N, {takes}].")
        if len(images) == 0:  # a graph has shapes to infer and cannot from nothing
            return self.run(np.zeros((1, *self.input_shape), np.uint8))[:0]
        result: Integers = self._session.run(None, {INPUT: images})[0]
        return result
