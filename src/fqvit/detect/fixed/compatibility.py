"""Check that the programs of a detector match each other and the detector's constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fqvit.detect.batch import batched
from fqvit.detect.fixed.constants import MAX_ROI_SIDE, DetectorConstants, outputs, roi_input
from fqvit.errors import FqvitError
from fqvit.ir.program import Header, Kind, Program
from fqvit.ir.value import DAMAGED, Value

MAX_SCORES = 1 << 25  # per image, proposals x (classes + 1): all are in memory at once
PYRAMID_KINDS: tuple[Kind, ...] = ("map", "scores", "deltas")


def check_compatibility(
    constants: DetectorConstants, pyramid: Program, boxes: Sequence[Program], masks: Sequence[Program]
) -> None:
    """Check the numbers of levels, stages, anchors, channels and classes. Programs and constants must already be verified."""
    channels = _check_pyramid(constants, pyramid)
    for kind, heads in (("box", boxes), ("mask", masks)):
        _need(len(heads) == constants.stages, f"{len(heads)} {kind} heads, expected {constants.stages}, one per stage")
        _need(len({head.input_shape for head in heads}) == 1, f"{kind} heads take RoIs of different sizes")
    classes = {_check_box_head(head, channels) for head in boxes} | {_check_mask_head(head, channels) for head in masks}
    _need(len(classes) == 1, "heads have different numbers of classes")
    scores = constants.proposals * (classes.pop() + 1)
    _need(scores <= MAX_SCORES, f"{scores:,} scores per image, expected at most {MAX_SCORES:,}")


def _check_pyramid(constants: DetectorConstants, pyramid: Program) -> int:
    """Check the pyramid's outputs; return the number of channels of its maps."""
    header, buffers = pyramid.header, pyramid.verify().buffers
    maps, scores, deltas = (outputs(header, kind) for kind in ("map", "scores", "deltas"))
    levels = len(constants.strides)
    found, expected = [len(maps), len(scores), len(deltas)], [constants.maps, levels, levels]
    _need(found == expected, f"the pyramid has {found} maps, scores and deltas, expected {expected}")
    _need(all(output.zero <= 255 for output in maps), "the zero point of a map is above 255")
    anchors = len(constants.anchors[0])
    for output, each in [(one, 1) for one in scores] + [(one, 4) for one in deltas]:
        shape = buffers[output.buffer].shape
        problem = f"{output.buffer} has shape {list(shape)}, expected {each * anchors} channels for {anchors} anchors"
        _need(len(shape) == 3 and shape[2] == each * anchors, problem)
    channels = {buffers[output.buffer].channels for output in maps}
    _need(len(channels) == 1, "maps have different numbers of channels")
    return channels.pop()


def check_grids(header: Header, buffers: Mapping[str, Value], strides: Sequence[int]) -> None:
    """Check that the maps of every level have the pyramid's image size divided by the level's stride, rounded up."""
    height, width, _ = header.input_shape
    for kind in PYRAMID_KINDS:
        for output, stride in zip(outputs(header, kind), strides, strict=False):  # trailing levels have no map
            shape, grid = buffers[output.buffer].shape[:2], (-(-height // stride), -(-width // stride))
            _need(shape == grid, f"pyramid: {output.buffer} is {list(shape)}, expected {list(grid)} at stride {stride}")


def _check_box_head(head: Program, channels: int) -> int:
    """Check a box head; return its number of classes."""
    buffers = _check_roi_head(head, channels, ["logits", "deltas"])
    (logits,), (deltas,) = (buffers[outputs(head.header, kind)[0].buffer].shape for kind in ("logits", "deltas"))
    classes = logits - 1  # the last logit is the background
    expected = "expected C + 1 logits and 4 or 4 * C deltas for C classes"
    _need(classes >= 1 and deltas in (4, 4 * classes), f"{head.header.model}: {logits} logits and {deltas} deltas, {expected}")
    return classes


def _check_mask_head(head: Program, channels: int) -> int:
    """Check a mask head; return its number of classes."""
    buffers = _check_roi_head(head, channels, ["scores"])
    shape = buffers[outputs(head.header, "scores")[0].buffer].shape
    side = 2 * head.input_shape[0]
    _need(shape[:2] == (side, side), f"{head.header.model}: masks of shape {list(shape)}, expected {side} x {side}")
    return shape[2]


def _check_roi_head(head: Program, channels: int, kinds: Sequence[Kind]) -> Mapping[str, Value]:
    rows, columns, depth = roi_input(head.header).shape
    fits = rows == columns <= MAX_ROI_SIDE and depth == channels
    expected = f"expected a square RoI of {channels} channels with at most {MAX_ROI_SIDE} cells per side"
    _need(fits, f"{head.header.model}: takes {[rows, columns, depth]}, {expected}")
    found = [output.kind for output in head.header.outputs]
    _need(found == kinds, f"{head.header.model}: gives {found}, expected {kinds}")
    batched(head, 1)  # raises if the head cannot be batched
    return head.verify().buffers


def _need(condition: bool, problem: str) -> None:
    if not condition:
        raise FqvitError(f"detector: {problem}. {DAMAGED}")
