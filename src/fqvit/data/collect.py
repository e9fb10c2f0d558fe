"""Open the images that a Python program has: a folder, paths, PIL images, arrays, tensors, a DataLoader or a Dataset.

Images go through the preprocessing of the model, except arrays and tensors that already have the input size of the model.
Neither torch nor datasets is imported. See also: places.py (folders, tar and Parquet files).
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeGuard

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fqvit.data.images import ImageArray, Source, decode, read_image
from fqvit.data.places import open_unlabelled
from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError

EXPECTED = "a folder, a list of paths, PIL images or uint8 arrays [N, H, W, C], a DataLoader or a Dataset"
COLUMNS = ("image", "img", "images", "pixel_values", "jpg", "jpeg", "png", "webp")  # keys of images in mappings
TOLERANCE = 0.02  # in units of 1/255: float values this close to a multiple of 1/255 were made from 8-bit pixels
MARGIN = 0.02  # interpolation may overshoot the range 0..1


def open_any(images: object, preprocess: Preprocess, limit: int) -> Source:
    """Return a source of at most `limit` of the images. Raises FqvitError if `images` has an unsupported type.

    The images are evenly spaced if they can be read at any position. From an iterable, such as a DataLoader, the first `limit`
    images are taken.
    """
    if isinstance(images, Source):
        return images.limit(limit)
    if isinstance(images, str | os.PathLike):
        return open_unlabelled(Path(images), preprocess).limit(limit)
    if isinstance(images, Image.Image) or (_is_array(images) and images.ndim < 4):
        images = [images]
    if isinstance(images, Mapping):
        splits = ", ".join(map(str, images)) or "nothing"
        raise FqvitError(f"images: {type(images).__name__} of {splits}, expected {EXPECTED}. Pass one of its values.")
    if hasattr(images, "__getitem__") and hasattr(images, "__len__") and not isinstance(images, bytes | type):
        if len(images) == 0:
            raise FqvitError("images: no images. Pass at least one.")
        return Items(images, range(len(images)), preprocess).limit(limit)
    if isinstance(images, bytes | type | set | frozenset) or not isinstance(images, Iterable):
        raise FqvitError(f"images: {type(images).__name__}, expected {EXPECTED}.")
    pixels = list(islice(_each(images, preprocess), limit))
    if not pixels:
        raise FqvitError(f"images: {type(images).__name__} without images. Pass at least one.")
    return ImageArray(np.stack(pixels), None, preprocess)


def holds_arrays(images: object) -> bool:
    """Return whether images are an array, a sequence of arrays, or an iterable that is not known to hold anything else."""
    if isinstance(images, np.ndarray):
        return True
    if isinstance(images, Sequence) and not isinstance(images, str):
        return len(images) == 0 or isinstance(images[0], np.ndarray)
    readable = hasattr(images, "__getitem__") and hasattr(images, "__len__")  # a Dataset
    return isinstance(images, Iterable) and not readable and not hasattr(images, "dataset")  # DataLoader.dataset


class Items(Source):
    """The images of a sequence or a Dataset, which are read when they are needed.

    items: supports len() and indexing. Only one thread at a time reads it, because a Dataset may not be safe for threads.
    """

    def __init__(self, items: Any, positions: Sequence[int], preprocess: Preprocess) -> None:
        super().__init__(None, preprocess)
        self.items, self.positions = items, positions
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.positions)

    def take(self, indices: Sequence[int]) -> Self:
        return type(self)(self.items, [self.positions[index] for index in indices], self.preprocess)

    def name(self, index: int) -> str:
        return _name(self.positions[index])

    def read(self, index: int) -> NDArray[np.uint8]:
        position = self.positions[index]
        with self.lock:
            item = self.items[position]
        return pixels_of(_first(item, position), self.preprocess, position)

    def marks(self) -> Iterator[bytes]:
        for index in range(len(self)):
            yield self.read(index).tobytes()


def pixels_of(image: object, preprocess: Preprocess, number: int) -> NDArray[np.uint8]:
    """Return one image as the model's input, u8 [height, width, channels]. number: for error messages"""
    if isinstance(image, str | os.PathLike):
        return read_image(Path(image), preprocess)
    if isinstance(image, bytes):
        return decode(io.BytesIO(image), _name(number), preprocess)
    if isinstance(image, Image.Image):
        return preprocess.apply(image)
    if not _is_array(image):
        kind = type(image).__name__
        raise FqvitError(f"{_name(number)}: {kind}, expected a path, a PIL image or a uint8 array [H, W, C].")
    pixels = _eight_bit(_channels_last(image, number), preprocess, number)
    if pixels.shape == (preprocess.height, preprocess.width, preprocess.channels):
        return np.ascontiguousarray(pixels)
    return preprocess.apply(Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)))


def _name(number: int) -> str:
    return f"image {number}"


def _is_array(value: object) -> TypeGuard[Any]:
    """Return whether a value is a numpy array or, without importing torch, a tensor."""
    return isinstance(value, np.ndarray) or (hasattr(value, "detach") and hasattr(value, "ndim"))


def _is_image(value: object) -> bool:
    return isinstance(value, str | os.PathLike | bytes | Image.Image) or (_is_array(value) and value.ndim >= 2)


def _each(items: Iterable[object], preprocess: Preprocess) -> Iterator[NDArray[np.uint8]]:
    """Yield the images of an iterable of images, of samples or of batches."""
    count = 0
    for item in items:
        for image in _images_in(item, count):
            yield pixels_of(image, preprocess, count)
            count += 1


def _images_in(item: object, number: int) -> Iterable[object]:
    """Return the images of one element of an iterable: an image, a sample such as (image, label), or a batch of either."""
    if isinstance(item, list) and len(item) > 1 and all(_is_image(each) and not _is_batch(each) for each in item):
        return item
    image = _first(item, number)
    return image if _is_batch(image) or isinstance(image, list) else [image]  # type: ignore[return-value]


def _is_batch(value: object) -> bool:
    return _is_array(value) and value.ndim == 4


def _first(item: object, number: int) -> object:
    """Return the image of a sample: the value of the image column of a mapping, or the first element of a tuple or list."""
    if isinstance(item, Mapping):
        found = next((name for name in COLUMNS if item.get(name) is not None), None)
        if found is None:  # an image that is not decoded yet is itself a mapping
            found = next((name for name, value in item.items() if isinstance(value, Image.Image | Mapping)), None)
        if found is None and item.get("bytes") is None and item.get("path") is None:
            columns = ", ".join(map(str, item))
            said = f"{_name(number)}: a row with {columns}, none of which holds an image"
            raise FqvitError(f"{said}. Name the column of images `image`.")
        if found is None:
            return item.get("bytes") or item.get("path")
        return _first(item[found], number) if isinstance(item[found], Mapping) else item[found]
    if isinstance(item, tuple | list) and item:
        return _first(item[0], number)
    return item


def _channels_last(image: Any, number: int) -> NDArray[Any]:
    """Return an image as [H, W, C]. Tensors are [C, H, W] and arrays [H, W, C], unless their shape only allows the other."""
    tensor = not isinstance(image, np.ndarray)
    values = image.detach().cpu() if tensor else image
    if tensor and str(values.dtype) in ("torch.bfloat16", "torch.float16"):
        values = values.float()
    array: NDArray[Any] = np.asarray(values)
    if array.ndim == 2:
        return array[:, :, None]
    if array.ndim == 3:
        order = (True, False) if tensor else (False, True)
        for channels_first in order:
            if array.shape[0 if channels_first else 2] in (1, 3):
                return np.moveaxis(array, 0, 2) if channels_first else array
    said = f"{array.dtype} {list(array.shape)}"
    raise FqvitError(
        f"{_name(number)}: {said}, expected one image of 1 or 3 channels: an array [H, W, C] or a tensor [C, H, W]."
    )


def _eight_bit(values: NDArray[Any], preprocess: Preprocess, number: int) -> NDArray[np.uint8]:
    """Return pixels as u8. Floats in 0..1, and floats normalised with the model's mean and std, are converted back."""
    if values.dtype == np.uint8:
        return values
    if not np.issubdtype(values.dtype, np.floating):
        raise FqvitError(f"{_name(number)}: {values.dtype}, expected uint8. Values are 0 to 255.")
    values = values.astype(np.float64)
    low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    scaled = values
    if values.shape[2] == preprocess.channels:
        scaled = values * preprocess.std + preprocess.mean
    elif not (0 <= low and high <= 1):
        scaled = np.full_like(values, np.nan)  # normalised for a model with a different number of channels
    steps = 255 * scaled
    inside = bool((scaled >= -MARGIN).all() and (scaled <= 1 + MARGIN).all())
    whole = inside and bool((np.abs(steps - np.rint(steps)) < TOLERANCE).all())
    if not whole and 0 <= low and high <= 1:
        steps = 255 * values
    elif not inside:
        problem = f"{_name(number)}: float values {low:.3g} to {high:.3g}"
        raise FqvitError(f"{problem}, expected 0 to 1, or normalised with the model's mean and std. Pass uint8 images.")
    pixels: NDArray[np.uint8] = np.rint(steps).clip(0, 255).astype(np.uint8)
    return pixels
