"""Mask R-CNN and Cascade Mask R-CNN on Swin as torch modules, and pyramids for other image sizes with the same weights.

The modules compute feature maps, logits and deltas; float/ and fixed/ turn these into boxes and masks.
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

STRIDE = 32  # stride of the backbone's last stage; sides of images are padded to multiples of it


class Detector(nn.Module):
    """The networks of a detector. pyramid: runs once per image   box_heads, mask_heads: one per stage, run once per box

    There is no forward method, because the code that turns outputs into boxes is not a torch module.
    """

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.config = config
        self.pyramid = Pyramid(config)
        self.box_heads = nn.ModuleList(BoxHead(config) for _ in range(config.stages))
        self.mask_heads = nn.ModuleList(MaskHead(config) for _ in range(config.stages))


@dataclass(frozen=True)
class FloatDetector:
    """A loaded detector. module: in eval mode   source: name and sha256 of the checkpoint"""

    name: str
    module: Detector
    settings: DetectSettings
    source: str


def build_detector(config: DetectorConfig) -> Detector:
    """Return a detector with random weights; the state of torch's random generator is preserved."""
    with torch.random.fork_rng(devices=[]):
        return Detector(config)


def at_size(pyramid: Pyramid, config: DetectorConfig, height: int, width: int) -> Pyramid:
    """Return a pyramid for images of another size that shares the parameter tensors: training one trains the other."""
    if height % STRIDE or width % STRIDE or min(height, width) < STRIDE:
        raise FqvitError(f"image of {height} x {width}: expected sides that are multiples of {STRIDE}. Pad the image.")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        other = Pyramid(replace(config, backbone=replace(config.backbone, image=(height, width))))
    for name, parameter in pyramid.named_parameters():
        owner, _, last = name.rpartition(".")
        setattr(other.get_submodule(owner), last, parameter)
    return other.train(pyramid.training)
