"""Draw attention maps over their images, and encode thumbnails.

Images are embedded as data: URIs, so that a page needs no other files.
See also: plots.py (charts), data.py (AttentionMaps).
"""

from __future__ import annotations

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fqvit.report.data import AttentionMaps, QuantizedMap
from fqvit.report.svg import Canvas

CELL = 168  # long side of an embedded map in pixels; it is displayed slightly smaller
HEAT = np.array(  # eight colours of the inferno colour map: brightness increases monotonically, so it also works in grey
    [[0, 0, 4], [40, 11, 84], [101, 21, 110], [159, 42, 99], [212, 72, 66], [245, 125, 21], [250, 193, 39], [252, 255, 164]]
)


def jpeg(pixels: NDArray[np.uint8], size: int, quality: int = 82) -> str:
    """Encode u8 [H, W, 1 or 3] as a JPEG in a data: URI, with its long side resized to `size`.

    Images that are enlarged by a factor of more than 2 keep sharp pixels (nearest neighbour).
    """
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    scale = size / max(image.size)
    target = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    resample = Image.Resampling.NEAREST if scale > 2 else Image.Resampling.LANCZOS
    with io.BytesIO() as file:
        image.resize(target, resample).save(file, "JPEG", quality=quality, optimize=True)
        return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def png(pixels: NDArray[np.uint8], size: int) -> str:
    """Encode u8 [H, W, 3] as a PNG in a data: URI: every pixel becomes a square, the long side at least `size`."""
    times = -(-size // max(pixels.shape[:2]))
    with io.BytesIO() as file:
        Image.fromarray(pixels.repeat(times, 0).repeat(times, 1)).save(file, "PNG", optimize=True)
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def overlay(pixels: NDArray[np.uint8], weights: NDArray[np.float32], largest: float) -> NDArray[np.uint8]:
    """Blend the image in grey with heat colours: sqrt(weight / largest) from dark to bright, one square per patch.

    pixels: u8 [H, W, C]   weights: [rows, columns] of patches   Returns u8 [H', W', 3] with the long side CELL.
    """
    height, width = _fitted(pixels.shape[0], pixels.shape[1])
    grey = np.asarray(Image.fromarray(pixels.mean(-1).astype(np.uint8)).resize((width, height)), np.float64)[..., None]
    t = np.sqrt(np.clip(weights / max(largest, 1e-30), 0, 1))
    rows = np.arange(height) * len(t) // height
    columns = np.arange(width) * t.shape[1] // width
    heat = t[rows][:, columns]
    position = heat * (len(HEAT) - 1)
    low = np.minimum(position.astype(np.int64), len(HEAT) - 2)
    part = (position - low)[..., None]
    colour = HEAT[low] * (1 - part) + HEAT[low + 1] * part
    cover = 0.45 + 0.4 * heat[..., None]
    mixed: NDArray[np.uint8] = np.clip((1 - cover) * grey + cover * colour, 0, 255).astype(np.uint8)
    return mixed


def _fitted(height: int, width: int) -> tuple[int, int]:
    """Scale a size so that its long side is CELL."""
    scale = CELL / max(height, width)
    return round(height * scale), round(width * scale)


def attention_maps(found: AttentionMaps) -> str:
    """Draw the image and its float map at the left, then one row per format and one column per bit width.

    All maps share one brightness scale, whose maximum is the 98th percentile of the float map.
    """
    size, gap, left, head = 150, 14, 196, 30
    canvas = Canvas(760, head + 3 * (size + 34) - 6)
    largest = float(np.quantile(found.float_map, 0.98))

    def cell(x: float, y: float, pixels: NDArray[np.uint8], words: str, kind: str, tip: str) -> None:
        height, width = pixels.shape[:2]
        scale = size / max(height, width)
        canvas.image((x, y), (width * scale, height * scale), jpeg(pixels, CELL), tip, sharp=True)
        canvas.text(kind, (x, y + size + 17), words)

    step = size + 34
    scale = np.linspace(0, 1, 60, dtype=np.float32)[None] ** 2  # squared, because overlay takes the square root
    strip = overlay(np.zeros((1, 60, 1), np.uint8), scale, 1.0)
    canvas.image(
        (0, head + 2 * step + 8),
        (size, 10),
        jpeg(strip, CELL),
        "colour scale, from 0 to the 98th percentile of the float map",
    )
    canvas.text("tick", (0, head + 2 * step + 34), "0")
    canvas.text("tick", (size, head + 2 * step + 34), f"{largest:.2g}", "end")
    cell(0, head, found.pixels, "image", "word", "the image as the model sees it")
    cell(0, head + step, overlay(found.pixels, found.float_map, largest), "float", "strong", "attention in float")
    for column, bits in enumerate((8, 6, 4)):
        x = left + column * (size + gap + 24)
        canvas.text("strong", (x, 16), f"{bits} bits")
        for row, method in enumerate(("uniform", "log2", "relative")):
            stored = _stored(found, method, bits)
            if stored is not None:
                words = f"{method}{' (fqvit)' if method == 'relative' else ''}, {decibels(stored.decibels)}"
                best = "blue" if method == "relative" else "word"
                cell(x, head + row * step, overlay(found.pixels, stored.map, largest), words, best, words)
    said = "; ".join(f"{one.method} {one.bits} bits {decibels(one.decibels)}" for one in found.stored)
    return canvas.finish(f"Attention of {found.site} in float and in integer formats", f"Signal-to-noise ratios: {said}")


def _stored(found: AttentionMaps, method: str, bits: int) -> QuantizedMap | None:
    return next((one for one in found.stored if (one.method, one.bits) == (method, bits)), None)


def decibels(value: float) -> str:
    """Format decibels; infinity is "exact"."""
    return "exact" if np.isinf(value) else f"{value:.1f} dB"
