"""The numbers that decide a float model's shapes. No torch here, so that the zoo can be listed without it.

Neighbours: vit.py and swin.py build modules from these, zoo.py holds one of them a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ViTConfig:
    """Everything that decides the shapes of a ViT.

    prefix: number of tokens before the patches (1: class token; 2: class and distillation token; 0: none)
    pool: "token" takes the prefix tokens to the head (two of them side by side: DeiT distilled), "mean" the mean of the patches
    norm_first: LayerNorm before pooling (timm's `norm`);  norm_last: LayerNorm after it (timm's `fc_norm`)
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
    """Everything that decides the shapes of a Swin. depths and heads: one number a stage; width doubles at each stage.

    fixed_window: classifiers shrink windows to small grids and do not shift them there; detectors pad the grid and shift.
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
        """Rows and columns of tokens in a stage."""
        height, width = (-(-side // self.patch) for side in self.image)
        for _ in range(stage):
            height, width = -(-height // 2), -(-width // 2)
        return height, width


@dataclass(frozen=True)
class DetectorConfig:
    """Everything that decides the shapes of a Mask R-CNN (stages = 1) or a Cascade Mask R-CNN (stages = 3) on Swin.

    backbone: its `image` is the padded size, its `classes` are of no use   classes: without the background
    channels: of the pyramid   anchors: a place   box_convs, box_fcs: shared layers of a box head, before its two outputs
    agnostic: one box regression for all classes   box_side, mask_side: of what RoIAlign cuts out for the two heads
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
