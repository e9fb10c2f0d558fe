"""Lower a detector to integer programs: one per head and stage, plus one per image size for the pyramid.

Programs of the pyramid at two sizes have the same weights, multipliers and tables; they differ in row indices, regions and
shapes. The pyramid is lowered once, for a small size; programs for other sizes are derived from that one (resize.py).
See also: lowering/lower.py.
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

TEMPLATE = (64, 64)  # height and width that the pyramid is lowered for
KEPT_SIZES = 16  # programs share their weights; at a photograph's size each has about 5 MB of row indices


class LoweredDetector:
    """The integer programs of a detector.

    template: the pyramid's program for images of size TEMPLATE   boxes, masks: programs of the heads, one per stage
    """

    def __init__(self, detector: FloatDetector, calibration: DetectorCalibration) -> None:
        self.template = lower(pyramid_model(detector, *TEMPLATE), calibration.pyramid)
        self.boxes = tuple(lower(box_model(detector, i), found) for i, found in enumerate(calibration.boxes))
        self.masks = tuple(lower(mask_model(detector, i), found) for i, found in enumerate(calibration.masks))
        self._pyramids: SizeCache[Program] = SizeCache(KEPT_SIZES)

    def pyramid(self, height: int, width: int) -> Program:
        """Return the pyramid's program for images padded (images.pad_pixels) to this size; sides are multiples of 32."""
        return self._pyramids.get((height, width), partial(resized, self.template))
