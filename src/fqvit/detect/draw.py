"""Draw detections on an image: translucent masks, boxes, class names and scores.

Uses Pillow and its built-in font only. Works for images of any size.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fqvit.detect.masks import from_runs
from fqvit.detect.results import NamedResult
from fqvit.errors import FqvitError

Colour = tuple[int, int, int]
Font = ImageFont.ImageFont | ImageFont.FreeTypeFont

MIN_SIDE = 480  # pixels; an image whose longer side is shorter is enlarged by an integer factor so that labels fit
MASK_OPACITY = 0.45
GOLDEN = 0.618033988749895  # golden ratio - 1: its multiples, modulo 1, are well separated hues for any number of categories


def colour_of(category: int) -> Colour:
    """Return the colour of a category, the same in every image."""
    red, green, blue = colorsys.hsv_to_rgb((category * GOLDEN) % 1, (0.9, 0.65, 0.8)[category % 3], 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def draw(image: Image.Image, results: Sequence[NamedResult], name: str) -> Image.Image:
    """Return a copy of the image, enlarged if it is small, with the results drawn on it, the best on top.

    name: of the image, for error messages
    """
    factor = max(1, -(-MIN_SIDE // max(image.size)))
    width, height = image.width * factor, image.height * factor
    canvas = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    ascending = sorted(results, key=lambda result: result["score"])
    for result in ascending:
        if result["segmentation"]["size"] != [image.height, image.width]:
            size = " x ".join(map(str, result["segmentation"]["size"]))
            problem = f"{name}: {image.height} x {image.width} pixels, but the mask of a result is {size}"
            raise FqvitError(f"{problem}. Pass the image that the results were computed from.")
        _tint(canvas, result, factor)
    pen = ImageDraw.Draw(canvas)
    letters = _letter_height(width, height)
    font, line = _font(letters), max(2, letters // 7)
    for result in ascending:
        pen.rectangle(_edges(result, factor, width, height), outline=colour_of(result["category_id"]), width=line)
    for result in ascending:
        _label(pen, font, letters, result, factor, (width, height))
    return canvas


def _tint(canvas: Image.Image, result: NamedResult, factor: int) -> None:
    mask = from_runs(result["segmentation"])
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if len(rows) == 0:
        return
    top, bottom, left, right = (int(edge) for edge in (rows[0], rows[-1] + 1, columns[0], columns[-1] + 1))
    alpha = Image.fromarray(mask[top:bottom, left:right] * np.uint8(255 * MASK_OPACITY))
    if factor > 1:
        alpha = alpha.resize((alpha.width * factor, alpha.height * factor), Image.Resampling.NEAREST)
    canvas.paste(colour_of(result["category_id"]), (left * factor, top * factor), alpha)


def _edges(result: NamedResult, factor: int, width: int, height: int) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of the box, clipped to the image; right and bottom are inclusive."""
    x, y, w, h = (side * factor for side in result["bbox"])
    left, top = min(max(x, 0), width - 1), min(max(y, 0), height - 1)
    return left, top, min(max(x + w - 1, left), width - 1), min(max(y + h - 1, top), height - 1)


def _letter_height(width: int, height: int) -> int:
    """Height of letters in pixels. It depends on the area, so that letters fit into long, narrow images too."""
    return max(12, round(math.sqrt(width * height) / 40))


def _font(height: int) -> Font:
    try:
        return ImageFont.load_default(height)
    except (ImportError, OSError):  # without FreeType, Pillow has one font size
        return ImageFont.load_default()


def _label(pen: ImageDraw.ImageDraw, font: Font, letters: int, result: NamedResult, factor: int, size: tuple[int, int]) -> None:
    """Draw the label above the box if there is room, else inside; always within the image."""
    text = f"{' '.join(result['category'].split())} {result['score']:.2f}"
    if not isinstance(font, ImageFont.FreeTypeFont):
        text = text.encode("ascii", "replace").decode()
    margin = max(2, letters // 5)
    wide, high = math.ceil(pen.textlength(text, font)) + 2 * margin, letters + 2 * margin
    x, y, _, _ = _edges(result, factor, *size)
    y = y - high if y >= high else y
    x, y = max(min(x, size[0] - wide), 0), max(min(y, size[1] - high), 0)
    colour = colour_of(result["category_id"])
    pen.rectangle((x, y, x + wide - 1, y + high - 1), fill=colour)
    bright = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 120
    pen.text((x + margin, y + margin), text, fill=(0, 0, 0) if bright else (255, 255, 255), font=font)
