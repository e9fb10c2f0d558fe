"""Run the float networks of a detector with torch, one image at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fqvit.detect.cache import SizeCache
from fqvit.detect.float.pipeline import FloatFound, Maps, detect
from fqvit.detect.float.roialign import Floats32
from fqvit.detect.images import FLOAT_RULE, Pixels, normalise_and_pad, prepare
from fqvit.detect.model.detector import FloatDetector, at_size
from fqvit.detect.model.pyramid import Pyramid, split_outputs

# Pyramids share their weights, but each has its own indices and masks: about 10 MB for a typical photograph.
KEPT_SIZES = 16
# Boxes per run of a head: activations in the mask head of the released detectors take about 2.5 MB per box.
BOXES_AT_ONCE = 256


class FloatNetworks:
    """Implement the protocol Networks of float/pipeline.py with torch. Pyramids are cached, one per image size."""

    def __init__(self, detector: FloatDetector) -> None:
        self.module, self.settings = detector.module, detector.settings
        config = self.module.config
        self.stages, self.box_side, self.mask_side = config.stages, config.box_side, config.mask_side
        self._pyramids: SizeCache[Pyramid] = SizeCache(KEPT_SIZES)

    def pyramid(self, size: tuple[int, int]) -> Pyramid:
        """Return the pyramid for images of this padded size."""
        return self._pyramids.get(size, partial(at_size, self.module.pyramid, self.module.config))

    @torch.inference_mode()
    def maps(self, pixels: Pixels) -> Maps:
        images = torch.from_numpy(normalise_and_pad(pixels, self.settings))[None]
        outputs = split_outputs(self.pyramid((images.shape[2], images.shape[3]))(images))
        return Maps(*([x[0].contiguous().numpy() for x in part] for part in outputs))

    @torch.inference_mode()
    def boxes(self, stage: int, rois: Floats32) -> tuple[Floats32, Floats32]:
        pairs = [self.module.box_heads[stage](part) for part in _parts(rois)]
        classes, deltas = (torch.cat(part).numpy() for part in zip(*pairs, strict=True))
        return classes, deltas

    @torch.inference_mode()
    def masks(self, stage: int, rois: Floats32, labels: NDArray[np.int64]) -> Floats32:
        out = [self.module.mask_heads[stage](part) for part in _parts(rois)]
        chosen: Tensor = torch.cat(out)[torch.arange(len(labels)), :, :, torch.from_numpy(labels)]
        return chosen.numpy()


def _parts(rois: Floats32) -> tuple[Tensor, ...]:
    return torch.split(torch.from_numpy(rois), BOXES_AT_ONCE)


def detect_float(detector: FloatDetector, images: Iterable[Image.Image]) -> Iterator[FloatFound]:
    """Yield the float detector's detections of each image. See also: results.coco_results."""
    networks = FloatNetworks(detector)
    for image in images:
        yield detect(networks, prepare(image, detector.settings, FLOAT_RULE), detector.settings)
