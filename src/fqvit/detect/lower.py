"""Lowering a detector: one program a head and stage, and one of the pyramid for each image size.

Programs of the pyramid at two sizes have the same weights, multipliers and tables; they differ in which rows are read, in
regions, and in shapes. It is lowered once, for a small size; the others follow from that (resize.py). Neighbour: lower.py.
"""

from __future__ import annotations

from collections import OrderedDict

from fqvit.detect.calibrate import DetectorCalibration
from fqvit.detect.model.detector import FloatDetector
from fqvit.detect.model.parts import box_model, mask_model, pyramid_model
from fqvit.detect.resize import resized
from fqvit.ir.program import Program
from fqvit.lowering.lower import lower

TEMPLATE = (64, 64)  # the size that pyramids are lowered for
KEPT_SIZES = 16  # beside the weights, which all share, a program at a photograph's size has some 5 MB of row numbers


class LoweredDetector:
    """template: the pyramid's program for images of one size   boxes, masks: programs of the heads, one a stage"""

    def __init__(self, detector: FloatDetector, calibration: DetectorCalibration) -> None:
        self.template = lower(pyramid_model(detector, *TEMPLATE), calibration.pyramid)
        self.boxes = tuple(lower(box_model(detector, i), found) for i, found in enumerate(calibration.boxes))
        self.masks = tuple(lower(mask_model(detector, i), found) for i, found in enumerate(calibration.masks))
        self._pyramids: OrderedDict[tuple[int, int], Program] = OrderedDict()

    def pyramid(self, height: int, width: int) -> Program:
        """For images padded to that size (detect.images.pad_pixels), multiples of 32."""
        size = (height, width)
        if size not in self._pyramids:
            made = resized(self.template, height, width)
            while len(self._pyramids) >= KEPT_SIZES:
                self._pyramids.popitem(last=False)
            self._pyramids[size] = made
        self._pyramids.move_to_end(size)
        return self._pyramids[size]
