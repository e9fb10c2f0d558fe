"""Configurations of float models: everything needed to build their modules. Imports no torch.

See also: vit.py, swin.py and families/ (build modules from them), zoo.py (one config per known model).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The function between the two layers of an MLP: exact GELU, GELU with tanh, or OpenAI's x * sigmoid(1.702 * x).
Activation = Literal["gelu", "gelu_tanh", "quick_gelu"]
# How tokens become features: class token, mean of the patches, both concatenated, SigLIP's attention pooling, or all tokens.
Pool = Literal["token", "avg", "token_avg", "map", "none"]


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
class VisionConfig:
    """Everything needed to build the generic VisionTransformer (families/vision_transformer.py).

    outputs: number of logits or projected features; 0: no head, the pooled features are the output
    registers: number of learned tokens between the class token and the patches
    prefix_positions: the class token and the registers have position embeddings, too (the opposite of timm's `no_embed_class`)
    norm_pre: LayerNorm before the blocks   norm, fc_norm: LayerNorm before and after pooling
    hidden: width of the MLP; with `swiglu`, of each of its two halves
    """

    image: tuple[int, int]
    patch: int
    channels: int
    outputs: int
    width: int
    depth: int
    heads: int
    hidden: int
    class_token: bool = True
    registers: int = 0
    prefix_positions: bool = True
    patch_bias: bool = True
    norm_pre: bool = False
    qkv_bias: bool = True
    layer_scale: bool = False
    swiglu: bool = False
    activation: Activation = "gelu"
    norm: bool = True
    fc_norm: bool = False
    pool: Pool = "token"
    head_bias: bool = True
    eps: float = 1e-6

    @property
    def prefix(self) -> int:
        """Return the number of tokens before the patches."""
        return int(self.class_token) + self.registers

    @property
    def grid(self) -> tuple[int, int]:
        return self.image[0] // self.patch, self.image[1] // self.patch

    @property
    def position_count(self) -> int:
        return self.grid[0] * self.grid[1] + (self.prefix if self.prefix_positions else 0)


@dataclass(frozen=True)
class DinoV3Config:
    """Everything needed to build a DINOv3 ViT (families/dinov3.py): rotary position embeddings, registers, no bias of k.

    hidden: width of the MLP; with `swiglu`, of each of its two halves   theta: base of the rotary frequencies
    """

    image: tuple[int, int]
    patch: int
    channels: int
    outputs: int
    width: int
    depth: int
    heads: int
    hidden: int
    registers: int = 4
    qv_bias: bool = True
    swiglu: bool = False
    pool: Literal["token", "avg", "none"] = "token"
    theta: float = 100.0
    eps: float = 1e-5

    @property
    def prefix(self) -> int:
        return 1 + self.registers

    @property
    def grid(self) -> tuple[int, int]:
        return self.image[0] // self.patch, self.image[1] // self.patch


@dataclass(frozen=True)
class BeitConfig:
    """Everything needed to build a BEiT (families/beit.py).

    positions: learned position embeddings are added to the tokens
    block_bias, shared_bias: one table of relative position biases per block, or one for all blocks
    norm, fc_norm: LayerNorm before and after pooling
    """

    image: tuple[int, int]
    patch: int
    channels: int
    outputs: int
    width: int
    depth: int
    heads: int
    hidden: int
    qv_bias: bool = True
    positions: bool = False
    block_bias: bool = True
    shared_bias: bool = False
    layer_scale: bool = True
    norm: bool = False
    fc_norm: bool = True
    pool: Literal["token", "avg", "none"] = "avg"
    eps: float = 1e-6

    @property
    def grid(self) -> tuple[int, int]:
        return self.image[0] // self.patch, self.image[1] // self.patch


@dataclass(frozen=True)
class SwinV2Config:
    """Everything needed to build a SwinV2 (families/swinv2.py): cosine attention and residual post-norm.

    width: channels of the first stage, doubled at each further stage   depths, heads: one number per stage
    windows: side of the window per stage, shrunk to the grid where the grid is smaller
    pretrained_windows: side of the window that the position MLP was trained with, per stage; 0: `windows`
    """

    image: tuple[int, int]
    patch: int
    channels: int
    outputs: int
    width: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    windows: tuple[int, ...]
    pretrained_windows: tuple[int, ...]
    hidden_ratio: float = 4.0
    qv_bias: bool = True
    eps: float = 1e-5

    def grid(self, stage: int) -> tuple[int, int]:
        """Return the number of token rows and columns in a stage."""
        height, width = self.image[0] // self.patch, self.image[1] // self.patch
        for _ in range(stage):
            height, width = -(-height // 2), -(-width // 2)
        return height, width


@dataclass(frozen=True)
class DetectorConfig:
    """Everything needed to build a Mask R-CNN (stages = 1) or Cascade Mask R-CNN (stages = 3) on Swin.

    backbone: its `image` is the padded size, its `classes` is unused   classes: number of classes, without the background
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
