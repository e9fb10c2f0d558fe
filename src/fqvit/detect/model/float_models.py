"""Wrap each network of a detector as a FloatModel, the input of simulation and lowering.

The pyramid depends on the image size, the heads do not.
See also: detector.py (the modules), models/load.py (FloatModel).
"""

from __future__ import annotations

from torch import nn

from fqvit.data.preprocess import Preprocess
from fqvit.detect.model.detector import FloatDetector, at_size
from fqvit.models.load import FloatModel

MAX_SIDE = 8192  # the limit of Preprocess


def pyramid_model(detector: FloatDetector, height: int, width: int) -> FloatModel:
    """Wrap the pyramid for images padded to height x width, both multiples of 32."""
    module = at_size(detector.module.pyramid, detector.module.config, height, width)
    return FloatModel(f"{detector.name} pyramid", module, _preprocess(detector, height, width), None, detector.source)


def box_model(detector: FloatDetector, stage: int) -> FloatModel:
    """Wrap the box head of a stage."""
    return _head(detector, f"box head {stage}", detector.module.box_heads[stage], detector.module.config.box_side)


def mask_model(detector: FloatDetector, stage: int) -> FloatModel:
    """Wrap the mask head of a stage."""
    return _head(detector, f"mask head {stage}", detector.module.mask_heads[stage], detector.module.config.mask_side)


def _head(detector: FloatDetector, name: str, module: nn.Module, side: int) -> FloatModel:
    config = detector.module.config
    preprocess = _preprocess(detector, *config.backbone.image)
    roi_shape = (side, side, config.channels)
    return FloatModel(f"{detector.name} {name}", module, preprocess, None, detector.source, roi_shape)


def _preprocess(detector: FloatDetector, height: int, width: int) -> Preprocess:
    s = detector.settings
    return Preprocess(height, width, 3, min(s.short, MAX_SIDE), "bilinear", s.mean, s.std)
