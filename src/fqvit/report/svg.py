"""Build SVG charts from axes, shapes and text. See also: plots.py (the charts).

Colours are CSS classes (chart.css), so that the page or the stand-alone file can set them for light and dark mode. All text
is escaped.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files

Point = tuple[float, float]


def escape(words: str) -> str:
    """Escape text for HTML and XML; control characters, which XML forbids, become U+FFFD."""
    return html.escape(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", "\ufffd", words))


def number(value: float) -> str:
    """Format a coordinate with one decimal at most: finer differences cannot be seen."""
    return f"{value:.1f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


@dataclass(frozen=True)
class Axis:
    """Maps values lo..hi to coordinates start..end, linearly or (log) by their logarithm."""

    lo: float
    hi: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        lo, hi = (math.log(self.lo), math.log(self.hi)) if self.log else (self.lo, self.hi)
        at = math.log(max(value, self.lo)) if self.log else value
        return self.start + (at - lo) / ((hi - lo) or 1.0) * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Return round values inside the axis: 1, 2 or 5 times a power of ten; on a long log axis only powers of ten."""
        if self.log:
            powers = range(math.floor(math.log10(self.lo)), math.ceil(math.log10(self.hi)) + 1)
            leads = (1, 2, 5) if math.log10(self.hi / self.lo) < 2.2 else (1,)
            every = [lead * 10.0**power for power in powers for lead in leads]
            return [tick for tick in every if self.lo <= tick * (1 + 1e-9) and tick <= self.hi * (1 + 1e-9)]
        rough = (self.hi - self.lo) / count or 1.0
        power = 10.0 ** math.floor(math.log10(rough))
        step = next((lead * power for lead in (1, 2, 5) if lead * power >= 0.8 * rough), 10 * power)
        first, last = math.ceil(self.lo / step - 1e-9), math.floor(self.hi / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def label(value: float) -> str:
    """Format the value of a tick: a true minus sign, thousands separators, no trailing zeros."""
    if value == 0:
        return "0"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("-", "−")


class Canvas:
    """SVG shapes in drawing order. `kind` is a CSS class of chart.css, `tip` the tooltip of a shape."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.parts: list[str] = []

    def _shape(self, name: str, kind: str, tip: str = "", **attributes: float | str) -> None:
        values = " ".join(
            f'{key.replace("_", "-")}="{number(value) if isinstance(value, int | float) else escape(value)}"'
            for key, value in attributes.items()
        )
        inside = f"><title>{escape(tip)}</title></{name}>" if tip else "/>"
        self.parts.append(f'<{name} class="{kind}" {values}{inside}')

    def line(self, kind: str, a: Point, b: Point) -> None:
        self._shape("line", kind, x1=a[0], y1=a[1], x2=b[0], y2=b[1])

    def rect(self, kind: str, a: Point, b: Point, tip: str = "", **attributes: float | str) -> None:
        """Draw a rectangle between two opposite corners, in any order."""
        (x0, x1), (y0, y1) = sorted((a[0], b[0])), sorted((a[1], b[1]))
        self._shape("rect", kind, tip, x=x0, y=y0, width=x1 - x0, height=y1 - y0, **attributes)

    def circle(self, kind: str, at: Point, radius: float, tip: str = "") -> None:
        self._shape("circle", kind, tip, cx=at[0], cy=at[1], r=radius)

    def path(self, kind: str, points: Iterable[Point], closed: bool = False) -> None:
        steps = "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self._shape("path", kind, d=f"M{steps}{'Z' if closed else ''}")

    def strokes(self, kind: str, strokes: Iterable[tuple[Point, Point]]) -> None:
        """Draw many separate lines as one path, which keeps the file small."""
        steps = "".join(f"M{number(a[0])} {number(a[1])}L{number(b[0])} {number(b[1])}" for a, b in strokes)
        self._shape("path", kind, d=steps or "M0 0")

    def text(self, kind: str, at: Point, words: str, anchor: str = "start", turn: float = 0) -> None:
        turned = f' transform="rotate({number(turn)} {number(at[0])} {number(at[1])})"' if turn else ""
        position = f'x="{number(at[0])}" y="{number(at[1])}" text-anchor="{anchor}"{turned}'
        self.parts.append(f'<text class="{kind}" {position}>{escape(words)}</text>')

    def image(self, at: Point, size: Point, uri: str, tip: str, sharp: bool = False) -> None:
        kind = "sharp" if sharp else "photo"
        self._shape("image", kind, tip, x=at[0], y=at[1], width=size[0], height=size[1], preserveAspectRatio="none", href=uri)

    def rows(self, axis: Axis, left: float, right: float, words: Sequence[str] | None = None) -> None:
        """Draw horizontal grid lines at the ticks of a vertical axis, with their values (or `words`) at the left."""
        for i, tick in enumerate(axis.ticks()):
            y = axis(tick)
            self.line("grid", (left, y), (right, y))
            self.text("tick", (left - 8, y + 4), words[i] if words else label(tick), "end")

    def finish(self, title: str, description: str) -> str:
        """Return the SVG element. A screen reader reads the title and the description instead of the shapes."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img"'
        name = f'aria-label="{escape(f"{title}. {description}")}"'
        return f'{head} {name} class="chart">' + "".join(self.parts) + "</svg>"


def asset(name: str) -> str:
    """Read a text file of this package."""
    return (files("fqvit.report") / name).read_text(encoding="utf-8")


def standalone(svg: str) -> str:
    """Turn a chart into a stand-alone SVG file, with its style sheet and its size in pixels."""
    head, _, rest = svg.partition(">")
    box = re.search(r'viewBox="0 0 (\d+) (\d+)"', head)
    assert box is not None
    sized = f'{head} width="{box[1]}" height="{box[2]}"'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{sized}><style>{asset("chart.css")}</style>{rest}\n'
