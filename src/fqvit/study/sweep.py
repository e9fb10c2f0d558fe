"""Accuracy over K, as a table and as a picture. Cells are run elsewhere (cells.py); the methods are methods.sweep's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fqvit.study.table import Row, difference, flat, grid, title_of


def _k(row: Row) -> int | None:
    return None if row.runs == "float" else int(row.method.removeprefix("K = "))


def rows(cells: Sequence[Row]) -> list[dict[str, object]]:
    return [{**flat(cell), "k": _k(cell)} for cell in cells]


def markdown(cells: Sequence[Row]) -> str:
    """One table a model."""
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
    return "\n\n".join([*parts, "K: the largest Power-of-Two Factor that a channel may have; 0 is one step for all."]) + "\n"


def draw(cells: Sequence[Row], path: Path) -> None:
    """top-1 over K with the 95 % interval of its difference to float, a line a model, as SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for number, model in enumerate(dict.fromkeys(cell.model for cell in cells)):
        chosen = [cell for cell in cells if cell.model == model]
        exact = next(cell.top1 for cell in chosen if cell.runs == "float")
        swept = [cell for cell in chosen if cell.runs != "float"]
        tops = [cell.top1 for cell in swept]
        below = [cell.against_float.difference - cell.against_float.low for cell in swept]
        above = [cell.against_float.high - cell.against_float.difference for cell in swept]
        axes.errorbar(
            [_k(cell) or 0 for cell in swept], tops, (below, above), marker="o", capsize=3, color=f"C{number}", label=model
        )
        axes.axhline(exact, linestyle=":", color=f"C{number}", label=f"{model}, float")
    axes.set(xlabel="largest Power-of-Two Factor K", ylabel="top-1, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})
