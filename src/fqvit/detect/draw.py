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
Area = tuple[float, float, float, float]  # left, top, right, bottom, in pixels
Font = ImageFont.ImageFont | ImageFont.FreeTypeFont

MIN_SIDE = 480  # pixels; if the longer side of an image is below this, it is enlarged by an integer factor so that labels fit
MASK_OPACITY = 0.45
GOLDEN = 0.618033988749895  # golden ratio - 1: its multiples, modulo 1, are well separated hues for any number of categories


def colour_of(category: int) -> Colour:
    """Return the colour of a category, the same in every image."""
    red, green, blue = colorsys.hsv_to_rgb((category * GOLDEN) % 1, (0.9, 0.65, 0.8)[category % 3], 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def draw(image: Image.Image, results: Sequence[NamedResult], name: str) -> Image.Image:
    """Return a copy of the image, enlarged if it is small, with the results drawn on it, the best on top.

    name: the name of the image, for error messages
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
    taken: list[Area] = []
    for result in reversed(ascending):  # the best result gets its label first, next to its box
        taken.append(_label(pen, font, letters, result, factor, (width, height), taken))
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


def _label(
    pen: ImageDraw.ImageDraw,
    font: Font,
    letters: int,
    result: NamedResult,
    factor: int,
    size: tuple[int, int],
    taken: Sequence[Area],
) -> Area:
    """Draw the label of a box where it covers no other label, if possible. taken: areas of other labels. Return its area."""
    text = f"{' '.join(result['category'].split())} {result['score']:.2f}"
    if not isinstance(font, ImageFont.FreeTypeFont):
        text = text.encode("ascii", "replace").decode()
    margin = max(2, letters // 5)
    wide, high = math.ceil(pen.textlength(text, font)) + 2 * margin, letters + 2 * margin
    left, top, right, bottom = place(_edges(result, factor, *size), wide, high, size, taken)
    colour = colour_of(result["category_id"])
    pen.rectangle((left, top, right - 1, bottom - 1), fill=colour)
    bright = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 120
    pen.text((left + margin, top + margin), text, fill=(0, 0, 0) if bright else (255, 255, 255), font=font)
    return left, top, right, bottom


def place(box: Area, wide: int, high: int, size: tuple[int, int], taken: Sequence[Area]) -> Area:
    """Return the area of a label of `wide` x `high` pixels, within an image of `size` (width, height).

    The first position that overlaps no label in `taken`: above the box, inside it, below it, then further down and up, at the
    left or the right edge of the box. If there is none, above the box or inside it.
    """
    left, top, right, bottom = box
    first = top - high if top >= high else top
    rows = [first, top, bottom + 1]
    steps = range(1, size[1] // high + 1)
    rows += [y for step in steps for y in (top + step * high, top - (step + 1) * high)]
    for y in rows:
        for x in (left, right + 1 - wide):
            found = _within(x, y, wide, high, size)
            inside = 0 <= y <= size[1] - high or y == first
            if inside and not any(_overlap(found, other) for other in taken):
                return found
    return _within(left, first, wide, high, size)


def _within(x: float, y: float, wide: int, high: int, size: tuple[int, int]) -> Area:
    x, y = max(min(x, size[0] - wide), 0), max(min(y, size[1] - high), 0)
    return x, y, x + wide, y + high


def _overlap(a: Area, b: Area) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
