"""The reference detector: the definition of detection with integers only, from pixels to boxes, scores, labels and masks.

The networks are integer programs; the other modules of fixed/ are the arithmetic between them. The flow is that of
float/pipeline.py. Slow: the compiled detector (native/detect) gives the same bits. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.cache import SizeCache
from fqvit.detect.fixed.boxes import rescaled, scaled
from fqvit.detect.fixed.compatibility import check_compatibility, check_grids
from fqvit.detect.fixed.constants import MAX_SIDE, DetectorConstants, Ratio, outputs, roi_input
from fqvit.detect.fixed.exp import Integers, sigmoid
from fqvit.detect.fixed.found import IntegerFound
from fqvit.detect.fixed.head_runner import HeadRunner
from fqvit.detect.fixed.proposals import Codes, IntegerDetections, propose, refine, select_detections
from fqvit.detect.fixed.roialign import AlignParams, Bytes, multiscale_roi_align, roi_align
from fqvit.detect.images import Input, Pixels, pad_with
from fqvit.detect.resize import resized
from fqvit.errors import FqvitError
from fqvit.ir.fixed import round_divide
from fqvit.ir.program import Program
from fqvit.runtime.reference import Reference

if TYPE_CHECKING:
    from fqvit.detect.program import DetectorProgram

KEPT_SIZES = 2
# Boxes whose RoI features and head outputs are in memory at once: about 50 kB of features and 250 kB of masks each.
BOXES_AT_ONCE = 256
BYTES_AT_ONCE = 256 << 20  # limit of head outputs: if a head of an untrusted file has large ones, fewer boxes run at once
MOST_BYTES = 8 << 30  # limit of the pyramid's buffers, which take 58 MB at 800 x 1344 and 3.6 GB at 8192 x 8192


class CodeMaps(NamedTuple):
    """The pyramid's outputs for one image.

    levels: u8 [h, w, C] of P2..P5   objectness: i32 [h, w, A], deltas: i32 [h, w, 4 * A], both of P2..P6
    """

    levels: list[Bytes]
    objectness: list[Codes]
    deltas: list[Codes]


class Runner(Protocol):
    def run_all(self, images: NDArray[np.uint8], /) -> tuple[np.ndarray[Any, Any], ...]: ...


@dataclass(frozen=True)
class Head:
    """One head. side: side of its RoI features   align_params: for RoIAlign, one per map   at_once: maximum boxes per call"""

    runner: Runner
    side: int
    align_params: Sequence[AlignParams]
    at_once: int

    def run(self, rois: Bytes) -> tuple[np.ndarray[Any, Any], ...]:
        """Run the head on RoI features u8 [n, side, side, C]; return every output, i32 [n, ...]."""
        return self.runner.run_all(rois)


class ReferenceDetector:
    """A detector ready to run on the reference interpreter. Several threads may share it."""

    def __init__(self, program: DetectorProgram) -> None:
        program.between.check()
        check_compatibility(program.between, program.pyramid, program.boxes, program.masks)
        self.template, self.between, self.classes = program.pyramid, program.between, program.classes
        self.fingerprint = program.fingerprint()
        self.box_heads = [self._head(*each) for each in zip(program.boxes, self.between.box_squares, strict=True)]
        self.mask_heads = [self._head(*each) for each in zip(program.masks, self.between.mask_squares, strict=True)]
        self._pyramids: SizeCache[Runner] = SizeCache(KEPT_SIZES)

    @property
    def kept_sizes(self) -> int:
        return len(self._pyramids)

    def detect(self, image: Input) -> IntegerFound:
        """Return all detections of one image, best first. Its sides must be at most 8192 pixels after resizing."""
        if max(image.size) > MAX_SIDE:
            raise FqvitError(f"image of {image.size[0]} x {image.size[1]}: expected sides of 1 to {MAX_SIDE}. Resize it.")
        maps = self.maps(image.pixels)
        proposals = propose(maps.objectness, maps.deltas, image.size, self.between)
        chosen = self.classify(maps.levels, proposals, image.size)
        probabilities = self.mask_probabilities(maps.levels, chosen)
        boxes = rescaled(chosen.boxes, image.size, (image.height, image.width))
        return IntegerFound(boxes, chosen.scores, chosen.labels, probabilities, image.height, image.width, self.between.mask)

    def maps(self, pixels: Pixels) -> CodeMaps:
        """Run the pyramid on pixels u8 [h, w, 3], resized but not padded."""
        padded = pad_with(pixels, self.between.padding)
        found = [x[0] for x in self._pyramids.get((padded.shape[0], padded.shape[1]), self._make_pyramid).run_all(padded[None])]
        kinds = [output.kind for output in self.template.header.outputs]
        return CodeMaps(
            *([x for x, kind in zip(found, kinds, strict=True) if kind == one] for one in ("map", "scores", "deltas"))
        )

    def classify(self, levels: Sequence[Bytes], boxes: Integers, size: tuple[int, int]) -> IntegerDetections:
        """Run the box heads on proposals i64 [n, 4]; return detections in coordinates of the network's input."""
        if len(boxes) == 0:
            return IntegerDetections(np.zeros((0, 4), np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
        c = self.between
        total = np.zeros((1, 1), np.int64)
        for stage, head in enumerate(self.box_heads):
            parts = [head.run(self.roi_features(levels, some, head)) for some in _slices(boxes, head.at_once)]
            logits, deltas = (np.concatenate(part) for part in zip(*parts, strict=True))
            total = total + scaled(logits, c.classes[stage])
            if stage < c.stages - 1:
                boxes = refine(boxes, logits, deltas, stage, size, c)
        return select_detections(boxes, total, deltas, size, c)

    def mask_probabilities(self, levels: Sequence[Bytes], chosen: IntegerDetections) -> NDArray[np.int32]:
        """Return mask probabilities of each detection's class, the mean over stages: i32 [n, side, side] in units of 2^-15."""
        count, side = len(chosen.boxes), 2 * self.mask_heads[0].side
        total = np.zeros((count, side, side), np.int64)
        for stage, head in enumerate(self.mask_heads if count else ()):
            parts = (_slices(x, head.at_once) for x in (chosen.boxes, chosen.labels, total))
            for some, labels, sum_ in zip(*parts, strict=True):
                (logits,) = head.run(self.roi_features(levels, some, head))
                own = logits[np.arange(len(some)), :, :, labels]
                sum_ += sigmoid(scaled(own, self.between.mask_logits[stage]))
        return np.asarray(round_divide(total, self.between.stages).astype(np.int32))

    def roi_features(self, levels: Sequence[Bytes], boxes: Integers, head: Head) -> Bytes:
        """Return the codes of the RoI features of each box: u8 [n, side, side, C]."""
        return multiscale_roi_align(levels, boxes, head.side, self.between.areas, head.align_params, roi_align)

    def _head(self, program: Program, ratios: Sequence[Ratio]) -> Head:
        params = align_params(self.template, program, ratios, self.between)
        runner = HeadRunner(program, backend="reference")
        each = 4 * sum(math.prod(shape) for shape in runner.shapes)  # bytes: outputs of heads are i32
        return Head(runner, program.input_shape[0], params, min(max(BYTES_AT_ONCE // each, 1), BOXES_AT_ONCE))

    def _make_pyramid(self, height: int, width: int) -> Runner:
        made = resized(self.template, height, width)
        # Levels that have equal grids at the template's size may differ at this one.
        check_grids(made.header, made.verify().buffers, self.between.strides)
        return Reference(made, most_bytes=MOST_BYTES)


def align_params(pyramid: Program, head: Program, ratios: Sequence[Ratio], c: DetectorConstants) -> list[AlignParams]:
    """Return the parameters of RoIAlign for a head, one per map. ratios: between the scales of the maps and of the head"""
    roi, maps = roi_input(head.header), outputs(pyramid.header, "map")
    last = 2**roi.bits - 1
    return [
        AlignParams(stride, map_.zero, ratio, roi.zero, last)
        for stride, map_, ratio in zip(c.strides, maps, ratios, strict=False)  # trailing levels have no map
    ]


def _slices(x: Integers, count: int) -> list[Integers]:
    """Split into views of at most `count` rows."""
    return [x[start : start + count] for start in range(0, len(x), count)]
