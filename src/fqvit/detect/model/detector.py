"""Mask R-CNN and Cascade Mask R-CNN on Swin: the modules of a detector, and the same weights at other image sizes.

The modules compute maps and numbers; what they mean as boxes is in fqvit.detect, which needs no torch but in float.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from fqvit.detect.model.pyramid import Pyramid
from fqvit.detect.model.roi_heads import BoxHead, MaskHead
from fqvit.detect.settings import DetectSettings
from fqvit.errors import FqvitError
from fqvit.models.config import DetectorConfig

STRIDE = 32  # of the last stage: sides of images are padded to multiples of it


class Detector(nn.Module):
    """pyramid: once an image   box_heads, mask_heads: one a stage, once a box. It has no forward: boxes lie between them."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.config = config
        self.pyramid = Pyramid(config)
        self.box_heads = nn.ModuleList(BoxHead(config) for _ in range(config.stages))
        self.mask_heads = nn.ModuleList(MaskHead(config) for _ in range(config.stages))


@dataclass(frozen=True)
class FloatDetector:
    """module: in eval mode   source: checkpoint's name and sha256"""

    name: str
    module: Detector
    settings: DetectSettings
    source: str


def build_detector(config: DetectorConfig) -> Detector:
    """With random weights; torch's own random numbers are left as they were."""
    with torch.random.fork_rng(devices=[]):
        return Detector(config)


def at_size(pyramid: Pyramid, config: DetectorConfig, height: int, width: int) -> Pyramid:
    """A pyramid for images of another size with the very same parameter tensors: training one trains the other."""
    if height % STRIDE or width % STRIDE or min(height, width) < STRIDE:
        raise FqvitError(f"images of {height} x {width}: sides must be multiples of {STRIDE}. Pad them.")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        other = Pyramid(replace(config, backbone=replace(config.backbone, image=(height, width))))
    for name, parameter in pyramid.named_parameters():
        owner, _, last = name.rpartition(".")
        setattr(other.get_submodule(owner), last, parameter)
    return other.train(pyramid.training)
