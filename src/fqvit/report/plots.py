"""Draw the report's figures: one function per figure, from plain values (data.py) to SVG.

A figure has its own axes and labels; page.py writes the caption. See also: docs/reference/report.md (what each figure shows).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fqvit.report.data import BINS, FINE, AttentionCounts, Box, ChannelRanges, ExpCurves, box, entropy, used
from fqvit.report.predictions import ClassChange
from fqvit.report.svg import Axis, Canvas, label

if TYPE_CHECKING:
    from fqvit.evaluate.compare import SiteNoise

WIDTH = 760
LEFT, RIGHT = 52, 748
LABEL = 56  # minimum distance between two labels on one line, in pixels


def channel_ranges(found: ChannelRanges) -> str:
    """Draw one vertical line per channel, from its minimum to its maximum, in channel order."""
    canvas = Canvas(WIDTH, 300)
    x = Axis(0, max(len(found.lo) - 1, 1), LEFT + 6, RIGHT - 4)
    y = _around(float(found.lo.min()), float(found.hi.max()), 250, 20)
    canvas.rows(y, LEFT, RIGHT)
    spans = [((x(c), y(float(lo))), (x(c), y(float(hi)))) for c, (lo, hi) in enumerate(zip(found.lo, found.hi))]
    canvas.strokes("span" if len(spans) <= 300 else "span-thin", spans)
    widest = int(found.ranges.argmax())
    high = float(found.hi[widest]) >= -float(found.lo[widest])
    tip = float((found.hi if high else found.lo)[widest])
    canvas.circle("dot-warm", (x(widest), y(tip)), 3.5, f"channel {widest}")
    side = "end" if x(widest) > WIDTH / 2 else "start"
    canvas.text("loss", (x(widest) + (-10 if side == "end" else 10), y(tip) + (6 if high else 0)), f"channel {widest}", side)
    for tick in x.ticks(8):
        canvas.text("tick", (x(tick), 272), label(tick), "middle")
    canvas.text("tick", (RIGHT, 293), "channel", "end")
    canvas.text("tick", (LEFT - 44, 12), "value")
    least, greatest = float(found.lo.min()), float(found.hi.max())
    said = f"Values span {least:.3g} to {greatest:.3g}; the widest range is {found.ratio:.1f} times the median range."
    return canvas.finish(f"Minimum and maximum of each channel before {found.norm}", said)


def norm_boxes(norms: Sequence[ChannelRanges]) -> str:
    """Draw a box plot of channel ranges per LayerNorm, in network order on a log axis; above each: widest / median."""
    canvas = Canvas(WIDTH, 360)
    boxes = [_box(found) for found in norms]
    y = _range_axis(norms, 285, 46)
    canvas.rows(y, LEFT, RIGHT)
    slot = (RIGHT - LEFT) / max(len(norms), 1)
    half = min(slot * 0.3, 14)
    worst = max(range(len(norms)), key=lambda i: norms[i].ratio)
    for i, (found, own) in enumerate(zip(norms, boxes)):
        at = LEFT + slot * (i + 0.5)
        if own is not None:
            _draw_box(canvas, y, at, half, own, found.norm)
        if slot >= 27 or i == worst or (i % 2 == 0 and abs(i - worst) > 1):
            canvas.text("loss" if i == worst else "word", (at, 30), _ratio(found.ratio), "middle")
        canvas.text("tick", (at + 4, 300), shorter(found.norm), "end", turn=-45)
    canvas.text("tick", (LEFT - 44, 12), "widest range ÷ median range")
    said = f"Before {norms[worst].norm} the widest range is {norms[worst].ratio:.1f} times the median range."
    return canvas.finish("Ranges of channels before each LayerNorm", said)


def model_boxes(models: Sequence[tuple[str, ChannelRanges]], images: int) -> str:
    """Draw a box plot of channel ranges per (name, norm), models side by side on a log axis: the paper's Figure 2.

    Above each box: widest / median.
    """
    canvas = Canvas(WIDTH, 370)
    tight = _range_axis([found for _, found in models], 300, 62)
    decades = math.floor(math.log10(tight.lo)), math.ceil(math.log10(tight.hi))
    y = replace(tight, lo=10.0 ** decades[0], hi=10.0 ** decades[1])
    canvas.rows(y, LEFT, RIGHT)
    slot = (RIGHT - LEFT) / len(models)
    said = []
    for i, (name, found) in enumerate(models):
        at, own = LEFT + slot * (i + 0.5), _box(found)
        if own is not None:
            _draw_box(canvas, y, at, min(slot * 0.25, 34), own, name)
        canvas.text("strong", (at, 46), f"{_ratio(found.ratio)}×", "middle")
        canvas.text("word", (at, 322), name, "middle")
        canvas.text("tick", (at, 339), f"{found.norm}, {len(found.lo)} channels", "middle")
        said.append(f"{name}: median range {np.median(found.ranges):.3g}, widest {found.ranges.max():.3g}.")
    canvas.text("tick", (LEFT - 44, 22), "range of each channel, max − min; above: widest ÷ median")
    canvas.text("tick", (RIGHT, 362), f"{images:,} images", "end")
    return canvas.finish("Ranges of channels before the last normalization of several models", " ".join(said))


def _box(found: ChannelRanges) -> Box | None:
    """Summarize the channels that vary; None if no channel does, because a log axis has no 0."""
    varying = found.ranges[found.ranges > 0]
    return box(varying) if len(varying) else None


def _range_axis(norms: Sequence[ChannelRanges], start: float, end: float) -> Axis:
    """Return a log axis for all ranges above 0; around 1 if no channel of any norm varies."""
    every = np.concatenate([found.ranges[found.ranges > 0] for found in norms])
    least, most = (float(every.min()), float(every.max())) if len(every) else (1.0, 1.0)
    return Axis(least / 1.2, most * 1.2, start, end, log=True)


def _ratio(value: float) -> str:
    """Format with two significant digits."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def _draw_box(canvas: Canvas, y: Axis, at: float, half: float, own: Box, norm: str) -> None:
    canvas.strokes("whisker", [((at, y(own.low)), (at, y(own.q1))), ((at, y(own.q3)), (at, y(own.high)))])
    canvas.strokes("whisker", [((at - half / 2, y(end)), (at + half / 2, y(end))) for end in (own.low, own.high)])
    tip = f"{norm}: median {own.median:.3g}, middle half {own.q1:.3g} to {own.q3:.3g}"
    canvas.rect("box", (at - half, y(own.q1)), (at + half, y(own.q3)), tip)
    canvas.line("median", (at - half, y(own.median)), (at + half, y(own.median)))
    for value in own.outliers:
        canvas.circle("dot-far", (at, y(float(value))), 1.8)


def attention_values(found: AttentionCounts) -> str:
    """Draw a histogram over powers of two, and below it the 16 uniform bins and log2 codes of 4 bits.

    The opacity of a bin grows with its share of the values.
    """
    canvas = Canvas(WIDTH, 330)
    last = int(np.flatnonzero(found.fine).max()) if found.total else FINE
    octaves = min(-(-(last + 1) // FINE), 20)
    x = Axis(-octaves, 0, LEFT, RIGHT - 2)  # the logarithm of the value
    shares = 100 * found.fine[: FINE * octaves] / max(found.total, 1)
    y = Axis(0, float(shares.max(initial=0)) * 1.08 or 1.0, 190, 24)
    canvas.rows(y, LEFT, RIGHT, [f"{label(tick)} %" for tick in y.ticks()])
    for i, share in enumerate(shares):
        if share > 0:
            a, b = x(-(i + 1) / FINE), x(-i / FINE)
            kind = "bar" if i >= 4 * FINE else "bar-warm"
            canvas.rect(kind, (a + 0.5, y(0)), (b - 0.5, y(float(share))), f"{share:.2f} % of values")
    cut = x(-4)
    canvas.line("dashed", (cut, 14), (cut, 262))
    canvas.text("blue", (cut - 8, 16), f"{100 * found.share_below:.1f} % below 1/16", "end")
    for octave in range(0, octaves + 1, 2):
        canvas.text("tick", (x(-octave), 208), "1" if octave == 0 else f"2⁻{_raised(octave)}", "middle")
    rulers = (("uniform", found.uniform, _uniform_edges(octaves)), ("log2", found.log2, _log2_edges(octaves)))
    for row, (name, counts, edges) in enumerate(rulers):
        top = 222 + 48 * row
        for k in range(BINS):
            a, b = max(edges[k][0], -octaves), edges[k][1]
            if b > -octaves:
                share = counts[k] / max(found.total, 1)
                tip = f"{name} bin {k}: {100 * share:.2f} % of values"
                canvas.rect("cell", (x(a), top), (x(b), top + 20), tip, fill_opacity=f"{_shade(share):.2f}")
        said = f"{name}, 4 bits: {used(counts)} of 16 bins used, {entropy(counts):.1f} bits of information per value"
        canvas.text("word", (LEFT, top + 35), said)
    below = f"{100 * found.share_below:.1f} percent of attention values are below one sixteenth"
    where = f"all in one uniform bin; log2 has {used(found.below)} codes for them"
    return canvas.finish("Distribution of attention values", f"{below}, {where}.")


def _shade(share: float) -> float:
    """Return the opacity of a bin: the square root of its share, so that rare bins stay visible."""
    return math.sqrt(min(share, 1.0)) if share > 0 else 0.0


def _uniform_edges(octaves: int) -> list[tuple[float, float]]:
    """Return log2 of both ends of each bin floor(16 * p) = k."""
    return [(math.log2(k / BINS) if k else -octaves, math.log2((k + 1) / BINS)) for k in range(BINS)]


def _log2_edges(octaves: int) -> list[tuple[float, float]]:
    """Return log2 of both ends of each code k; codes change at 1/p = 1.5 * 2^k."""
    turn = math.log2(1.5)
    return [(-k - turn if k < BINS - 1 else -octaves, min(-k + 1 - turn, 0.0)) for k in range(BINS)]


def _raised(value: int) -> str:
    return str(value).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def exponentials(found: ExpCurves) -> str:
    """Draw exp and I-Exp in one plot, and below it the error of I-Exp with both sets of coefficients."""
    canvas = Canvas(WIDTH, 400)
    x = Axis(float(found.x.min()), 0, LEFT, RIGHT - 4)
    y = Axis(0, 1.05, 180, 14)
    canvas.rows(y, LEFT, RIGHT)
    exact = np.exp(found.x)
    canvas.path("quiet", [(x(float(a)), y(float(b))) for a, b in zip(found.x, exact)])
    canvas.path("curve2", [(x(float(a)), y(float(b))) for a, b in zip(found.x, found.curves["code"])])
    canvas.text("word", (x(-1.35), y(0.52)), "exp, with I-Exp on top (dashed)", "end")
    largest = max(found.gaps.values()) * 1e3
    gap = Axis(-1.15 * largest, 1.15 * largest, 368, 232)
    canvas.text("strong", (LEFT, 218), "I-Exp − exp, in thousandths")
    canvas.rows(gap, LEFT, RIGHT)
    canvas.line("base", (LEFT, gap(0)), (RIGHT, gap(0)))
    for kind, style in (("paper", "curve"), ("code", "curve2")):
        off = 1e3 * (found.curves[kind] - exact)
        canvas.path(style, [(x(float(a)), gap(float(b))) for a, b in zip(found.x, off)])
    canvas.text("blue", (RIGHT - 4, 218), f"as printed: {found.gaps['paper']:.2e}", "end")
    canvas.text("loss", (RIGHT - 170, 218), f"in its code: {found.gaps['code']:.2e}", "end")
    for tick in x.ticks(4):
        canvas.text("tick", (x(tick), 392), label(tick), "middle")
    said = f"Largest error: {found.gaps['paper']:.2e} as printed in the paper, {found.gaps['code']:.2e} as in its code."
    return canvas.finish("I-Exp against exp", said)


def site_errors(sites: Sequence[SiteNoise]) -> str:
    """Draw the signal-to-noise ratio of every site, in network order.

    Dots: the integer program, with the errors of earlier sites. Rings: rounding of this site only.
    The axis fits the dots; rings beyond it, mostly of 16-bit sites, are drawn on its upper edge.
    """
    canvas = Canvas(WIDTH, 330)
    values = [row.integer_db for row in sites if row.integer_db is not None]
    y = _around(min(values, default=0.0), max(values, default=1.0) + 6, 266, 24)
    canvas.rows(y, LEFT, RIGHT, [f"{label(tick)} dB" for tick in y.ticks()])
    x = Axis(-0.5, len(sites) - 0.5, LEFT, RIGHT)
    for i, row in enumerate(sites):
        if row.alone_db is not None:
            height = y(min(row.alone_db, y.hi))
            canvas.circle("ring", (x(i), height), 3, f"{row.site}: site only {row.alone_db:.1f} dB")
    for i, row in enumerate(sites):
        if row.integer_db is not None:
            canvas.circle("dot", (x(i), y(row.integer_db)), 3.4, f"{row.site}: integer {row.integer_db:.1f} dB")
    known = [(row.integer_db, i) for i, row in enumerate(sites) if row.integer_db is not None]
    if known:
        worst, i = min(known)
        side = "end" if x(i) > WIDTH / 2 else "start"
        canvas.circle("dot-warm", (x(i), y(worst)), 4, f"{sites[i].site}: integer {worst:.1f} dB")
        under = 14 if y(worst) < 250 else -9  # keep clear of the block names below
        canvas.text("loss", (x(i) + (-9 if side == "end" else 9), y(worst) + under), f"{sites[i].site} {worst:.1f} dB", side)
    before, lower = float(-LABEL), False
    for start, name in block_starts(sites):
        at = x(start - 0.4)
        lower = at - before < LABEL and not lower  # the networks of a detector have few sites: use two lines of labels
        before = at
        canvas.line("grid", (x(start - 0.5), 266), (x(start - 0.5), 274))
        canvas.text("tick", (min(at, RIGHT - LABEL / 2), 301 if lower else 287), name)
    canvas.circle("dot", (LEFT + 4, 316), 3.4)
    canvas.text("word", (LEFT + 14, 320), "integer program, errors of earlier sites included")
    canvas.circle("ring", (LEFT + 344, 316), 3)
    canvas.text("word", (LEFT + 354, 320), "rounding of this site only (top edge: off scale)")
    said = (
        f"The lowest is {sites[min(known)[1]].site} with {min(known)[0]:.1f} decibels."
        if known
        else "No site differs from float."
    )
    return canvas.finish("Signal-to-noise ratio of each site", said)


# First word of a site of a detector outside of its backbone -> label
NETWORKS = {"neck": "FPN", "rpn_head": "RPN", "boxes": "boxes", "masks": "masks"}


def block_starts(sites: Sequence[SiteNoise]) -> list[tuple[int, str]]:
    """Return (index of the first site, name) of at most 12 evenly spaced blocks."""
    starts: list[tuple[int, str]] = []
    before = ""
    for i, row in enumerate(sites):
        parts = row.site.removeprefix("backbone.").split(".")
        block = ".".join(parts[: 4 if parts[0] == "layers" else 2]) if "blocks" in parts else ""
        if parts[0] in NETWORKS:
            block = NETWORKS[parts[0]]
        if block and block != before:
            starts.append((i, shorter(block)))
        before = block or before
    every = -(-len(starts) // 12) or 1
    return starts[::every]


def class_changes(rows: Sequence[tuple[ClassChange, str]], most: int = 24) -> str:
    """Draw top-1 of float (ring) and integer (dot) for the classes that changed most, with their names; "" if none changed."""
    changed = sorted((row for row in rows if row[0].change), key=lambda row: (row[0].change, row[1]))
    if len(changed) > most:
        changed = [*changed[: most // 2], *changed[len(changed) - most // 2 :]]
    if not changed:
        return ""
    canvas = Canvas(WIDTH, 46 + 22 * len(changed))
    left = 20 + 7.4 * max(len(_cut(name)) for _, name in changed)
    x = Axis(0, 100, left, RIGHT - 68)
    bottom = canvas.height - 8
    for tick in (0, 25, 50, 75, 100):
        canvas.line("grid", (x(tick), 26), (x(tick), bottom))
        canvas.text("tick", (x(tick), 16), f"{tick} %", "middle")
    for i, (row, name) in enumerate(changed):
        y = 42 + 22 * i
        before, after = 100 * row.float_correct / row.images, 100 * row.integer_correct / row.images
        kind = "loss" if row.change < 0 else "blue"
        canvas.text("word", (left - 12, y + 4), _cut(name), "end")
        canvas.line("base", (x(before), y), (x(after), y))
        canvas.circle("ring", (x(before), y), 4, f"{name}: float {before:.1f} %")
        canvas.circle("dot-warm" if row.change < 0 else "dot", (x(after), y), 4.5, f"{name}: integer {after:.1f} %")
        canvas.text(kind, (WIDTH - 4, y + 4), f"{row.change:+.1f}".replace("-", "−"), "end")
    return canvas.finish("Top-1 by class, float and integer", f"The {len(changed)} classes that changed most.")


def _cut(name: str, most: int = 34) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _around(lo: float, hi: float, start: float, end: float) -> Axis:
    """Return a linear axis with a small margin, which includes 0 if 0 is near."""
    room = 0.06 * (hi - lo or 1.0)
    return Axis(min(lo - room, 0.0) if lo < 0.3 * hi else lo - room, hi + room, start, end)


def shorter(name: str) -> str:
    """Shorten the name of a site to a label: blocks.3.norm1 -> 3.norm1, layers.2.blocks.1.norm1 -> 2.1.norm1"""
    known = {"blocks": "", "layers": "", "patch_embed": "patch", "downsample": "down"}
    parts = [known.get(part, part) for part in name.split(".")]
    return _cut(".".join(part for part in parts if part) or name, 14)
