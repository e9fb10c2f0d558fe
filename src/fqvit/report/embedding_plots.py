"""Draw the figures about embeddings: cosine similarity by image and by layer, and patch tokens as colours.

See also: embeddings.py and tokens.py (the data), plots.py (the other figures), maps.py (images in figures).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fqvit.report.embeddings import EmbeddingQuality
from fqvit.report.maps import CELL, jpeg, overlay, png
from fqvit.report.plots import LEFT, RIGHT, WIDTH, block_starts
from fqvit.report.svg import Axis, Canvas
from fqvit.report.tokens import TokenColours

if TYPE_CHECKING:
    from fqvit.evaluate.compare import SiteNoise

BARS = 60
ROW = 138  # height of one histogram with its heading and its axis


def cosine_histograms(found: EmbeddingQuality) -> str:
    """Draw one histogram of the cosines of all images per output, each on its own axis; dashed: the first percentile."""
    canvas = Canvas(WIDTH, ROW * len(found.outputs))
    said = []
    for row, one in enumerate(found.outputs):
        top, base = ROW * row, ROW * row + 104
        values = found.cosines[one.name]
        x = _cosine_axis([float(values.min())], LEFT, RIGHT - 8)
        edges = np.linspace(x.lo, x.hi, BARS + 1)
        for tick in x.ticks(6):
            canvas.line("grid", (x(tick), top + 34), (x(tick), base))
            canvas.text("tick", (x(tick), base + 18), _cosine(tick), "middle")
        counts, _ = np.histogram(values, edges)
        y = Axis(0, float(counts.max()), base, top + 40)
        for count, a, b in zip(counts, edges, edges[1:]):
            if count:
                tip = f"{count} of {len(values)} images: {a:.5f} to {b:.5f}"
                canvas.rect("bar", (x(a) + 0.5, base), (x(b) - 0.5, min(y(float(count)), base - 1.5)), tip)
        canvas.line("base", (LEFT, base), (RIGHT, base))
        canvas.line("dashed", (x(one.first_percentile), top + 34), (x(one.first_percentile), base))
        canvas.circle("dot-warm", (x(one.worst), base), 4, f"worst: {one.worst_image}, {one.worst:.5f}")
        canvas.text("strong", (LEFT, top + 20), one.name)
        words = f"mean {one.mean_cosine:.4f}, first percentile {one.first_percentile:.4f} (dashed), worst {one.worst:.4f} (dot)"
        canvas.text("word", (RIGHT, top + 20), words, "end")
        said.append(f"{one.name}: {words}.")
    return canvas.finish("Cosine similarity of the float and the integer output of every image", " ".join(said))


def layer_cosines(sites: Sequence[SiteNoise]) -> str:
    """Draw the mean cosine (dot) and the cosine of the worst image (ring) of each site, in network order."""
    canvas = Canvas(WIDTH, 330)
    known = [(i, row.cosine, row.lowest_cosine) for i, row in enumerate(sites)]
    values = [(i, mean, mean if low is None else low) for i, mean, low in known if mean is not None]
    y = _cosine_axis([low for _, _, low in values], 266, 24)
    canvas.rows(y, LEFT + 8, RIGHT, [_cosine(tick) for tick in y.ticks()])
    x = Axis(-0.5, len(sites) - 0.5, LEFT + 8, RIGHT)
    canvas.path("curve", [(x(i), y(mean)) for i, mean, _ in values])
    canvas.strokes("whisker", [((x(i), y(low)), (x(i), y(mean))) for i, mean, low in values])
    for i, mean, low in values:
        canvas.circle("ring", (x(i), y(low)), 3, f"{sites[i].site}: worst image {low:.5f}")
        canvas.circle("dot", (x(i), y(mean)), 3.4, f"{sites[i].site}: mean {mean:.5f}")
    for start, name in block_starts(sites):
        canvas.line("grid", (x(start - 0.5), 266), (x(start - 0.5), 274))
        canvas.text("tick", (x(start - 0.4), 287), name)
    canvas.text("tick", (LEFT - 44, 12), "cosine")
    canvas.circle("dot", (LEFT + 12, 316), 3.4)
    canvas.text("word", (LEFT + 22, 320), "mean of all images")
    canvas.circle("ring", (LEFT + 192, 316), 3)
    canvas.text("word", (LEFT + 202, 320), "the image with the lowest cosine")
    i, mean, _ = min(values, key=lambda one: one[1])
    return canvas.finish("Cosine similarity to the float model by layer", f"The lowest is {sites[i].site} with {mean:.4f}.")


def token_pictures(found: Sequence[TokenColours]) -> str:
    """Draw one row per image: the image, its float and integer tokens as colours, and where they differ."""
    size, gap, head = 172, 24, 30
    step = size + 34
    canvas = Canvas(WIDTH, head + step * len(found))
    largest = largest_difference(found)
    heads = ("image", "float", "integer", f"1 − cosine, 0 to {largest:.2g}")
    for column, words in enumerate(heads):
        canvas.text("strong", (column * (size + gap), 16), words)
    for row, one in enumerate(found):
        tall, wide = one.pixels.shape[:2]
        scale = size / max(tall, wide)
        shape, top = (wide * scale, tall * scale), head + row * step
        differences = overlay(one.pixels, (1 - one.cosines).astype(np.float32), largest)
        pictures = (
            (jpeg(one.pixels, CELL), one.path),
            (png(one.float_colours, CELL), "first three principal components of the float tokens"),
            (png(one.integer_colours, CELL), "the integer tokens in the same projection"),
            (jpeg(differences, CELL), "1 − cosine between float and integer, patch by patch"),
        )
        for column, (uri, tip) in enumerate(pictures):
            canvas.image((column * (size + gap), top), shape, uri, tip, sharp=column > 0)
        below = top + shape[1] + 17
        canvas.text("word", (size + gap, below), f"{100 * one.explained:.0f} % of the variance")
        canvas.text("blue", (2 * (size + gap), below), f"cosine {one.cosines.mean():.4f}")
    said = "; ".join(f"{one.path}: mean cosine {one.cosines.mean():.4f}" for one in found)
    return canvas.finish("Patch tokens as colours, float beside integer", said)


def largest_difference(found: Sequence[TokenColours]) -> float:
    """Return the end of the colour scale: the 98th percentile of 1 - cosine over all patches."""
    every = np.concatenate([(1 - one.cosines).ravel() for one in found])
    return float(max(np.quantile(every, 0.98), 1e-6))


def _cosine_axis(lowest: Sequence[float], start: float, end: float) -> Axis:
    """Return an axis from a little below the lowest cosine to 1."""
    least = min(lowest, default=0.0)
    return Axis(least - 0.05 * max(1 - least, 1e-5), 1.0, start, end)


def _cosine(tick: float) -> str:
    return f"{tick:.6g}".replace("-", "−")
