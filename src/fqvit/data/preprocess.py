"""Preprocess one image for a model: apply EXIF orientation, convert to 8 bits, resize and center-crop.

Equal to timm's evaluation transform on PIL images, except that the EXIF orientation is applied. With `squash`, it equals timm's
crop mode of that name and the image processors of transformers that resize to a fixed height and width. The result is uint8:
the float model normalizes it with `mean` and `std`; the integer program has both folded into its first linear op. Images with
an unknown value range (32-bit and float samples) are rejected. A saved program contains its model's Preprocess.
See also: images.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from fqvit.errors import FqvitError

# Limits the memory that an untrusted file can ask for. Real models are far below this limit.
Pixels = Annotated[int, msgspec.Meta(ge=1, le=8192)]

FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}

UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# Images of up to this many pixels after resizing are resized in full, then cropped. For larger ones only the crop is computed:
# a 1 x 100000 image would need 20 GB otherwise.
FULL_RESIZE_LIMIT = 1 << 24


class Preprocess(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Resize the short side to `resize` (antialiased), then center-crop to height x width.

    mean, std: one value per channel, for pixels scaled to 0..1 (pixel / 255).
    squash: resize to the aspect ratio of height x width instead of keeping that of the image. The short side of the result is
    `resize`; if that is the smaller of height and width, nothing is cropped.
    """

    height: Pixels
    width: Pixels
    channels: Literal[1, 3]
    resize: Pixels
    interpolation: Literal["bicubic", "bilinear"]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    squash: bool = False  # left out of files if False, so that programs without it keep their fingerprints

    def __post_init__(self) -> None:
        # Raise ValueError: when msgspec reads a file, it adds the path of the wrong field to this error.
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise ValueError(f"mean and std need {self.channels} values, got {len(self.mean)} and {len(self.std)}")
        if not all(np.isfinite(self.mean)) or not all(0 < s < float("inf") for s in self.std):
            raise ValueError("mean must be finite and std positive")

    def apply(self, image: Image.Image) -> NDArray[np.uint8]:
        """Return the model's input: u8 [height, width, channels]. The image itself is not modified."""
        if 0 in image.size:
            raise FqvitError(f"image: {image.width} x {image.height}, which has no pixels. Remove it.")
        eight_bit = to_eight_bit(upright(image), "L" if self.channels == 1 else "RGB")
        pixels = np.asarray(self._resize_and_crop(eight_bit), dtype=np.uint8)
        return np.ascontiguousarray(pixels.reshape(self.height, self.width, self.channels))

    @property
    def steps(self) -> str:
        """Describe the resize and the crop, for example "short side 248 bicubic, center crop"."""
        if not self.squash:
            return f"short side {self.resize} {self.interpolation}, center crop"
        width, height = resized_size(self.width, self.height, self.resize)
        crop = "" if (height, width) == (self.height, self.width) else ", center crop"
        return f"squashed to {height} x {width} {self.interpolation}{crop}"

    def _resize_and_crop(self, image: Image.Image) -> Image.Image:
        shape = (self.width, self.height) if self.squash else image.size
        width, height = resized_size(*shape, self.resize)
        left, top = crop_start(width, self.width), crop_start(height, self.height)
        resample = FILTERS[self.interpolation]
        if width * height <= FULL_RESIZE_LIMIT:
            if image.size != (width, height):
                image = resized(image, (width, height), resample, (0, 0, *image.size))
            # If the crop is larger than the image, PIL pads with 0, as torchvision does.
            return image.crop((left, top, left + self.width, top + self.height))
        x0, y0 = max(left, 0), max(top, 0)
        x1, y1 = min(left + self.width, width), min(top + self.height, height)
        x_scale, y_scale = image.width / width, image.height / height
        box = (x0 * x_scale, y0 * y_scale, min(x1 * x_scale, image.width), min(y1 * y_scale, image.height))
        part = resized(image, (x1 - x0, y1 - y0), resample, box)
        out = Image.new(image.mode, (self.width, self.height))
        out.paste(part, (x0 - left, y0 - top))
        return out


def resized(
    image: Image.Image, size: tuple[int, int], resample: Image.Resampling, box: tuple[float, float, float, float]
) -> Image.Image:
    """Resize the part `box` of an image to `size` (width, height), one axis at a time.

    Each pass rounds to 8 bits, so the order matters, and it differs between versions of Pillow. This is the order of Pillow 13:
    vertical first if resizing removes more than twice as many rows as columns.
    """
    left, top, right, bottom = box
    removed_columns, removed_rows = image.width - size[0], image.height - size[1]
    if removed_rows > max(0, 2 * removed_columns):
        low = image.resize((image.width, size[1]), resample, (0, top, image.width, bottom))
        return low.resize(size, resample, (left, 0, right, size[1]))
    narrow = image.resize((size[0], image.height), resample, (left, 0, right, image.height))
    return narrow.resize(size, resample, (0, top, size[0], bottom))


def resized_size(width: int, height: int, short: int) -> tuple[int, int]:
    """Return (width, height) after the short side is resized to `short`. The long side is rounded down, as in torchvision."""
    if width <= height:
        return short, int(short * height / width)
    return int(short * width / height), short


def crop_start(size: int, crop: int) -> int:
    """Return the first coordinate of a center crop.

    Negative if the crop is larger than the image: the smaller half of the padding then comes first, as in torchvision.
    """
    if crop > size:
        return -((crop - size) // 2)
    return round((size - crop) / 2)  # half to even, as in torchvision


def upright(image: Image.Image) -> Image.Image:
    """Rotate and flip an image according to its EXIF orientation."""
    image.load()  # first: Pillow applies the orientation of a TIFF while loading and then drops the tag
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF raises almost any exception, but the pixels may be fine
        return image
    turn = UPRIGHT.get(orientation)
    return image if turn is None else image.transpose(turn)


def to_eight_bit(image: Image.Image, mode: Literal["L", "RGB"]) -> Image.Image:
    """Convert any PIL mode to 8-bit gray or RGB. Alpha is dropped, as in timm."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image)
        # Older Pillow versions open 16-bit PNGs as mode "I". Real 32-bit data has an unknown white level; do not guess one.
        if image.mode == "I" and (values.min() < 0 or values.max() > 0xFFFF):
            raise FqvitError(
                f"32-bit image with values {values.min()}..{values.max()}, expected 8 or 16 bits. Convert it to 8 bits."
            )
        # Keep the high byte, as Pillow does for 16-bit RGB, so that gray and color versions of an image give the same pixels.
        image = Image.fromarray((values >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise FqvitError("float image: unknown white level, expected 8 or 16 bits. Convert it to 8 bits.")
    elif image.mode in ("P", "PA") and "transparency" in image.info:
        image = image.convert("RGBA")  # a direct conversion to RGB gives the same pixels, but Pillow warns
    return image if image.mode == mode else image.convert(mode)
