"""Check the images that a runtime gets: arrays of the program's input size."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from fqvit.errors import FqvitError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def checked_images(images: object, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return images as a contiguous array u8 [N, *shape]. Raises FqvitError for anything else, such as paths and pictures."""
    expected = f"expected uint8 [N, {', '.join(map(str, shape))}]"
    first = images[0] if isinstance(images, list | tuple) and images else images
    if isinstance(first, str | os.PathLike) or hasattr(first, "getexif"):  # a path or a PIL image
        kind = type(first).__name__
        raise FqvitError(f"images: {kind}, {expected}. fqvit.load(FILE) takes paths and pictures of any size.")
    try:
        array = np.asarray(images)
    except (ValueError, TypeError) as error:  # arrays of different shapes, a tensor on another device
        raise FqvitError(f"images: {type(images).__name__} that is not an array ({error}), {expected}.") from None
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[1:] != shape:
        raise FqvitError(f"images: {array.dtype} {list(array.shape)}, {expected}.")
    return np.ascontiguousarray(array)
