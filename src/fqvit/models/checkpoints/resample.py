"""Resample the learned position embeddings of a checkpoint for another image size: bicubic, as timm and transformers do.

Relative position biases (BEiT) are not resampled; rotary embeddings (DINOv3) and position MLPs (SwinV2) are
computed for any size.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fqvit.errors import FqvitError
from fqvit.models.architectures import FamilyConfig
from fqvit.models.checkpoints.hints import Hints
from fqvit.models.checkpoints.keymaps import Canonical
from fqvit.models.config import BeitConfig, VisionConfig


def for_image(
    config: FamilyConfig, state: dict[str, Tensor], image: tuple[int, int], antialias: bool, label: str
) -> FamilyConfig:
    """Return the config for images of another size, and replace the positions in `state` if their grid changes."""
    if image == config.image:
        return config
    if min(image) < config.patch:
        raise FqvitError(f"{label}: images of {image[0]} x {image[1]} pixels, expected at least one patch of {config.patch}.")
    if isinstance(config, BeitConfig):
        raise FqvitError(
            f"{label}: images of {image[0]} x {image[1]} pixels, but the relative positions of BEiT are for "
            f"{config.image[0]} x {config.image[1]}. Do not pass `size`."
        )
    changed = replace(config, image=image)
    if isinstance(config, VisionConfig) and isinstance(changed, VisionConfig) and config.grid != changed.grid:
        prefix = config.prefix if config.prefix_positions else 0
        state["pos_embed"] = resampled(state["pos_embed"], prefix, config.grid, changed.grid, antialias)
    return changed


def for_leaves(found: Canonical, image: tuple[int, int], hints: Hints, label: str) -> tuple[Canonical, Hints]:
    """Adapt a ViT or Swin that is built from leaf modules to another image size. A Swin has nothing to resample."""
    hints = replace(hints, image=image)
    positions, weight = found.tensors.get("pos_embed"), found.tensors.get("patch_embed.proj.weight")
    if positions is None or weight is None or positions.ndim != 3 or weight.ndim != 4:
        return found, hints
    patch = weight.shape[2]
    if min(image) < patch:
        raise FqvitError(f"{label}: images of {image[0]} x {image[1]} pixels, expected at least one patch of {patch}.")
    prefix = ("cls_token" in found.tensors) + ("dist_token" in found.tensors)
    new = image[0] // patch, image[1] // patch
    for before in (prefix, 0):
        side = math.isqrt(max(positions.shape[1] - before, 0))
        if side > 0 and side * side == positions.shape[1] - before:
            changed = (
                positions if new == (side, side) else resampled(positions.float(), before, (side, side), new, hints.antialias)
            )
            return replace(found, tensors={**found.tensors, "pos_embed": changed}), hints
    return found, hints


def resampled(positions: Tensor, prefix: int, old: tuple[int, int], new: tuple[int, int], antialias: bool) -> Tensor:
    """Resample positions from one grid to another: [1, prefix + T, C] -> [1, prefix + T', C]. Prefix rows do not change."""
    width = positions.shape[-1]
    grid = positions[:, prefix:].reshape(1, *old, width).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=new, mode="bicubic", antialias=antialias)
    return torch.cat([positions[:, :prefix], grid.permute(0, 2, 3, 1).reshape(1, -1, width)], 1)
