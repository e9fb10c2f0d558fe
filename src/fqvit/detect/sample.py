"""Sample the inputs of a detector's networks during calibration, for methods that run the networks again.

The pyramid gets crops of resized images, all of the same size: attention windows and convolutions see the same content as in
whole images. The heads get RoI features that the float detector extracts from whole images.
See also: calibrate.py (fills the sample), refine.py and search.py (use it), quant/batches.py (random samples).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.images import Pixels, padded, padding
from fqvit.detect.settings import DetectSettings
from fqvit.quant.batches import ImageSample

CROP = 256  # largest side of a crop, in pixels
CROPS_PER_IMAGE = 4
BOX_FEATURES = 1024  # RoI features per box head: about 50 kB each
MASK_FEATURES = 256  # RoI features per mask head: about 200 kB each
SEED = 0


class DetectorSample:
    """Random samples of the inputs of all networks. size: number of crops   side: of a crop, in pixels"""

    def __init__(self, settings: DetectSettings, size: int) -> None:
        self.side = min(CROP, padded(settings.short))
        self.colour = padding(settings)
        self._samples = {"pyramid": ImageSample(size)}
        self._random = np.random.default_rng(SEED)

    def add_image(self, pixels: Pixels) -> None:
        """Add crops of an image u8 [h, w, 3], resized but not padded. A smaller image is padded at the right and bottom."""
        height, width = pixels.shape[:2]
        for _ in range(CROPS_PER_IMAGE):
            top, left = (int(self._random.integers(max(length - self.side, 0) + 1)) for length in (height, width))
            crop = np.empty((self.side, self.side, 3), np.uint8)
            crop[:] = self.colour
            part = pixels[top : top + self.side, left : left + self.side]
            crop[: part.shape[0], : part.shape[1]] = part
            self._samples["pyramid"].add(crop[None])

    def add_features(self, part: str, features: NDArray[np.float32]) -> None:
        """Add RoI features [n, side, side, C] of a head, such as boxes.0."""
        size = BOX_FEATURES if part.startswith("boxes") else MASK_FEATURES
        self._samples.setdefault(part, ImageSample(size)).add(features)

    def inputs(self) -> dict[str, NDArray[Any]]:
        """Return the inputs of every network: crops u8 [n, side, side, 3], or RoI features float32 [n, side, side, C]."""
        return {part: sample.images() for part, sample in self._samples.items()}
