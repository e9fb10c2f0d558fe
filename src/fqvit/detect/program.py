"""A detector as integer programs: the pyramid for any image size, a box head and a mask head a stage, and what lies between.

verify() is the only gate: every part is a verified program, and the parts fit each other and the settings. Saving and loading
are in file.py; docs/format.md is the page for readers in other languages. Needs no torch. Neighbour: ir/program.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fqvit.detect.settings import DetectSettings
from fqvit.errors import FqvitError
from fqvit.ir.program import Header, Kind, Output, Program, Verified, fingerprint, plain_header
from fqvit.ir.resize import resized
from fqvit.ir.value import DAMAGED, Constant, Value

if TYPE_CHECKING:
    from fqvit.ir.lower_detector import LoweredDetector
    from fqvit.models.detector import FloatDetector

VERSION = 1
MAX_SIDE = 8192  # of images that networks see; boxes between them are proved for it


class DetectorHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything of a detector but its constants: the JSON of the file. boxes, masks: one a stage"""

    version: int
    model: str
    source: str
    settings: DetectSettings
    pyramid: Header
    boxes: tuple[Header, ...]
    masks: tuple[Header, ...]


@dataclass(frozen=True)
class DetectorProgram:
    """pyramid: at some image size; others follow from it   boxes, masks: programs of the heads, one a stage"""

    model: str
    source: str
    settings: DetectSettings
    pyramid: Program = field(repr=False)
    boxes: tuple[Program, ...] = field(repr=False)
    masks: tuple[Program, ...] = field(repr=False)

    @staticmethod
    def of(detector: FloatDetector, lowered: LoweredDetector) -> DetectorProgram:
        """What lowering gave, and the detector that it was made of."""
        return DetectorProgram(
            detector.name, detector.source, detector.settings, lowered.template, lowered.boxes, lowered.masks
        )

    @property
    def stages(self) -> int:
        return len(self.boxes)

    @cached_property
    def classes(self) -> int:
        """How many there are, the background not counted."""
        head = self.boxes[0]
        return head.verify().buffers[head.header.output.buffer].channels - 1

    @property
    def header(self) -> DetectorHeader:
        return DetectorHeader(
            version=VERSION,
            model=self.model,
            source=self.source,
            settings=self.settings,
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
        _check_fit(self, found)
        return found

    def save(self, path: str | Path) -> None:
        from fqvit.detect.file import save

        save(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> DetectorProgram:
        from fqvit.detect.file import load

        return load(Path(path))


def _check_fit(d: DetectorProgram, verified: dict[str, Verified]) -> None:
    """The parts fit each other and the settings, so that nothing between them reads beyond an array."""
    s, p = d.settings, d.pyramid.header
    _expect("detector", len(d.boxes) == len(d.masks) > 0, f"{len(d.boxes)} box heads and {len(d.masks)} mask heads")
    _expect("settings", max(s.short, s.long) <= MAX_SIDE, f"images of {s.short} x {s.long}, at most {MAX_SIDE} can be")
    _expect("settings", len(s.stds) >= d.stages, f"stds of {len(s.stds)} stages for {d.stages}")
    _expect("pyramid", p.input is None and p.preprocess.channels == 3, "does not take colour images")
    for name, program in d.parts():
        preprocess = program.header.preprocess
        same = preprocess.mean == s.mean and preprocess.std == s.std
        _expect(name, same, "its pixels have another mean or std than those of the settings")
    levels, channels = _check_pyramid(d, verified["pyramid"])
    _expect("settings", levels + 1 == len(s.strides), f"{len(s.strides)} strides for a pyramid of {levels} levels")
    classes = _shape(verified["boxes.0"], d.boxes[0].header.output)[-1] - 1
    _expect("boxes.0", classes >= 1, "no class beside the background")
    for what, given in (("class names", s.classes), ("categories", s.categories)):
        _expect("settings", len(given) in (0, classes), f"{len(given)} {what} for {classes} classes")
    _expect("settings", len(set(s.categories)) == len(s.categories), "a category twice")
    for stage in range(d.stages):
        box, mask = f"boxes.{stage}", f"masks.{stage}"
        side = _check_head(box, d.boxes[stage], channels, ("logits", "deltas"), d.boxes[0])
        logits, deltas = (_shape(verified[box], output) for output in d.boxes[stage].header.outputs)
        _expect(box, logits == (classes + 1,), f"logits of shape {list(logits)} for {classes} classes")
        _expect(box, deltas in ((4,), (4 * classes,)), f"deltas of shape {list(deltas)} for {classes} classes")
        side = _check_head(mask, d.masks[stage], channels, ("scores",), d.masks[0])
        (found,) = (_shape(verified[mask], output) for output in d.masks[stage].header.outputs)
        _expect(mask, found == (2 * side, 2 * side, classes), f"masks of shape {list(found)} for {classes} classes")


def _check_pyramid(d: DetectorProgram, verified: Verified) -> tuple[int, int]:
    """How many levels heads are cut from, and their channels."""
    s, header = d.settings, d.pyramid.header
    shapes: dict[str, list[tuple[int, ...]]] = {"map": [], "scores": [], "deltas": []}
    for output in header.outputs:
        _expect("pyramid", output.kind in shapes, f"an output of kind {output.kind}")
        shapes[output.kind].append(_shape(verified, output))
    maps, scores, deltas = shapes.values()
    counts = [len(part) for part in (maps, scores, deltas)]
    _expect("pyramid", counts == [len(maps), len(maps) + 1, len(maps) + 1] and len(maps) > 0, f"{counts} levels")
    kinds = [output.kind for output in header.outputs]
    _expect("pyramid", kinds == sorted(kinds, key=list(shapes).index), "outputs in another order than maps, scores, deltas")
    anchors, channels = len(s.anchor_ratios), maps[0][-1]
    height, width, _ = header.input_shape
    for level, stride in enumerate(s.strides[: len(scores)]):
        grid = (-(-height // stride), -(-width // stride))
        wanted = [(scores, anchors), (deltas, 4 * anchors), *([(maps, channels)] if level < len(maps) else [])]
        for part, last in wanted:
            said = f"level {level} of shape {list(part[level])}, expected {[*grid, last]} at stride {stride}"
            _expect("pyramid", part[level] == (*grid, last), said)
    again = resized(d.pyramid, height, width)
    same = again.header == header and again.constants.keys() == d.pyramid.constants.keys()
    same = same and all(np.array_equal(again.constants[name], array) for name, array in d.pyramid.constants.items())
    _expect("pyramid", same, "its moves do not lead to the program itself")
    return len(maps), channels


def _check_head(name: str, program: Program, channels: int, kinds: tuple[Kind, ...], first: Program) -> int:
    """The side of the squares that it takes, as all stages do."""
    found = program.header.input
    _expect(name, found is not None, "takes pixels, expected squares of a pyramid")
    assert found is not None
    given = tuple(output.kind for output in program.header.outputs)
    _expect(name, given == kinds, f"gives {', '.join(given)}, expected {', '.join(kinds)}")
    rows, columns, depth = found.shape
    fits = rows == columns and depth == channels and found.shape == first.header.input_shape
    _expect(name, fits, f"takes squares of {list(found.shape)}, which the pyramid and the other stages do not")
    return rows


def _shape(verified: Verified, output: Output) -> tuple[int, ...]:
    value: Value = verified.buffers[output.buffer]
    return value.shape


def _expect(part: str, condition: bool, said: str) -> None:
    if not condition:
        raise FqvitError(f"{part}: {said}. {DAMAGED}")
