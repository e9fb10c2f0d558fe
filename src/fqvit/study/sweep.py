"""Format accuracy over K, the largest exponent of the Power-of-Two Factor, as a table and as a figure.

See also: cells.py (runs the cells), methods.py (`sweep` makes the methods).
"""

from __future__ import annotations

from collections.abc import Sequence

from fqvit.report.plots import LEFT, RIGHT, WIDTH
from fqvit.report.svg import Axis, Canvas, standalone
from fqvit.study.table import Row, difference, flat, grid, title_of

PANEL = 260  # height of one model's panel


def _k(row: Row) -> int | None:
    return None if row.runs == "float" else int(row.method.removeprefix("K = "))


def rows(cells: Sequence[Row]) -> list[dict[str, object]]:
    """Flatten every cell and add its K (None for float)."""
    return [{**flat(cell), "k": _k(cell)} for cell in cells]


def markdown(cells: Sequence[Row]) -> str:
    """Format one table per model."""
    parts = []
    for model in dict.fromkeys(cell.model for cell in cells):
        chosen = [cell for cell in cells if cell.model == model]
        body = []
        for cell in chosen:
            exact = cell.runs == "float"
            compared = ["", ""] if exact else [difference(cell.against_float), f"{cell.agreement:.1f}"]
            body.append(["float" if exact else str(_k(cell)), cell.bits, f"{cell.top1:.1f}", *compared])
        head = ["K", "W/A/Attn", "top-1", "against float", "agreement"]
        parts.append(f"{title_of(chosen)}\n\n{grid(head, body, 2)}")
    return "\n\n".join([*parts, "K: the largest exponent of the Power-of-Two Factor; 0 is one scale per tensor."]) + "\n"


def draw(cells: Sequence[Row]) -> str:
    """Draw top-1 over K, with the 95 % confidence interval of its difference from float, one panel per model, as SVG."""
    models = list(dict.fromkeys(cell.model for cell in cells))
    canvas = Canvas(WIDTH, PANEL * len(models))
    descriptions = []
    for number, model in enumerate(models):
        chosen = [cell for cell in cells if cell.model == model]
        descriptions.append(_panel(canvas, model, chosen, PANEL * number))
    return standalone(canvas.finish("Accuracy over K, the largest exponent of the Power-of-Two Factor", " ".join(descriptions)))


def _panel(canvas: Canvas, model: str, cells: Sequence[Row], top: int) -> str:
    exact = next(cell.top1 for cell in cells if cell.runs == "float")
    swept = [cell for cell in cells if cell.runs != "float"]
    lows = [exact + cell.against_float.low for cell in swept]
    highs = [exact + cell.against_float.high for cell in swept]
    low, high = min([exact, *lows]), max([exact, *highs])
    margin = 0.05 * (high - low) or 1.0
    x = Axis(0, max(len(swept) - 1, 1), LEFT + 24, RIGHT - 24)
    y = Axis(low - margin, high + margin, top + PANEL - 44, top + 34)
    canvas.rows(y, LEFT, RIGHT)
    canvas.line("dashed", (LEFT, y(exact)), (RIGHT, y(exact)))
    canvas.strokes("whisker", [((x(i), y(a)), (x(i), y(b))) for i, (a, b) in enumerate(zip(lows, highs))])
    if swept:
        canvas.path("curve", [(x(i), y(cell.top1)) for i, cell in enumerate(swept)])
    for i, cell in enumerate(swept):
        tip = f"K = {_k(cell)}: {cell.top1:.1f} %, {difference(cell.against_float)} against float"
        canvas.circle("dot", (x(i), y(cell.top1)), 4, tip)
        canvas.text("tick", (x(i), top + PANEL - 24), str(_k(cell)), "middle")
    canvas.text("strong", (LEFT, top + 18), model)
    canvas.text("tick", (RIGHT, top + 18), f"top-1 in %; dashed: float, {exact:.1f}", "end")
    canvas.text("tick", (RIGHT, top + PANEL - 6), "K, the largest exponent of the Power-of-Two Factor", "end")
    if not swept:
        return f"{model}: float {exact:.1f} percent, no K was measured."
    best = max(swept, key=lambda cell: cell.top1)
    return f"{model}: {swept[0].top1:.1f} percent at K = 0, at best {best.top1:.1f} at K = {_k(best)}, float {exact:.1f}."
