"""Configurations of float models: everything needed to build their modules. Imports no torch.

See also: vit.py and swin.py (build modules from them), zoo.py (one per known model).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ViTConfig:
    """Everything needed to build a ViT.

    prefix: number of tokens before the patches (1: class token; 2: class and distillation token; 0: none)
    pool: input of the head. "token": the prefix tokens, concatenated if there are two; "mean": the mean of the patch tokens
    norm_first: LayerNorm before pooling (timm's `norm`)   norm_last: LayerNorm after pooling (timm's `fc_norm`)
    """

    image: tuple[int, int]
    patch: int
    channels: int
    classes: int
    width: int
    depth: int
    heads: int
    hidden: int
    prefix: int = 1
    pool: Literal["token", "mean"] = "token"
    norm_first: bool = True
    norm_last: bool = False
    eps: float = 1e-6

    @property
    def patches(self) -> int:
        return (self.image[0] // self.patch) * (self.image[1] // self.patch)


@dataclass(frozen=True)
class SwinConfig:
    """Everything needed to build a Swin.

    width: channels of the first stage, doubled at each further stage   depths, heads: one number per stage
    fixed_window: if the grid is smaller than a window, pad the grid and shift as usual (detectors), instead of shrinking the
    window and not shifting (classifiers)
    """

    image: tuple[int, int]
    patch: int
    channels: int
    classes: int
    width: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    window: int
    hidden_ratio: int = 4
    eps: float = 1e-5
    fixed_window: bool = False

    def grid(self, stage: int) -> tuple[int, int]:
        """Return the number of token rows and columns in a stage."""
        height, width = (-(-side // self.patch) for side in self.image)
        for _ in range(stage):
            height, width = -(-height // 2), -(-width // 2)
        return height, width


@dataclass(frozen=True)
class DetectorConfig:
    """Everything needed to build a Mask R-CNN (stages = 1) or Cascade Mask R-CNN (stages = 3) on Swin.

    backbone: its `image` is the padded size, its `classes` is unused   classes: their number, without the background
    channels: number of channels of the pyramid   anchors: number of anchors per position
    box_convs, box_fcs: number of shared layers of a box head, before its two output layers
    agnostic: one box regression for all classes   box_side, mask_side: side of the RoI features that box and mask heads read
    """

    backbone: SwinConfig
    classes: int
    channels: int = 256
    anchors: int = 3
    stages: int = 1
    box_convs: int = 0
    box_channels: int = 256
    box_fcs: int = 2
    box_width: int = 1024
    agnostic: bool = False
    mask_convs: int = 4
    mask_channels: int = 256
    box_side: int = 7
    mask_side: int = 14
