"""The integer constants of a detector: ratios of scales, anchors and thresholds, computed when it is quantized.

`DetectorConstants` is stored in the detector's file, in the field `between`; nothing at run time reads a scale. check() proves
from these constants that the arithmetic between the networks does not overflow, whatever the file contains.
See also: docs/explanation/detection-arithmetic.md for the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated

import msgspec

from fqvit.detect.boxes import LARGEST_LOG_RATIO
from fqvit.detect.images import padding
from fqvit.detect.settings import Detected, DetectSettings, Proposals
from fqvit.errors import FqvitError
from fqvit.ir.fixed import MAX_SHIFT, MULT_BITS, multiplier
from fqvit.ir.program import CodeInput, Header, Kind, Output
from fqvit.ir.value import DAMAGED, Proof

BOX_FRACTION = 8  # boxes are in 1/256 pixel
MAX_SIDE = 8192  # largest side of the network's input, in pixels
OFFSET_FRACTION = 24  # offsets of box centres, relative to the box's size
LOG_FRACTION = 27  # base-2 logarithms: logits and ratios of sizes
SCORE_FRACTION = 24
IOU_FRACTION = 16
MASK_FRACTION = 15  # mask probabilities; they have 30 fraction bits after interpolation
ALIGN_FRACTION = 22  # sums of RoIAlign, relative to the scale of the map
MAX_STRIDE = 1024
MAX_ROI_SIDE = 64  # cells per side of RoI features
OBJECTNESS_UNITS = 256  # objectness is compared in 1/256 of the smallest scale of any level
OUTPUT_LIMIT = 1 << 31  # outputs of networks are int32


class Ratio(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """mult / 2^shift, applied by ir.fixed.requantize."""

    mult: Annotated[int, msgspec.Meta(ge=0, lt=1 << MULT_BITS)]
    shift: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHIFT)]

    def reach(self) -> int:
        """Return the largest magnitude of a requantized int32."""
        return (OUTPUT_LIMIT * self.mult >> self.shift) + 1


# Half a side of an anchor: at most 8192 pixels, so that sides are at most 2^22, in units of 1/256 pixel.
Half = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIDE << BOX_FRACTION)]
DeltaRatios = tuple[Ratio, Ratio, Ratio, Ratio]
Count = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
Share = Annotated[int, msgspec.Meta(ge=0, le=1 << IOU_FRACTION)]
Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]
Few = msgspec.Meta(min_length=1, max_length=16)


class DetectorConstants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Integer constants of the arithmetic between the networks. Lengths are in units of 1/256 pixel, areas in squares of
    this unit. "In 2^-n" means in units of 2^-n.

    padding: colour of the padding at the right and at the bottom of images
    strides: one per level with proposals; trailing levels have no map for RoIAlign
    anchors: [level][ratio], half the width and half the height   areas: smallest box area for maps 1, 2, ...
    log_limit: log2 of the largest ratio of sizes, in 2^-27
    score: detections have scores above this, in 2^-24   proposal_iou, iou: thresholds of non-maximum suppression, in 2^-16
    mask: smallest interpolated probability of a mask pixel, in 2^-30

    These fields are ratios that convert integers from one unit to another:
    objectness: [level], to a unit that all levels share
    deltas: [level], box_deltas: [stage]: x and y to 2^-24 of the box's size, width and height to base-2 logarithms in 2^-27
    classes: [stage], mask_logits: [stage], to base-2 logarithms in 2^-27; class ratios include 1 / stages, for the mean
    box_squares, mask_squares: [stage][map], from sums of RoIAlign to the codes of the head's input
    """

    padding: tuple[Byte, Byte, Byte]
    strides: Annotated[tuple[Count, ...], Few]
    anchors: Annotated[tuple[Annotated[tuple[tuple[Half, Half], ...], msgspec.Meta(min_length=1, max_length=64)], ...], Few]
    areas: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)], ...], msgspec.Meta(max_length=15)]
    objectness: Annotated[tuple[Ratio, ...], Few]
    deltas: Annotated[tuple[DeltaRatios, ...], Few]
    box_deltas: Annotated[tuple[DeltaRatios, ...], Few]
    log_limit: Annotated[int, msgspec.Meta(ge=0, le=8 << LOG_FRACTION)]
    classes: Annotated[tuple[Ratio, ...], Few]
    mask_logits: Annotated[tuple[Ratio, ...], Few]
    box_squares: Annotated[tuple[Annotated[tuple[Ratio, ...], Few], ...], Few]
    mask_squares: Annotated[tuple[Annotated[tuple[Ratio, ...], Few], ...], Few]
    proposals_a_level: Proposals
    proposals: Proposals
    proposal_iou: Share
    score: Annotated[int, msgspec.Meta(ge=0, le=1 << SCORE_FRACTION)]
    iou: Share
    detections: Detected
    mask: Annotated[int, msgspec.Meta(ge=0, le=1 << 2 * MASK_FRACTION)]

    @property
    def stages(self) -> int:
        """Number of box heads."""
        return len(self.classes)

    @property
    def maps(self) -> int:
        """Number of levels with a map for RoIAlign."""
        return len(self.areas) + 1

    def check(self) -> tuple[Proof, ...]:
        """Check ranges and lengths; returns the proofs that no int64 or int32 overflows. Raises FqvitError."""
        try:
            msgspec.convert(msgspec.to_builtins(self), DetectorConstants)
        except msgspec.ValidationError as error:
            raise FqvitError(f"between: {error}. {DAMAGED}") from None
        levels = {"anchors": self.anchors, "objectness": self.objectness, "deltas": self.deltas}
        stages = {"box_deltas": self.box_deltas, "mask_logits": self.mask_logits}
        roi_ratios = {"box_squares": self.box_squares, "mask_squares": self.mask_squares}
        rows = {f"{name}[{i}]": row for name, part in roi_ratios.items() for i, row in enumerate(part)}
        for lists, length in ((levels, len(self.strides)), (stages | roi_ratios, self.stages), (rows, self.maps)):
            for name, found in lists.items():
                _need(len(found) == length, f"{name} has {len(found)} entries, expected {length}")
        _need(self.maps <= len(self.strides), f"{self.maps} maps, but {len(self.strides)} strides")
        _need(len({len(some) for some in self.anchors}) == 1, "levels have different numbers of anchors")
        for stride in self.strides:
            _need(
                stride.bit_count() == 1 and stride <= MAX_STRIDE,
                f"a stride of {stride}, expected a power of two up to {MAX_STRIDE}",
            )
        _need(list(self.areas) == sorted(self.areas), "areas are not in ascending order")
        proofs = self._proofs()
        for proof in proofs:
            _need(proof.holds, f"{proof.what} can reach {proof.bound}, which does not fit {proof.bits} bits")
        return proofs

    def _proofs(self) -> tuple[Proof, ...]:
        """Return bounds of the intermediate values. All but the first hold whenever the fields are within their ranges."""
        side = MAX_SIDE << BOX_FRACTION  # largest side of an image; edges are clipped to it
        anchor = 2 * max(half for level in self.anchors for pair in level for half in pair)
        size = max(side, anchor)
        # In decode, 2^log <= 2^(log_limit * 2^-27), with a mantissa below 2^31; |offset * side| <= 2^61 is shifted right by 16.
        grown = size << (self.log_limit >> LOG_FRACTION) + 1 << BOX_FRACTION
        cells = MAX_SIDE // min(self.strides) + 2  # largest number of cells in a bin of RoIAlign
        weights = (1 << 15) + cells  # each weight is rounded by at most half a unit
        strip = (255 * weights >> 8) + 1
        return (
            Proof("classes", "a difference of sums of class logits", 2 * sum(ratio.reach() for ratio in self.classes), 62),
            Proof("decode", "a size times its mantissa", size << 31, 62),
            Proof("decode", "a moved edge", (1 << 62 - 16) + grown + (size << BOX_FRACTION), 62),
            Proof("suppress", "a union times its threshold", 2 * side * side << IOU_FRACTION, 62),
            Proof("roialign", "the first pass", 255 * weights, 31),
            Proof("roialign", "the second pass", strip * weights, 31),
            Proof("roialign", "a weight's numerator", _weight_numerator(max(self.strides), min(self.strides)), 62),
        )


def _weight_numerator(largest: int, smallest: int) -> int:
    """Return a bound of the numerator 2^15 * U * D * samples * w of a cell's weight w. largest, smallest: strides

    U is the length of a cell and D = 2 * samples * bins; see axis_weights in fixed/roialign.py.
    """
    length, cell = MAX_SIDE << BOX_FRACTION, largest << BOX_FRACTION
    samples = length // (smallest << BOX_FRACTION) + 1
    # U * D = 2 * U * samples * bins <= 2 * (length + U * bins)
    return 2 * (length + cell * MAX_ROI_SIDE) * samples << 15


def _need(condition: bool, problem: str) -> None:
    if not condition:
        raise FqvitError(f"between: {problem}. {DAMAGED}")


def make_constants(
    settings: DetectSettings, pyramid: Header, boxes: Sequence[Header], masks: Sequence[Header]
) -> DetectorConstants:
    """Compute the constants from settings and program headers. pyramid: for any image size   boxes, masks: one per stage"""
    s = settings
    maps, scores, deltas = (outputs(pyramid, kind) for kind in ("map", "scores", "deltas"))
    check_settings(s, len(scores), len(boxes))
    smallest = min(output.scale for output in scores)
    made = DetectorConstants(
        padding=padding(s),
        strides=s.strides,
        anchors=tuple(anchor_halves(stride, s) for stride in s.strides),
        areas=tuple(least_area(s.finest, level) for level in range(1, len(maps))),
        objectness=tuple(_ratio(output.buffer, output.scale / smallest * OBJECTNESS_UNITS) for output in scores),
        deltas=tuple(_delta_ratios(output, (1.0, 1.0, 1.0, 1.0)) for output in deltas),
        box_deltas=tuple(_delta_ratios(outputs(head, "deltas")[0], stds) for head, stds in zip(boxes, s.stds, strict=False)),
        log_limit=round(LARGEST_LOG_RATIO / math.log(2) * 2**LOG_FRACTION),
        classes=tuple(_log2_ratio(outputs(head, "logits")[0], len(boxes)) for head in boxes),
        mask_logits=tuple(_log2_ratio(outputs(head, "scores")[0], 1) for head in masks),
        box_squares=tuple(_roi_ratios(head, maps) for head in boxes),
        mask_squares=tuple(_roi_ratios(head, maps) for head in masks),
        proposals_a_level=s.proposals_a_level,
        proposals=s.proposals,
        proposal_iou=round(s.proposal_iou * 2**IOU_FRACTION),
        score=math.floor(Fraction(s.score) * 2**SCORE_FRACTION),
        iou=round(s.iou * 2**IOU_FRACTION),
        detections=s.detections,
        mask=math.ceil(Fraction(s.mask) * 2 ** (2 * MASK_FRACTION)),
    )
    made.check()
    return made


def roi_input(head: Header) -> CodeInput:
    """Return the input of a head: codes of RoI features."""
    if head.input is None:
        raise FqvitError(f"{head.model}: takes pixels, expected a head of a detector, which takes RoI features.")
    return head.input


def outputs(header: Header, kind: Kind) -> list[Output]:
    """Return the outputs of this kind, in order; raises FqvitError if there is none or one has per-channel scales."""
    found = [output for output in header.outputs if output.kind == kind]
    if not found:
        raise FqvitError(f"{header.model}: has no output of kind {kind}, expected a detector's pyramid or head.")
    for output in found:
        if output.alpha is not None:
            raise FqvitError(f"{header.model}: {output.buffer} has one scale per channel, expected one per tensor.")
    return found


def check_settings(s: DetectSettings, levels: int, stages: int) -> None:
    """Reject settings that integer detectors do not support; quantization calls this before calibration takes time."""
    if len(s.strides) != levels:
        raise FqvitError(f"settings: {len(s.strides)} strides for a pyramid of {levels} levels. Give one per level.")
    if len(s.stds) < stages:
        raise FqvitError(f"settings: stds of {len(s.stds)} stages for {stages} box heads. Give one set per stage.")
    for stride in s.strides:
        if stride.bit_count() != 1 or stride > MAX_STRIDE:
            raise FqvitError(f"settings: a stride of {stride}. Integer detectors support powers of two up to {MAX_STRIDE}.")
        largest = max(max(pair) for pair in anchor_halves(stride, s))
        if largest > MAX_SIDE << BOX_FRACTION:
            problem = f"anchors of {2 * largest >> BOX_FRACTION} pixels at stride {stride}"
            raise FqvitError(f"settings: {problem}. Integer detectors support at most {2 * MAX_SIDE}; lower anchor_scale.")
    if max(s.short, s.long) > MAX_SIDE:
        raise FqvitError(f"settings: images of {s.short} x {s.long}. Integer detectors support sides up to {MAX_SIDE}.")


def anchor_halves(stride: int, s: DetectSettings) -> tuple[tuple[int, int], ...]:
    """Return half the width and half the height of each anchor of float/anchors.py, in 1/256 pixel."""
    side = stride * s.anchor_scale / 2 * 2**BOX_FRACTION
    return tuple((max(round(side / math.sqrt(r)), 1), max(round(side * math.sqrt(r)), 1)) for r in s.anchor_ratios)


def least_area(finest: float, level: int) -> int:
    """Return the smallest area of a box on this level, by the rule of float/roialign.py: side >= finest * (2^level - 1e-6)."""
    side = Fraction(finest) * (2**level - Fraction(1, 10**6)) * 2**BOX_FRACTION
    least: int = math.ceil(side * side)
    return least


def _ratio(what: str, ratio: float) -> Ratio:
    try:
        return Ratio(*multiplier(ratio))
    except ValueError:
        raise FqvitError(f"{what}: a ratio of scales is {ratio:.3g}, expected 0 to 2^30. Calibrate again.") from None


def _log2_ratio(output: Output, parts: int) -> Ratio:
    return _ratio(output.buffer, output.scale / math.log(2) / parts * 2**LOG_FRACTION)


def _delta_ratios(output: Output, stds: tuple[float, ...]) -> DeltaRatios:
    x, y, width, height = (output.scale * std for std in stds)
    offset, log = 2.0**OFFSET_FRACTION, 2.0**LOG_FRACTION / math.log(2)
    name = output.buffer
    return _ratio(name, x * offset), _ratio(name, y * offset), _ratio(name, width * log), _ratio(name, height * log)


def _roi_ratios(head: Header, maps: Sequence[Output]) -> tuple[Ratio, ...]:
    return tuple(_ratio(head.model, one.scale / roi_input(head).scale / 2**ALIGN_FRACTION) for one in maps)
