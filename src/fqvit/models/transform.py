"""The preprocessing that a checkpoint specifies, and its conversion to a Preprocess. Imports no torch.

Defaults replace settings that the checkpoint does not specify; each is reported in one sentence. See also: architectures.py
(timm's tags), checkpoints/preprocessing.py (config files), live.py (modules in memory).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError

Interpolation = Literal["bicubic", "bilinear"]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Transform:
    """Preprocessing as far as it is known; None for unknown settings.

    image: height and width of the model's input   crop: side of the crop divided by the resized side
    resize: resized short side in pixels, for inputs of size `image`; used if `crop` is None
    squash: resize to the aspect ratio of the input instead of keeping that of the image
    source: where these settings come from, for messages
    """

    image: tuple[int, int] | None = None
    crop: float | None = None
    resize: int | None = None
    squash: bool | None = None
    interpolation: Interpolation | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    source: str = ""


def merged(first: Transform, second: Transform) -> Transform:
    """Return `first`, completed by `second`. Resize, crop and squash belong together: all come from the same Transform."""
    sized = first if (first.crop, first.resize) != (None, None) else second
    return Transform(
        image=first.image or second.image,
        crop=sized.crop,
        resize=sized.resize,
        squash=sized.squash,
        interpolation=first.interpolation or second.interpolation,
        mean=first.mean or second.mean,
        std=first.std or second.std,
        source=first.source or second.source,
    )


def to_preprocess(given: Transform, image: tuple[int, int], channels: int, label: str) -> tuple[Preprocess, tuple[str, ...]]:
    """Return the preprocessing for images of the given size, and one sentence per assumption that was needed."""
    assumed = []
    short = min(image)
    if given.crop is not None:
        resize = math.floor(short / given.crop)
    elif given.resize is not None:
        stated = min(given.image) if given.image is not None else short
        resize = max(given.resize * short // stated, short) if stated != short else given.resize
    else:
        resize = short
        assumed.append("resize: the whole image is used, without cropping its border")
    if given.interpolation is None:
        assumed.append("interpolation: bicubic")
    if given.mean is None or given.std is None:
        assumed.append("mean and std: those of ImageNet")
    mean, std = given.mean or IMAGENET_MEAN, given.std or IMAGENET_STD
    if channels == 1 and len(mean) == 3:  # a greyscale checkpoint with statistics of colour images
        mean, std = (sum(mean) / 3,), (sum(std) / 3,)
    elif channels == 3 and len(mean) == 1:
        mean, std = mean * 3, std * 3
    try:
        preprocess = Preprocess(
            height=image[0],
            width=image[1],
            channels=channels,  # type: ignore[arg-type]
            resize=resize,
            interpolation=given.interpolation or "bicubic",
            mean=mean,
            std=std,
            squash=bool(given.squash),
        )
    except ValueError as error:
        raise FqvitError(f"{label}: {error}. Its config.json or preprocessor_config.json is damaged.") from error
    return preprocess, tuple(assumed)
