"""Normalise uint8 pixels for a float model.

Integer programs do not need this: lowering folds it into the first linear op.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError


def normalise(images: NDArray[np.uint8], preprocess: Preprocess) -> Tensor:
    """(pixel / 255 - mean) / std: uint8 [N, H, W, C] -> float32 [N, C, H, W]."""
    p = preprocess
    if images.dtype != np.uint8 or images.shape[1:] != (p.height, p.width, p.channels):
        raise FqvitError(
            f"images: {images.dtype} {list(images.shape)}, expected uint8 [N, {p.height}, {p.width}, {p.channels}]."
            " Use preprocess.apply on each image."
        )
    x = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).float()
    mean, std = torch.tensor(p.mean)[:, None, None], torch.tensor(p.std)[:, None, None]
    return (x / 255 - mean) / std
