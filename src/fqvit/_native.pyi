"""The compiled engine, built from native/python/."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

version: str
"""Version of the sources that the engine was built from. It differs from the package's version only in a stale build."""

class BadProgram(ValueError):
    """The program violates a rule of the format, or this machine cannot run it."""

def cpu_features() -> dict[str, bool]:
    """Return which of avx2, avx_vnni, avx512_vnni, avx512_vbmi, neon, neon_dotprod and neon_i8mm this CPU supports."""

def instruction_sets() -> list[str]:
    """Return the instruction sets that this build contains and this CPU supports, fastest first."""

def peak(instruction_set: str = "") -> tuple[str, int]:
    """Return the instruction set, and the multiply-accumulates per second of its micro-kernel on data in the L1 cache."""

def roi_align(
    map: NDArray[np.uint8],
    boxes: NDArray[np.int64],
    side: int,
    cell: int,
    zero: int,
    mult: int,
    shift: int,
    head_zero: int,
    last: int,
    threads: int,
    instruction_set: str = "",
) -> NDArray[np.uint8]:
    """Compute RoIAlign: feature map [h, w, C], boxes [n, 4] -> [n, side, side, C]. Limits: native/core/roialign.h."""

def preprocess(
    pixels: NDArray[np.uint8],
    height: int,
    width: int,
    channels: int,
    resize: int,
    interpolation: str,
    squash: bool = False,
) -> NDArray[np.uint8]:
    """Resize and center-crop a decoded, upright image [h, w, c], bit-identically to fqvit.Preprocess.apply. c: 1, 3 or 4"""

def op_fields() -> str:
    """Return {tag: {field: {"required": bool, "default": value}}} of every op that the engine reads, as JSON, for tests."""

class Model:
    """A loaded .fqvit file: native/core/model.h. run() returns the first output, or every output if `all` is true."""

    def run(self, images: NDArray[np.uint8], all: bool) -> list[np.ndarray[Any, Any]]: ...
    def profile(self, image: NDArray[np.uint8], rounds: int) -> list[tuple[str, str, float, int]]: ...
    def buffers(self, image: NDArray[np.uint8], names: list[str]) -> list[np.ndarray[Any, Any]]: ...
    @property
    def header(self) -> bytes:
        """The JSON of the program, as it is stored."""
    @property
    def classes(self) -> bytes | None:
        """The class names, one per line, or None."""
    @property
    def fingerprint(self) -> str: ...
    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
    @property
    def output_kind(self) -> str:
        """The kind of the first output, such as logits."""
    @property
    def outputs(self) -> list[tuple[str, str, float, int, str, tuple[int, ...], tuple[int, ...]]]:
        """Name, kind, scale, zero point, type (u8, u16 or i32), shape and exponents alpha (may be empty) of every output."""
    @property
    def instruction_set(self) -> str: ...
    @property
    def macs(self) -> int:
        """Multiply-accumulates of the matrix products for one image."""
    @property
    def threads(self) -> int: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def run_bytes(self) -> int: ...
    @property
    def constant_bytes(self) -> int: ...

def load_file(path: bytes, threads: int, instruction_set: str, keep: bool, max_run_bytes: int) -> Model:
    """Load and verify a .fqvit file. Raises BadProgram with a one-line message that ends with a remedy."""

def load_memory(data: bytes, threads: int, instruction_set: str, keep: bool, max_run_bytes: int) -> Model:
    """Load and verify the bytes of a .fqvit file. Raises BadProgram."""

Detections = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]
"""Boxes [n, 4], scores [n], labels [n] and mask probabilities [n, side, side]; units: native/detect/detector.h."""

class Detector:
    """A loaded .fqvit file with a detector: native/detect/detector.h."""

    def detect(self, pixels: NDArray[np.uint8]) -> Detections:
        """Detect objects in a decoded, upright image [h, w, 3]. Raises BadProgram if the image is too large."""
    def detect_resized(self, pixels: NDArray[np.uint8], height: int, width: int) -> Detections:
        """Detect objects in a resized image. height, width: size of the original image, to which boxes are scaled"""
    def profile(
        self, pixels: NDArray[np.uint8], height: int, width: int
    ) -> tuple[Detections, list[tuple[str, str, float, int]]]:
        """Detect like detect_resized, and also return (name, tag, seconds, macs) of each step; see native/detect/detector.h."""
    @property
    def header(self) -> bytes:
        """The JSON of the detector, as it is stored."""
    @property
    def fingerprint(self) -> str: ...
    @property
    def classes(self) -> int:
        """Number of classes, without the background."""
    @property
    def threshold(self) -> int:
        """Smallest interpolated probability of a mask pixel, in units of 2^-30."""
    @property
    def instruction_set(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def kept_sizes(self) -> int:
        """Number of image sizes whose programs are in memory."""

def load_detector_file(path: bytes, threads: int, instruction_set: str) -> Detector:
    """Load and verify a .fqvit file with a detector. Raises BadProgram with a one-line message that ends with a remedy."""

def load_detector_memory(data: bytes, threads: int, instruction_set: str) -> Detector:
    """Load and verify the bytes of a .fqvit file with a detector. Raises BadProgram."""

def paste_mask(
    probabilities: NDArray[np.int32], box: NDArray[np.int64], height: int, width: int, threshold: int
) -> NDArray[np.uint8]:
    """Paste mask probabilities [side, side] of a box [4] into an image; returns [height, width], 1 for pixels of the mask."""
