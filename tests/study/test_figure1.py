"""The bar chart of the ablation is well-formed and has one bar per measured setting, even if settings are missing."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from fqvit.study.ablation import settings
from fqvit.study.cells import CellResult
from fqvit.study.figure1 import draw
from fqvit.study.methods import FLOAT
from fqvit.study.table import Row, as_csv, flat, read_csv, row


def result(right: int) -> CellResult:
    """Return a cell of 100 images with `right` correct predictions."""
    ranks = np.where(np.arange(100) < right, 0, 7).astype("<i4").tobytes()
    return CellResult(1000, 1.0, 1.0, 1, "", ranks, ranks, [])


def cells(model: str, *measured: int) -> list[Row]:
    """Return the float row (80 % top-1) and one row per measured percentage, in the order of settings()."""
    exact = result(80)
    found = [row(model, setting.method, result(right), exact) for setting, right in zip(settings(), measured)]
    return [row(model, FLOAT, exact, exact), *found]


def bars(svg: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(svg.partition("\n")[2])
    assert root.get("role") == "img" and root.get("aria-label")
    return [rect for rect in root.iter() if rect.tag.endswith("rect") and list(rect)]


def test_every_setting_of_every_model_has_a_bar() -> None:
    found = bars(draw([*cells("a", *range(10, 100, 10)), *cells("b", *range(9))]))
    assert len(found) == 2 * len(settings())


def test_the_height_of_a_bar_is_proportional_to_top1() -> None:
    heights = [float(bar.get("height", "nan")) for bar in bars(draw(cells("a", 10, 20, 40)))]
    assert heights[1] / heights[0] == pytest.approx(2, rel=0.02) and heights[2] / heights[0] == pytest.approx(4, rel=0.02)


def test_simulated_settings_look_different_from_integer_programs() -> None:
    kinds = [bar.get("class") for bar in bars(draw(cells("a", *range(9))))]
    assert kinds == ["box" if s.method.runs == "simulation" else "bar" for s in settings()]


def test_settings_that_were_not_measured_are_left_out() -> None:
    assert "no other setting was measured" in draw(cells("a")) and bars(draw(cells("a"))) == []
    assert len(bars(draw(cells("a", 50)))) == 1


def test_model_names_are_escaped() -> None:
    assert len(bars(draw(cells("<script>&", 1, 2)))) == 2


def test_rows_are_restored_from_a_csv_file() -> None:
    every = cells("vit_base_patch16_224", *range(10, 19))
    assert read_csv(as_csv([{**flat(cell), "machine": "any"} for cell in every])) == [rounded(cell) for cell in every]


def rounded(cell: Row) -> Row:
    """Return the row with the three decimals that a CSV file keeps."""
    import msgspec

    fields = msgspec.to_builtins(cell)
    for part in (fields, fields["against_float"]):
        part |= {name: round(value, 3) for name, value in part.items() if isinstance(value, float)}
    return msgspec.convert(fields, Row, strict=False)
