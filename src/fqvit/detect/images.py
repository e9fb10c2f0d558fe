"""Prepare an image for a detector: turn it upright, resize it without changing its aspect ratio, pad it to multiples of 32.

Resizing is bilinear interpolation between pixel centres without antialiasing, by one of two rules: `opencv` is bit-identical
to OpenCV, with which released detectors were trained, and `rounded` rounds once. Float detectors and new integer detectors use
`opencv`; for a file without the field `resize`, the rule is `rounded`.
See also: opencv.py (the rule `opencv`), data/preprocess.py (the same for classifiers).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fqvit.data.preprocess import to_eight_bit, upright
from fqvit.detect import opencv
from fqvit.detect.boxes import Floats
from fqvit.detect.settings import DetectSettings
from fqvit.errors import FqvitError
from fqvit.ir.fixed import round_divide, round_shift

Pixels = NDArray[np.uint8]
ResizeRule = Literal["rounded", "opencv"]
FLOAT_RULE: ResizeRule = "opencv"  # for float detectors, which are trained with this rule, and integer detectors made from them
STRIDE = 32  # sides of network inputs are multiples of this
WEIGHT_FRACTION = 11  # interpolation weights are in units of 2^-11
ONE = 1 << WEIGHT_FRACTION


@dataclass(frozen=True)
class Input:
    """An image ready for a detector.

    pixels: u8 [h, w, 3], resized but not padded   height, width: size of the original image
    """

    pixels: Pixels
    height: int
    width: int

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the pixels, without padding."""
        return self.pixels.shape[0], self.pixels.shape[1]

    @property
    def padded(self) -> tuple[int, int]:
        """Height and width of the network's input."""
        return padded(self.pixels.shape[0]), padded(self.pixels.shape[1])

    def to_original(self, boxes: Floats) -> Floats:
        """Map boxes [n, 4] from the network's input to pixels of the original image."""
        height, width = self.size
        scaled: Floats = boxes * np.tile([self.width / width, self.height / height], 2)
        return scaled


def padded(side: int) -> int:
    """Round a side up to a multiple of STRIDE."""
    return -(-side // STRIDE) * STRIDE


def resized_size(height: int, width: int, short: int, long: int) -> tuple[int, int]:
    """Return the largest size of the same aspect ratio with a short side of at most `short` and a long side of at most `long`.

    Sides are rounded to at least one pixel, which matters for an image of 1 x 4000.
    """
    low, high = min(height, width), max(height, width)
    new, old = (long, high) if long * low < short * high else (short, low)
    return max(round_divide(height * new, old), 1), max(round_divide(width * new, old), 1)


def resize(pixels: Pixels, height: int, width: int) -> Pixels:
    """Resize by bilinear interpolation with one rounding (rule `rounded`), u8 [h, w, C] -> [height, width, C].

    On an axis that is resized from `old` to n pixels, new pixel i is at (i + 0.5) * old / n - 0.5, clamped to the image.
    Weights have 11 bits per axis and the sum is rounded once: 255 * 2^22 + 2^21 fits in int32.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    y, y_next, y_share = _axis(pixels.shape[0], height)
    x, x_next, x_share = _axis(pixels.shape[1], width)
    x_share = x_share[:, None]
    out = np.empty((height, width, pixels.shape[2]), np.uint8)
    # In bands of 64 rows, so that a 4000 x 6000 image needs no int32 copy of all its pixels.
    for start in range(0, height, 64):
        band = slice(start, start + 64)
        share = y_share[band, None, None]
        rows = pixels[y[band]] * (ONE - share) + pixels[y_next[band]] * share
        sums = rows[:, x] * (ONE - x_share) + rows[:, x_next] * x_share
        out[band] = round_shift(sums, 2 * WEIGHT_FRACTION)
    return out


def _axis(old: int, new: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Return for each new pixel the old pixels before and after it, and the weight of the latter in units of 2^-11."""
    # `position` is in units of 1 / (2 * new) of an old pixel.
    position = np.clip((2 * np.arange(new, dtype=np.int64) + 1) * old - new, 0, (old - 1) * 2 * new)
    first = position // (2 * new)
    share = round_divide((position - first * 2 * new) << WEIGHT_FRACTION, 2 * new)
    return first, np.minimum(first + 1, old - 1), share.astype(np.int32)


RESIZERS: dict[ResizeRule, Callable[[Pixels, int, int], Pixels]] = {"rounded": resize, "opencv": opencv.resize}


def upright_pixels(image: Image.Image) -> Pixels:
    """Return the pixels u8 [h, w, 3] of an image, turned upright."""
    if 0 in image.size:
        raise FqvitError(f"image of {image.width} x {image.height}: it has no pixels. Remove it.")
    return np.asarray(to_eight_bit(upright(image), "RGB"), dtype=np.uint8)


def prepare(image: Image.Image, s: DetectSettings, rule: ResizeRule = "rounded") -> Input:
    """Prepare an image for a detector with these settings; the given image is not modified.

    rule: how the detector resizes images. DetectorProgram.prepare passes the rule in its file.
    """
    pixels = upright_pixels(image)
    height, width = pixels.shape[:2]
    return Input(RESIZERS[rule](pixels, *resized_size(height, width, s.short, s.long)), height, width)


def padding(s: DetectSettings) -> tuple[int, int, int]:
    """Return the colour that normalises to nearly 0: round(255 * mean), off by at most half a pixel value."""
    red, green, blue = (min(max(math.floor(255 * mean + 0.5), 0), 255) for mean in s.mean)
    return red, green, blue


def pad_pixels(pixels: Pixels, s: DetectSettings) -> Pixels:
    """Pad with the colour of `padding`. Integer programs normalise in their first linear op, so padding precedes it."""
    return pad_with(pixels, padding(s))


def pad_with(pixels: Pixels, colour: tuple[int, int, int]) -> Pixels:
    """Pad at the right and the bottom: u8 [h, w, 3] -> [padded h, padded w, 3]."""
    height, width = pixels.shape[:2]
    out = np.empty((padded(height), padded(width), 3), np.uint8)
    out[:] = colour
    out[:height, :width] = pixels
    return out


def normalise_and_pad(pixels: Pixels, s: DetectSettings) -> NDArray[np.float32]:
    """(pixel / 255 - mean) / std, then zeros at the right and the bottom: u8 [h, w, 3] -> f32 [3, padded h, padded w]."""
    height, width = pixels.shape[:2]
    out = np.zeros((3, padded(height), padded(width)), np.float32)
    mean, std = np.asarray(s.mean, np.float32), np.asarray(s.std, np.float32)
    out[:, :height, :width] = ((pixels.astype(np.float32) / 255 - mean) / std).transpose(2, 0, 1)
    return out
