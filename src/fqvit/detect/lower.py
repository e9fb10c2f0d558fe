"""Lowering a detector: one program a head and stage, and one of the pyramid for each image size.

Programs of the pyramid at two sizes have the same weights, multipliers and tables; they differ in which rows are read, in
regions, and in shapes. It is lowered once, for a small size; the others follow from that (resize.py). Neighbour: lower.py.
"""

from __future__ import annotations

from functools import partial

from fqvit.detect.cache import SizeCache
from fqvit.detect.calibrate import DetectorCalibration
from fqvit.detect.model.detector import FloatDetector
from fqvit.detect.model.float_models import box_model, mask_model, pyramid_model
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
        self._pyramids: SizeCache[Program] = SizeCache(KEPT_SIZES)

    def pyramid(self, height: int, width: int) -> Program:
        """For images padded to that size (detect.images.pad_pixels), multiples of 32."""
        return self._pyramids.get((height, width), partial(resized, self.template))
