"""The figure of accuracy against file size shows every measured program and the Pareto front."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from fqvit.errors import FqvitError
from fqvit.report.pareto import Measured, front, read_rows, size_accuracy

POINTS = [
    Measured("a", "8/8/4", 71.0, 6_000_000),
    Measured("b", "4/8/4", 69.0, 3_500_000),
    Measured("c", "6/6/4", 68.0, 4_700_000),  # larger and worse than b
    Measured("d", "8/8/8", 71.0, 6_100_000),  # larger than a, not better
    Measured("mine", "8/8/4", 70.0, 4_600_000, own=True),
]


def test_the_pareto_front_has_the_programs_that_no_other_program_beats() -> None:
    assert [point.method for point in front(POINTS)] == ["b", "mine", "a"]
    assert front([]) == []


def test_the_figure_has_one_named_dot_per_program_and_the_float_model() -> None:
    drawn = size_accuracy(POINTS, 71.1, "1,000 images")
    root = ElementTree.fromstring(drawn)
    circles = [shape for shape in root if shape.tag.endswith("circle")]
    words = ["".join(shape.itertext()) for shape in root if shape.tag.endswith("text")]
    assert len(circles) == len(POINTS) and {point.title for point in POINTS} <= set(words) and "float 71.1" in words
    kinds = sorted(shape.attrib["class"] for shape in circles)
    assert kinds == ["dot", "dot", "dot-warm", "ring", "ring"]
    assert "b 4/8/4 69.0 percent at 3.50 MB" in root.attrib["aria-label"] and "c 6/6/4" not in root.attrib["aria-label"]
    assert "float" not in size_accuracy(POINTS[:1], None, "one")


def test_only_integer_programs_of_the_given_model_are_read(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(
        "model,method,bits,runs,top1,file_bytes\nm,float,32/32/32,float,71.1,0\nm,fqvit,8/8/4,integer,71.4,6000000\n"
        "m,ptq,8/8/8,simulation,70.0,0\nother,fqvit,8/8/4,integer,9.0,1\n"
    )
    assert read_rows(path, "m") == ([Measured("fqvit", "8/8/4", 71.4, 6_000_000)], 71.1)
    assert read_rows(path, "nobody") == ([], None)
    with pytest.raises(FqvitError, match="missing.csv: cannot be read"):
        read_rows(tmp_path / "missing.csv", "m")
    path.write_text("model,bits\n1,2\n")
    with pytest.raises(FqvitError, match=r"table.csv: expected the columns model, method"):
        read_rows(path, "m")
    path.write_text("model,method,bits,runs,top1,file_bytes\nm,fqvit,8/8/4,integer,much,6000000\n")
    with pytest.raises(FqvitError, match="is not a number"):
        read_rows(path, "m")
