"""A detector as integer programs: the pyramid, one box head and one mask head per stage, and integer constants.

verify() checks that every part is a valid program, that the arithmetic between the parts cannot overflow, and that the parts
fit together. This module needs no torch.
See also: file.py (save and load), ir/program.py, docs/reference/format.md (the file format).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from PIL import Image

from fqvit.detect.fixed.compatibility import check_compatibility, check_grids
from fqvit.detect.fixed.constants import MAX_SIDE, DetectorConstants, make_constants
from fqvit.detect.images import FLOAT_RULE, Input, ResizeRule, prepare
from fqvit.detect.resize import resized
from fqvit.detect.settings import DetectSettings
from fqvit.errors import FqvitError
from fqvit.ir.program import Header, Program, Verified, fingerprint, plain_header, version_of
from fqvit.ir.value import DAMAGED, Constant, Value

if TYPE_CHECKING:
    from fqvit.detect.fixed.detector import Backend, IntegerDetector
    from fqvit.detect.lower import LoweredDetector
    from fqvit.detect.model.detector import FloatDetector


class DetectorHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON of a detector's file: everything except its arrays.

    between: constants of the arithmetic between the networks   boxes, masks: one per stage
    resize: how images are interpolated; omitted from the JSON if it is `rounded`, the only rule in fqvit 0.1.0
    """

    version: int
    model: str
    source: str
    settings: DetectSettings
    between: DetectorConstants
    pyramid: Header
    boxes: tuple[Header, ...]
    masks: tuple[Header, ...]
    resize: ResizeRule = "rounded"


@dataclass(frozen=True)
class DetectorProgram:
    """A detector as integer programs: the content of a .fqvit file from `fqvit detect quantize`.

    between: constants of the arithmetic between the networks   pyramid: for one image size; other sizes are derived from it
    boxes, masks: programs of the heads, one per stage   resize: how images are interpolated (images.py)
    """

    model: str
    source: str
    settings: DetectSettings
    between: DetectorConstants = field(repr=False)
    pyramid: Program = field(repr=False)
    boxes: tuple[Program, ...] = field(repr=False)
    masks: tuple[Program, ...] = field(repr=False)
    resize: ResizeRule = "rounded"

    @staticmethod
    def of(detector: FloatDetector, lowered: LoweredDetector) -> DetectorProgram:
        """Combine the lowered programs with the settings and the name of their float detector."""
        boxes, masks = ([program.header for program in part] for part in (lowered.boxes, lowered.masks))
        between = make_constants(detector.settings, lowered.template.header, boxes, masks)
        networks = (lowered.template, lowered.boxes, lowered.masks)
        return DetectorProgram(detector.name, detector.source, detector.settings, between, *networks, FLOAT_RULE)

    @property
    def stages(self) -> int:
        """Number of box heads in sequence: 1 in a Mask R-CNN, 3 in most cascades."""
        return len(self.boxes)

    @cached_property
    def classes(self) -> int:
        """Number of classes, without the background."""
        head = self.boxes[0]
        return head.verify().buffers[head.header.output.buffer].channels - 1

    @property
    def header(self) -> DetectorHeader:
        """The content of the file's JSON."""
        return DetectorHeader(
            version=max(version_of(part.ops) for _, part in self.parts()),
            model=self.model,
            source=self.source,
            settings=self.settings,
            between=self.between,
            pyramid=self.pyramid.header,
            boxes=tuple(part.header for part in self.boxes),
            masks=tuple(part.header for part in self.masks),
            resize=self.resize,
        )

    def parts(self) -> Iterator[tuple[str, Program]]:
        """Yield the networks' programs in the order of the file, with the names that prefix their constants there."""
        yield "pyramid", self.pyramid
        for kind, programs in (("boxes", self.boxes), ("masks", self.masks)):
            yield from ((f"{kind}.{stage}", program) for stage, program in enumerate(programs))

    def constants(self) -> dict[str, Constant]:
        """Return the arrays of all parts, named PART/NAME."""
        return {f"{part}/{name}": array for part, program in self.parts() for name, array in program.constants.items()}

    def encoded(self) -> bytes:
        """Return the header as JSON. Equal detectors have equal text."""
        header = self.header
        plain: dict[str, Any] = {
            name: msgspec.to_builtins(getattr(header, name), order="deterministic")
            for name in header.__struct_fields__
            if name not in ("pyramid", "boxes", "masks", "resize")
        }
        if header.resize != "rounded":  # files of fqvit 0.1.0 lack the field, and their text must stay the same
            plain["resize"] = header.resize
        plain["pyramid"] = plain_header(header.pyramid)
        plain["boxes"], plain["masks"] = ([plain_header(one) for one in part] for part in (header.boxes, header.masks))
        return msgspec.json.encode(plain)

    def fingerprint(self) -> str:
        """Return the SHA-256 over the header's JSON and every array: equal for equal detectors."""
        return fingerprint(self.encoded(), self.constants())

    def verify(self) -> dict[str, Verified]:
        """Verify every part and that the parts fit together; returns the results by part. FqvitError names the faulty part."""
        found = {}
        for name, program in self.parts():
            try:
                found[name] = program.verify()
            except FqvitError as error:
                raise FqvitError(f"{name}: {error}") from None
        self.between.check()
        check_compatibility(self.between, self.pyramid, self.boxes, self.masks)
        _check_pyramid(self.pyramid, found["pyramid"].buffers, self.between.strides)
        _check_settings(self.settings, self)
        return found

    def prepare(self, image: Image.Image) -> Input:
        """Prepare an image for this detector: upright, and resized by the detector's rule. The given image is not modified."""
        return prepare(image, self.settings, self.resize)

    def ready(self, threads: int | None = None, backend: Backend = "native") -> IntegerDetector:
        """Prepare the detector to run.

        threads: None uses every core   backend: "native" and "reference" give identical bits; "reference" is slow
        """
        from fqvit.detect.fixed.detector import IntegerDetector

        return IntegerDetector(self, threads, backend)

    def save(self, path: str | Path) -> None:
        """Write atomically; raises FqvitError if the detector does not verify."""
        from fqvit.detect.file import save

        save(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> DetectorProgram:
        """Load and validate a file; raises FqvitError if it is not a valid detector."""
        from fqvit.detect.file import load

        return load(Path(path))


def _check_settings(s: DetectSettings, d: DetectorProgram) -> None:
    """Check the settings used at run time: image size, class names and categories, normalization."""
    _expect(
        "settings", max(s.short, s.long) <= MAX_SIDE, f"images of {s.short} x {s.long}, expected sides of at most {MAX_SIDE}"
    )
    for what, given in (("class names", s.classes), ("categories", s.categories)):
        _expect("settings", len(given) in (0, d.classes), f"{len(given)} {what}, expected one per class ({d.classes}) or none")
    for name, program in d.parts():
        preprocess = program.header.preprocess
        same = preprocess.mean == s.mean and preprocess.std == s.std
        _expect(name, same, "mean or std of its preprocessing differs from that of the settings")


def _check_pyramid(pyramid: Program, buffers: Mapping[str, Value], strides: tuple[int, ...]) -> None:
    """Check that the pyramid's input is a colour image, that its levels have these strides, and that it can be resized."""
    header = pyramid.header
    _expect("pyramid", header.input is None and header.preprocess.channels == 3, "its input is not a colour image")
    check_grids(header, buffers, strides)
    # Programs for other image sizes are derived by `resized`, which must reproduce the stored program for the stored size.
    height, width, _ = header.input_shape
    derived = resized(pyramid, height, width)
    same = derived.header == header and derived.constants.keys() == pyramid.constants.keys()
    same = same and all(np.array_equal(derived.constants[name], array) for name, array in pyramid.constants.items())
    _expect("pyramid", same, "resizing it to its own image size changes the program")


def _expect(part: str, condition: bool, problem: str) -> None:
    if not condition:
        raise FqvitError(f"{part}: {problem}. {DAMAGED}")
