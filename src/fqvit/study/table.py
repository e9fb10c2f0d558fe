"""Make rows of a table from cells, and format them as Markdown and CSV.

A cell is one model evaluated with one method. See also: cells.py (runs the cells).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from fqvit.errors import FqvitError
from fqvit.evaluate.pairs import Pair, pair
from fqvit.study.cells import CellResult
from fqvit.study.methods import Method
from fqvit.study.published import published

NAMES = {
    "float": "float",
    "minmax": "MinMax",
    "ema": "EMA",
    "percentile": "Percentile",
    "omse": "OMSE",
    "partial": "MinMax, partial",
    "bit-split": "Bit-Split",
    "ptq-vit": "PTQ for ViT",
    "ptq4vit": "PTQ4ViT",
    "repq-vit": "RepQ-ViT",
    "fq-vit": "FQ-ViT",
    "fq-vit-8": "FQ-ViT",
    "fq-vit-original": "FQ-ViT, original code's choices",
}


class Row(msgspec.Struct, frozen=True):
    """One cell: accuracies in percent, and the top-1 difference from float on the same images, with a 95 % confidence interval.

    runs: as in Method. agreement: percent of images with the float model's best class. published: the paper's top-1 on 50,000
    images; None if the paper has none.
    """

    model: str
    method: str
    bits: str
    runs: str
    calibration_images: int
    images: int
    top1: float
    top5: float
    agreement: float
    against_float: Pair
    published: float | None
    file_bytes: int
    fingerprint: str
    calibration_seconds: float
    seconds: float


def row(model: str, method: Method, result: CellResult, exact: CellResult) -> Row:
    """Make a row. exact: the cell of the float model. Raises FqvitError if the two cells skipped different images."""
    ranks = result.ranked()
    if result.skipped != exact.skipped:
        raise FqvitError(
            f"skipped images: {len(result.skipped)} with {method.label} and {len(exact.skipped)} with the float model,"
            " expected the same images. Measure both again (--fresh)."
        )
    return Row(
        model,
        method.label,
        method.bits,
        method.runs,
        result.calibration_images,
        len(ranks),
        100 * float((ranks < 1).mean()),
        100 * float((ranks < 5).mean()),
        100 * float((result.predicted() == exact.predicted()).mean()),
        pair(exact.ranked() == 0, ranks == 0),
        published(model, "float" if method.recipe is None else method.recipe.name, method.bits),
        result.file_bytes,
        result.fingerprint,
        round(result.calibration_seconds, 1),
        round(result.seconds, 1),
    )


class Labelled(Protocol):
    """The fields of a row that determine its display name."""

    @property
    def method(self) -> str: ...
    @property
    def bits(self) -> str: ...
    @property
    def runs(self) -> str: ...


def name_of(row: Labelled) -> str:
    """Return the display name, without the bits of a label such as `fq-vit@8/8/8`: they have a separate column."""
    stem = row.method.removesuffix(f"@{row.bits}")
    name = NAMES.get(stem, stem)
    return f"{name} *" if row.runs == "simulation" else name


def difference(p: Pair) -> str:
    """Format a difference with its interval: -0.4 [-1.5, +0.6]"""
    return f"{p.difference:+.1f} [{p.low:+.1f}, {p.high:+.1f}]"


def markdown(rows: Sequence[Row]) -> str:
    """Format one table per model; with several models, an overview of all of them comes first."""
    models = list(dict.fromkeys(row.model for row in rows))
    parts = [_overview(rows, models)] if len(models) > 1 else []
    parts += [_model(model, [row for row in rows if row.model == model]) for model in models]
    notes = [
        "top-1 in percent; against float: difference in percentage points on the same images, with a 95 % interval;"
        " agreement: percent of images with the float model's best class."
    ]
    if any(row.published is not None for row in rows):
        notes.append("Published: on 50,000 images.")
    if any(row.runs == "simulation" for row in rows):
        notes.append("\\* simulated in float: the recipe has no integer program.")
    return "\n\n".join([*parts, " ".join(notes)]) + "\n"


def _overview(rows: Sequence[Row], models: list[str]) -> str:
    methods = {row.method: row for row in rows}  # any row of a method will do: all have the same name and bits
    cells = {(row.method, row.model): row for row in rows}
    body = []
    for label, any_row in methods.items():
        found = [cells.get((label, model)) for model in models]
        body.append([name_of(any_row), any_row.bits, *("" if row is None else _with_published(row) for row in found)])
    known = any(row.published is not None for row in rows)
    return grid(["top-1 (published)" if known else "top-1", "W/A/Attn", *models], body, 2)


def _with_published(row: Row) -> str:
    return f"{row.top1:.1f}" if row.published is None else f"{row.top1:.1f} ({row.published:.2f})"


def _model(model: str, rows: Sequence[Row]) -> str:
    known = any(row.published is not None for row in rows)
    head = ["method", "W/A/Attn", "top-1", "against float", "agreement", "top-5", *(["published"] if known else [])]
    body = []
    for row in rows:
        is_float = row.runs == "float"
        cells = [name_of(row), row.bits, f"{row.top1:.1f}", "" if is_float else difference(row.against_float)]
        cells += ["" if is_float else f"{row.agreement:.1f}", f"{row.top5:.1f}"]
        if known:
            cells.append("" if row.published is None else f"{row.published:.2f}")
        body.append(cells)
    return f"{title_of(rows)}\n\n{grid(head, body, 2)}"


class Calibrated(Protocol):
    """The fields of a row that determine the title of its table."""

    @property
    def model(self) -> str: ...
    @property
    def images(self) -> int: ...
    @property
    def calibration_images(self) -> int: ...


def title_of(rows: Sequence[Calibrated]) -> str:
    """Return the title of one model's table: its name and the numbers of test and calibration images."""
    calibrated = max(row.calibration_images for row in rows)
    return f"**{rows[0].model}**, {rows[0].images:,} images" + (f", calibrated on {calibrated:,}" if calibrated else "")


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """Format a Markdown table whose columns also line up as plain text. left: number of left-aligned columns."""
    # Names of recipes may contain line breaks and bars.
    every = [[" ".join(cell.split()).replace("|", "\\|") for cell in cells] for cells in (head, *rows)]
    widths = [max(3, *(len(row[i]) for row in every)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths)))
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 2) if i < left else "-" * (w + 1) + ":" for i, w in enumerate(widths))
    return "\n".join([line(every[0]), f"|{rule}|", *(line(row) for row in every[1:])])


def flat(row: Row) -> dict[str, object]:
    """Return a row as one flat dict, for CSV: the fields of `against_float` become separate columns."""
    fields: dict[str, object] = msgspec.to_builtins(row)
    pair = fields.pop("against_float")
    assert isinstance(pair, dict)
    pair.pop("images")
    return {**fields, **pair}


def as_csv(rows: Sequence[Mapping[str, object]]) -> str:
    """Format rows that all have the same keys as CSV; floats are rounded to three decimals."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()} for row in rows
    )
    return text.getvalue()


def read_csv(text: str) -> list[Row]:
    """Read rows that as_csv wrote. Additional columns, such as those of `ablate`, `sweep-k` and benchmarks/, are ignored."""
    names = {field.name for field in msgspec.structs.fields(Row)} - {"against_float"}
    pair_names = [field.name for field in msgspec.structs.fields(Pair)]
    found = []
    for line in csv.DictReader(io.StringIO(text)):
        fields: dict[str, object] = {name: value for name, value in line.items() if name in names}
        fields["published"] = line["published"] or None
        fields["against_float"] = {name: line[name] for name in pair_names}
        found.append(msgspec.convert(fields, Row, strict=False))
    return found
