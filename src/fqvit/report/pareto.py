"""Draw accuracy against file size from measured rows of `fqvit table`. See also: benchmarks/pareto.py (the figure in docs).

A program is on the Pareto front if no other program is both smaller (or equal in size) and more accurate.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fqvit.errors import FqvitError
from fqvit.report.svg import Axis, Canvas, label

WIDTH, HEIGHT = 760, 360
LEFT, RIGHT, TOP, BOTTOM = 52, 748, 34, 306
COLUMNS = ("model", "method", "bits", "runs", "top1", "file_bytes")


@dataclass(frozen=True)
class Measured:
    """One measured program. bits: W/A/ATTN   top1: percent   own: whether it is the program of the report"""

    method: str
    bits: str
    top1: float
    file_bytes: int
    own: bool = False

    @property
    def title(self) -> str:
        return f"{self.method} {self.bits}"


Comparison = tuple[Sequence[Measured], float | None]  # measured programs of a model, and the float model's top-1
NOTHING: Comparison = ((), None)


def read_rows(path: Path, model: str) -> tuple[list[Measured], float | None]:
    """Read the integer programs of a model, and the float model's top-1, from a CSV file of `fqvit table`."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FqvitError(f"{path}: cannot be read ({error}). Pass the CSV file of `fqvit table`.") from None
    if not rows or any(column not in rows[0] for column in COLUMNS):
        raise FqvitError(f"{path}: expected the columns {', '.join(COLUMNS)}. Pass the CSV file of `fqvit table`.")
    try:
        return _points(rows, model), next((float(row["top1"]) for row in rows if _is(row, model, "float")), None)
    except (TypeError, ValueError):
        raise FqvitError(f"{path}: a top1 or file_bytes is not a number. Pass the CSV file of `fqvit table`.") from None


def _is(row: Mapping[str, str], model: str, runs: str) -> bool:
    return row["model"] == model and row["runs"] == runs


def _points(rows: Iterable[Mapping[str, str]], model: str) -> list[Measured]:
    found = [row for row in rows if _is(row, model, "integer")]
    return [Measured(row["method"], row["bits"], float(row["top1"]), int(row["file_bytes"])) for row in found]


def front(points: Sequence[Measured]) -> list[Measured]:
    """Return the Pareto front: the points that no other point beats, smallest first."""
    best: list[Measured] = []
    for point in sorted(points, key=lambda one: (one.file_bytes, -one.top1)):
        if not best or point.top1 > best[-1].top1:
            best.append(point)
    return best


def size_accuracy(points: Sequence[Measured], float_top1: float | None, images: str) -> str:
    """Draw one dot per program, the Pareto front as a line, and the float top-1 as a dashed line.

    images: text at the lower left of the figure
    """
    canvas = Canvas(WIDTH, HEIGHT)
    sizes, tops = [point.file_bytes / 1e6 for point in points], [point.top1 for point in points]
    tops += [] if float_top1 is None else [float_top1]
    pad = max(0.08 * (max(tops) - min(tops)), 0.5)
    x = Axis(min(sizes) * 0.94, max(sizes) * 1.06, LEFT, RIGHT)
    y = Axis(min(tops) - pad, max(tops) + pad, BOTTOM, TOP)
    canvas.rows(y, LEFT, RIGHT)
    for tick in x.ticks(7):
        canvas.line("grid", (x(tick), TOP), (x(tick), BOTTOM))
        canvas.text("tick", (x(tick), BOTTOM + 20), label(tick), "middle")
    canvas.text("tick", (LEFT - 44, 18), "top-1, percent")
    canvas.text("tick", (RIGHT, BOTTOM + 40), "file size, MB", "end")
    canvas.text("tick", (LEFT, BOTTOM + 40), images)
    if float_top1 is not None:
        canvas.line("dashed", (LEFT, y(float_top1)), (RIGHT, y(float_top1)))
        canvas.text("word", (RIGHT - 4, y(float_top1) - 6), f"float {float_top1:.1f}", "end")
    best = front(points)
    canvas.path("curve", [(x(point.file_bytes / 1e6), y(point.top1)) for point in best])
    taken: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda one: (one.file_bytes, one.top1)):
        at = x(point.file_bytes / 1e6), y(point.top1)
        kind = "dot-warm" if point.own else "dot" if point in best else "ring"
        canvas.circle(kind, at, 5, f"{point.title}: {point.top1:.1f} %, {point.file_bytes / 1e6:.2f} MB")
        _name(canvas, point, at, taken)
    said = "; ".join(f"{point.title} {point.top1:.1f} percent at {point.file_bytes / 1e6:.2f} MB" for point in best)
    return canvas.finish("Top-1 against file size", f"No other program is smaller and more accurate: {said}.")


def _name(canvas: Canvas, point: Measured, at: tuple[float, float], taken: list[tuple[float, float]]) -> None:
    """Write the name next to its dot, lower if another name is already there."""
    right = at[0] < WIDTH - 170
    column, row = at[0] + (9 if right else -9), at[1] + 4
    while any(abs(column - other[0]) < 120 and abs(row - other[1]) < 13 for other in taken):
        row += 13
    taken.append((column, row))
    canvas.text("loss" if point.own else "word", (column, row), point.title, "start" if right else "end")
