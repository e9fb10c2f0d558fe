"""Run a detector with integers only, from pixels to boxes, scores, labels and masks.

The compiled detector (native/detect) reads and verifies the file itself and runs everything; the reference (reference.py)
defines its exact results. A float appears only when a caller reads `IntegerFound.detections`. Needs no torch.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fqvit import _native
from fqvit.detect.fixed.exp import Integers
from fqvit.detect.fixed.found import IntegerFound
from fqvit.detect.fixed.reference import ReferenceDetector
from fqvit.detect.images import Input, Pixels, prepare, upright_pixels
from fqvit.distributed.workers import cores
from fqvit.errors import FqvitError
from fqvit.ir.file import DETECTOR, check_exists, container
from fqvit.runtime.native import OpTime, instruction_set

if TYPE_CHECKING:
    from fqvit.detect.program import DetectorHeader, DetectorProgram

Backend = Literal["native", "reference"]


class IntegerDetector:
    """A detector, from a file or from memory, that is ready to run. Several threads may share it.

    threads: None uses every core; native backend only   backend: both give bit-identical results; reference is slow
    """

    def __init__(self, program: DetectorProgram | str | Path, threads: int | None = None, backend: Backend = "native") -> None:
        """Load a detector. Raises FqvitError if it does not verify. A file is read once and may be replaced afterwards."""
        if backend not in ("native", "reference"):
            raise FqvitError(f"backend: {backend!r}, expected native or reference.")
        self.backend = backend
        self._runner: _NativeDetector | ReferenceDetector
        if backend == "native":
            self._runner = _NativeDetector(program, threads)
            self._header = None if isinstance(program, str | Path) else program.header
        else:
            loaded = _loaded(program)
            self._runner, self._header = ReferenceDetector(loaded), loaded.header

    @cached_property
    def header(self) -> DetectorHeader:
        """The detector without its constants."""
        from fqvit.detect.program import DetectorHeader

        if self._header is not None:
            return self._header
        assert isinstance(self._runner, _NativeDetector)
        return msgspec.json.decode(self._runner.model.header, type=DetectorHeader)

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the detector, in hexadecimal. Equal detectors have equal fingerprints."""
        return self._runner.fingerprint

    @property
    def classes(self) -> int:
        """Number of classes, without the background."""
        return self._runner.classes

    @property
    def kept_sizes(self) -> int:
        """Number of image sizes whose programs are in memory; the least recently used one is dropped first."""
        return self._runner.kept_sizes

    def detect(self, image: Input) -> IntegerFound:
        """Return all detections of a prepared image, best first. Its sides must be at most 8192 pixels after resizing."""
        return self._runner.detect(image)

    def profile(self, image: Input) -> tuple[IntegerFound, list[OpTime]]:
        """Like detect, and also return the wall time of each step. Native backend only.

        The steps are the ops of the pyramid (named by the buffer that they write), the heads (named by their network, such as
        boxes.0), and the steps between the networks. native/detect/detector.h lists their tags.
        """
        if not isinstance(self._runner, _NativeDetector):
            raise FqvitError("profile: the reference backend measures no times. Use the native backend.")
        return self._runner.profile(image)

    def detect_image(self, image: Image.Image) -> IntegerFound:
        """Return all detections of an image, best first. It is turned upright and resized as the detector's file says."""
        if isinstance(self._runner, _NativeDetector):
            return self._runner.detect_pixels(upright_pixels(image))
        return self._runner.detect(prepare(image, self.header.settings, self.header.resize))


class _NativeDetector:
    """The compiled detector."""

    def __init__(self, program: DetectorProgram | str | Path, threads: int | None) -> None:
        options = threads or cores(), instruction_set(None)
        where = f"{program}: " if isinstance(program, str | Path) else ""
        try:
            if isinstance(program, str | Path):
                check_exists(Path(program), DETECTOR)
                self.model = _native.load_detector_file(os.fsencode(program), *options)
            else:
                self.model = _native.load_detector_memory(_encoded(program), *options)
        except _native.BadProgram as error:
            raise FqvitError(f"{where}{error}.") from None

    @property
    def fingerprint(self) -> str:
        return self.model.fingerprint

    @property
    def classes(self) -> int:
        return self.model.classes

    @property
    def kept_sizes(self) -> int:
        return self.model.kept_sizes

    def profile(self, image: Input) -> tuple[IntegerFound, list[OpTime]]:
        height, width = image.height, image.width
        try:
            found, steps = self.model.profile(np.ascontiguousarray(image.pixels), height, width)
        except _native.BadProgram as error:
            raise FqvitError(f"{error}.") from None
        return self._found(found, height, width), [OpTime(*step) for step in steps]

    def detect(self, image: Input) -> IntegerFound:
        pixels, height, width = np.ascontiguousarray(image.pixels), image.height, image.width
        try:
            return self._found(self.model.detect_resized(pixels, height, width), height, width)
        except _native.BadProgram as error:
            raise FqvitError(f"{error}.") from None

    def detect_pixels(self, pixels: Pixels) -> IntegerFound:
        try:
            return self._found(self.model.detect(np.ascontiguousarray(pixels)), pixels.shape[0], pixels.shape[1])
        except _native.BadProgram as error:
            raise FqvitError(f"{error}.") from None

    def _found(self, found: _native.Detections, height: int, width: int) -> IntegerFound:
        return IntegerFound(*found, height, width, self.model.threshold, _paste)


def _paste(probabilities: NDArray[np.int32], box: Integers, height: int, width: int, threshold: int) -> NDArray[np.bool_]:
    return _native.paste_mask(probabilities, box, height, width, threshold).view(np.bool_)


def _loaded(program: DetectorProgram | str | Path) -> DetectorProgram:
    from fqvit.detect.program import DetectorProgram

    return DetectorProgram.load(program) if isinstance(program, str | Path) else program


def _encoded(program: DetectorProgram) -> bytes:
    """Return the detector as the bytes of a .fqvit file."""
    return container(DETECTOR, program.encoded(), program.fingerprint(), program.constants())
