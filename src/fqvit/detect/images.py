"""An image -> pixels of the network's input: upright, resized with its shape kept, then padded to the network's grid.

Resizing is plain bilinear interpolation between pixel centres without smoothing, as released detectors were trained with
(OpenCV's), up to its rounding; it is integer arithmetic, for float and integer detectors alike. Neighbour:
fqvit.data.preprocess, which is for classifiers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fqvit.data.preprocess import to_eight_bit, upright
from fqvit.detect.boxes import Floats
from fqvit.detect.settings import DetectSettings
from fqvit.errors import FqvitError
from fqvit.ir.fixed import round_divide, round_shift

Pixels = NDArray[np.uint8]
STRIDE = 32  # sides of network inputs are multiples of it
WEIGHT_FRACTION = 11  # bits of weights in resizing
ONE = 1 << WEIGHT_FRACTION


@dataclass(frozen=True)
class Input:
    """pixels: u8 [height, width, 3], resized, not padded   height, width: of the image itself, before resizing"""

    pixels: Pixels
    height: int
    width: int

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.shape[0], self.pixels.shape[1]

    @property
    def padded(self) -> tuple[int, int]:
        """Height and width of what the network sees."""
        return padded(self.pixels.shape[0]), padded(self.pixels.shape[1])

    def back(self, boxes: Floats) -> Floats:
        """Boxes of the network's input in pixels of the image."""
        height, width = self.size
        scaled: Floats = boxes * np.tile([self.width / width, self.height / height], 2)
        return scaled


def padded(side: int) -> int:
    return -(-side // STRIDE) * STRIDE


def resized_size(height: int, width: int, short: int, long: int) -> tuple[int, int]:
    """The largest size of the same shape with the short side at most `short` and the long one at most `long`, rounded.

    Sides of images like 1 x 4000 do not fall below one pixel.
    """
    low, high = min(height, width), max(height, width)
    new, old = (long, high) if long * low < short * high else (short, low)
    return max(round_divide(height * new, old), 1), max(round_divide(width * new, old), 1)


def resize(pixels: Pixels, height: int, width: int) -> Pixels:
    """Bilinear, u8 [h, w, C] -> [height, width, C]; pixel i of n shows (i + 0.5) old / n - 0.5, within the image.

    Weights have 11 bits an axis and the sum is rounded once: 255 2^22 and its half fit int32.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    y, y_next, y_share = _axis(pixels.shape[0], height)
    x, x_next, x_share = _axis(pixels.shape[1], width)
    x_share = x_share[:, None]
    out = np.empty((height, width, pixels.shape[2]), np.uint8)
    # In bands of rows: a 4000 x 6000 image needs no wide copy of itself.
    for start in range(0, height, 64):
        band = slice(start, start + 64)
        share = y_share[band, None, None]
        rows = pixels[y[band]] * (ONE - share) + pixels[y_next[band]] * share
        sums = rows[:, x] * (ONE - x_share) + rows[:, x_next] * x_share
        out[band] = round_shift(sums, 2 * WEIGHT_FRACTION)
    return out


def _axis(old: int, new: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """The pixels before and after each place, and the share of the latter in 2^-11."""
    place = np.clip((2 * np.arange(new, dtype=np.int64) + 1) * old - new, 0, (old - 1) * 2 * new)  # in 1 / (2 new)
    first = place // (2 * new)
    share = round_divide((place - first * 2 * new) << WEIGHT_FRACTION, 2 * new)
    return first, np.minimum(first + 1, old - 1), share.astype(np.int32)


def prepare(image: Image.Image, s: DetectSettings) -> Input:
    """The image as the network takes it; the image given is not changed."""
    if 0 in image.size:
        raise FqvitError(f"the image is {image.width} x {image.height}: it has no pixels. Remove it.")
    pixels = np.asarray(to_eight_bit(upright(image), "RGB"), dtype=np.uint8)
    height, width = pixels.shape[:2]
    return Input(resize(pixels, *resized_size(height, width, s.short, s.long)), height, width)


def padding(s: DetectSettings) -> tuple[int, int, int]:
    """The colour nearest to what normalises to 0: 255 mean, off by half a pixel value at most."""
    red, green, blue = (min(max(math.floor(255 * mean + 0.5), 0), 255) for mean in s.mean)
    return red, green, blue


def pad_pixels(pixels: Pixels, s: DetectSettings) -> Pixels:
    """As pad_with, in the colour of `padding`. Integer programs normalise inside their first op, so they are padded before."""
    return pad_with(pixels, padding(s))


def pad_with(pixels: Pixels, colour: tuple[int, int, int]) -> Pixels:
    """To the right and below: u8 [h, w, 3] -> [padded h, padded w, 3]."""
    height, width = pixels.shape[:2]
    out = np.empty((padded(height), padded(width), 3), np.uint8)
    out[:] = colour
    out[:height, :width] = pixels
    return out


def normalise_and_pad(pixels: Pixels, s: DetectSettings) -> NDArray[np.float32]:
    """(pixel / 255 - mean) / std, then zeros to the right and below: u8 [h, w, 3] -> [3, padded h, padded w]."""
    height, width = pixels.shape[:2]
    out = np.zeros((3, padded(height), padded(width)), np.float32)
    mean, std = np.asarray(s.mean, np.float32), np.asarray(s.std, np.float32)
    out[:, :height, :width] = ((pixels.astype(np.float32) / 255 - mean) / std).transpose(2, 0, 1)
    return out
