"""Draw the ablation as a bar chart of top-1 accuracy, in the style of the paper's Figure 1.

One panel per model, one bar per setting; the dashed line is the float model. Under the bars a small table shows which parts
of the method each setting uses. See also: ablation.py (the settings), sweep.py (the figure over K).
"""

from __future__ import annotations

from collections.abc import Sequence

from fqvit.report.plots import RIGHT, WIDTH
from fqvit.report.svg import Axis, Canvas, standalone
from fqvit.study.ablation import Setting, settings
from fqvit.study.table import Row, difference

LEFT = 178  # room for the names of the rows under the bars
PANEL = 226  # height of one model's panel
LEGEND = 30
TABLE = 84  # height of the table under the bars
HALF = 20  # half the width of a bar


def draw(cells: Sequence[Row]) -> str:
    """Draw the rows of `fqvit ablate` as an SVG file. cells: rows of at least one model, each model with its float row"""
    models = list(dict.fromkeys(cell.model for cell in cells))
    known = settings()
    canvas = Canvas(WIDTH, LEGEND + PANEL * len(models) + TABLE)
    slot = (RIGHT - LEFT) / len(known)
    centres = [LEFT + slot * (i + 0.5) for i in range(len(known))]
    _legend(canvas)
    said = []
    for number, model in enumerate(models):
        own = {cell.method: cell for cell in cells if cell.model == model}
        said.append(_panel(canvas, model, own, known, centres, LEGEND + PANEL * number))
    _table(canvas, known, centres, LEGEND + PANEL * len(models))
    return standalone(canvas.finish("Top-1 of each setting of the ablation", " ".join(said)))


def _legend(canvas: Canvas) -> None:
    canvas.rect("bar", (LEFT, 11), (LEFT + 14, 23))
    canvas.text("word", (LEFT + 22, 22), "integer program")
    canvas.rect("box", (LEFT + 146, 11), (LEFT + 160, 23))
    canvas.text("word", (LEFT + 168, 22), "simulated in float")
    canvas.line("dashed", (LEFT + 304, 17), (LEFT + 334, 17))
    canvas.text("word", (LEFT + 342, 22), "float model")


def _panel(
    canvas: Canvas, model: str, cells: dict[str, Row], known: Sequence[Setting], centres: Sequence[float], top: int
) -> str:
    """Draw one model's bars with the 95 % confidence interval of their difference from float. Return a one-sentence summary."""
    exact = next(cell.top1 for cell in cells.values() if cell.runs == "float")
    highs = [exact + cell.against_float.high for cell in cells.values() if cell.runs != "float"]
    y = Axis(0, max([exact, *highs]) or 1.0, top + PANEL - 10, top + 54)
    canvas.text("strong", (LEFT, top + 24), model)
    canvas.text("tick", (RIGHT, top + 24), f"float {exact:.1f} %", "end")
    canvas.rows(y, LEFT, RIGHT, [f"{tick:.0f} %" for tick in y.ticks()])
    canvas.line("dashed", (LEFT, y(exact)), (RIGHT, y(exact)))
    for setting, at in zip(known, centres):
        cell = cells.get(setting.method.label)
        if cell is None:
            continue
        low, high = (exact + bound for bound in (cell.against_float.low, cell.against_float.high))
        tip = f"{_name(setting)}: {cell.top1:.1f} %, {difference(cell.against_float)} against float"
        canvas.rect("bar" if cell.runs == "integer" else "box", (at - HALF, y(0)), (at + HALF, y(cell.top1)), tip)
        canvas.strokes("interval", [((at, y(max(low, 0))), (at, y(high)))])
        canvas.text("value", (at, y(max(high, cell.top1)) - 6), f"{cell.top1:.1f}", "middle")
    best = max((cell for cell in cells.values() if cell.runs != "float"), key=lambda cell: cell.top1, default=None)
    if best is None:
        return f"{model}: float {exact:.1f} percent, no other setting was measured."
    chosen = next(setting for setting in known if setting.method.label == best.method)
    return f"{model}: float {exact:.1f} percent, best setting {best.top1:.1f} percent ({_name(chosen)})."


def _table(canvas: Canvas, known: Sequence[Setting], centres: Sequence[float], top: int) -> None:
    """Draw the rows under the bars: bits of attention, and a dot for each part of the method that is on."""
    lines = [top + 16 + 24 * row for row in range(3)]
    for line, words in zip(lines, ("bits of attention", "Power-of-Two Factor", "Log-Int-Softmax")):
        canvas.text("word", (LEFT - 14, line + 4), words, "end")
    for setting, at in zip(known, centres):
        canvas.text("word", (at, lines[0] + 4), str(setting.attention_bits), "middle")
        if setting.partial:
            for words, line in zip(("LayerNorm,", "Softmax", "in float"), (-6, 9, 24)):
                canvas.text("tick", (at, lines[1] + line + 4), words, "middle")
            continue
        for on, line in zip((setting.ptf, setting.lis), lines[1:]):
            canvas.circle("dot" if on else "ring", (at, line), 5)


def _name(setting: Setting) -> str:
    if setting.partial:
        return "LayerNorm and Softmax in float"
    parts = [name for name, on in (("Power-of-Two Factor", setting.ptf), ("Log-Int-Softmax", setting.lis)) if on]
    return f"{' and '.join(parts) or 'MinMax'}, {setting.attention_bits}-bit attention"
