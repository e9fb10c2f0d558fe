"""A detector as integer programs: the pyramid for any image size, a box head and a mask head a stage, and what lies between.

verify() is the only gate: every part is a verified program, what is between them is proved not to overflow, and all of it fits
together. Saving and loading are in file.py; docs/format.md is the page for readers in other languages. Needs no torch.
Neighbour: ir/program.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fqvit.detect.fixed.compatibility import check_compatibility, check_grids
from fqvit.detect.fixed.constants import MAX_SIDE, DetectorConstants, make_constants
from fqvit.detect.resize import resized
from fqvit.detect.settings import DetectSettings
from fqvit.errors import FqvitError
from fqvit.ir.program import Header, Program, Verified, fingerprint, plain_header
from fqvit.ir.value import DAMAGED, Constant, Value

if TYPE_CHECKING:
    from fqvit.detect.fixed.detector import Backend, IntegerDetector
    from fqvit.detect.lower import LoweredDetector
    from fqvit.detect.model.detector import FloatDetector

VERSION = 1


class DetectorHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything of a detector but its constants: the JSON of the file. boxes, masks: one a stage"""

    version: int
    model: str
    source: str
    settings: DetectSettings
    between: DetectorConstants
    pyramid: Header
    boxes: tuple[Header, ...]
    masks: tuple[Header, ...]


@dataclass(frozen=True)
class DetectorProgram:
    """A detector as integer programs: what a .fqvit file of `fqvit detect quantize` holds.

    pyramid: at some image size; others follow from it   boxes, masks: programs of the heads, one a stage
    """

    model: str
    source: str
    settings: DetectSettings
    between: DetectorConstants = field(repr=False)
    pyramid: Program = field(repr=False)
    boxes: tuple[Program, ...] = field(repr=False)
    masks: tuple[Program, ...] = field(repr=False)

    @staticmethod
    def of(detector: FloatDetector, lowered: LoweredDetector) -> DetectorProgram:
        """What lowering gave, and the detector that it was made of."""
        boxes, masks = ([program.header for program in part] for part in (lowered.boxes, lowered.masks))
        between = make_constants(detector.settings, lowered.template.header, boxes, masks)
        return DetectorProgram(
            detector.name, detector.source, detector.settings, between, lowered.template, lowered.boxes, lowered.masks
        )

    @property
    def stages(self) -> int:
        """Box heads in a row: 1 in a Mask R-CNN, 3 in most cascades."""
        return len(self.boxes)

    @cached_property
    def classes(self) -> int:
        """How many there are, the background not counted."""
        head = self.boxes[0]
        return head.verify().buffers[head.header.output.buffer].channels - 1

    @property
    def header(self) -> DetectorHeader:
        """What the file's JSON says."""
        return DetectorHeader(
            version=VERSION,
            model=self.model,
            source=self.source,
            settings=self.settings,
            between=self.between,
            pyramid=self.pyramid.header,
            boxes=tuple(part.header for part in self.boxes),
            masks=tuple(part.header for part in self.masks),
        )

    def parts(self) -> Iterator[tuple[str, Program]]:
        """Names as constants in the file begin with, in the order of the flow."""
        yield "pyramid", self.pyramid
        for kind, programs in (("boxes", self.boxes), ("masks", self.masks)):
            yield from ((f"{kind}.{stage}", program) for stage, program in enumerate(programs))

    def constants(self) -> dict[str, Constant]:
        """Those of all parts, each named part/constant."""
        return {f"{part}/{name}": array for part, program in self.parts() for name, array in program.constants.items()}

    def encoded(self) -> bytes:
        """The header's JSON. Equal detectors have equal text."""
        header = self.header
        plain: dict[str, Any] = {
            name: msgspec.to_builtins(getattr(header, name), order="deterministic")
            for name in header.__struct_fields__
            if name not in ("pyramid", "boxes", "masks")
        }
        plain["pyramid"] = plain_header(header.pyramid)
        plain["boxes"], plain["masks"] = ([plain_header(one) for one in part] for part in (header.boxes, header.masks))
        return msgspec.json.encode(plain)

    def fingerprint(self) -> str:
        """SHA-256 over the header's JSON and every constant: equal detectors, equal fingerprints."""
        return fingerprint(self.encoded(), self.constants())

    def verify(self) -> dict[str, Verified]:
        """Of every part by name, or FqvitError naming the part at fault."""
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

    def ready(self, threads: int | None = None, backend: Backend = "native") -> IntegerDetector:
        """To run it. threads: None takes every core   backend: both give the same bits; reference is slow"""
        from fqvit.detect.fixed.detector import IntegerDetector

        return IntegerDetector(self.pyramid, self.boxes, self.masks, self.settings, self.between, threads, backend)

    def save(self, path: str | Path) -> None:
        """Verified, whole or not at all: FqvitError where that cannot be."""
        from fqvit.detect.file import save

        save(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> DetectorProgram:
        """Of a file that passes every check; FqvitError says what is wrong with others."""
        from fqvit.detect.file import load

        return load(Path(path))


def _check_settings(s: DetectSettings, d: DetectorProgram) -> None:
    """What running takes from the settings: the size of images, and names and numbers of the classes found."""
    _expect("settings", max(s.short, s.long) <= MAX_SIDE, f"images of {s.short} x {s.long}, at most {MAX_SIDE} can be")
    for what, given in (("class names", s.classes), ("categories", s.categories)):
        _expect("settings", len(given) in (0, d.classes), f"{len(given)} {what} for {d.classes} classes")
    for name, program in d.parts():
        preprocess = program.header.preprocess
        same = preprocess.mean == s.mean and preprocess.std == s.std
        _expect(name, same, "its pixels have another mean or std than those of the settings")


def _check_pyramid(pyramid: Program, buffers: Mapping[str, Value], strides: tuple[int, ...]) -> None:
    """It is a pyramid of colour images, with levels at these strides, for images of every size."""
    header = pyramid.header
    _expect("pyramid", header.input is None and header.preprocess.channels == 3, "does not take colour images")
    check_grids(header, buffers, strides)
    height, width, _ = header.input_shape
    again = resized(pyramid, height, width)
    same = again.header == header and again.constants.keys() == pyramid.constants.keys()
    same = same and all(np.array_equal(again.constants[name], array) for name, array in pyramid.constants.items())
    _expect("pyramid", same, "its moves do not lead to the program itself")


def _expect(part: str, condition: bool, said: str) -> None:
    if not condition:
        raise FqvitError(f"{part}: {said}. {DAMAGED}")
