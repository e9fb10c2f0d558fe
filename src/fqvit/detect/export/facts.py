"""Describe a detector for its exports: image size, networks, and the constants of the arithmetic between them."""

from __future__ import annotations

from typing import Any

import msgspec

from fqvit.detect.fixed.constants import Ratio, outputs, roi_input
from fqvit.detect.images import padded, resized_size
from fqvit.detect.program import DetectorProgram
from fqvit.detect.resize import resized
from fqvit.ir.program import Program

Size = tuple[int, int]


def input_size(program: DetectorProgram, image: Size | None) -> Size:
    """Return the size of the network's input for images of a size (height, width), resized and padded.

    None: landscape images of the largest size that the settings allow
    """
    s = program.settings
    height, width = image or (min(s.short, s.long), s.long)
    rows, columns = resized_size(height, width, s.short, s.long)
    return padded(rows), padded(columns)


def networks(program: DetectorProgram, size: Size) -> dict[str, Program]:
    """Return the networks by the names of their files: pyramid (for one input size), boxes_0, ..., masks_0, ..."""
    found = {name.replace(".", "_"): part for name, part in program.parts()}
    return found | {"pyramid": resized(program.pyramid, *size)}


def facts(program: DetectorProgram, size: Size) -> dict[str, Any]:
    """Return the content of detector.json. size: of the network's input"""
    s, c = program.settings, program.between
    return {
        "model": program.model,
        "fingerprint": program.fingerprint(),
        "size": list(size),
        "resize": program.resize,
        "short": s.short,
        "long": s.long,
        "classes": list(s.classes),
        "categories": list(s.categories),
        "outputs": [output.kind for output in program.pyramid.header.outputs],
        "boxes": [_head(program, *each) for each in zip(program.boxes, c.box_squares, strict=True)],
        "masks": [_head(program, *each) for each in zip(program.masks, c.mask_squares, strict=True)],
        "constants": msgspec.to_builtins(c),
    }


def _head(program: DetectorProgram, head: Program, ratios: tuple[Ratio, ...]) -> dict[str, Any]:
    """Describe the input of a head: its side, zero point and largest code, and how codes of each map become its codes."""
    roi = roi_input(head.header)
    zeros = [output.zero for output in outputs(program.pyramid.header, "map")]
    ratio_pairs = [[ratio.mult, ratio.shift] for ratio in ratios]
    return {"side": roi.shape[0], "zero": roi.zero, "last": 2**roi.bits - 1, "map_zeros": zeros, "ratios": ratio_pairs}
