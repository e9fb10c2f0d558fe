"""Make rows of a table of detectors from cells, and format them as Markdown: the paper's Table 2.

See also: detector_cells.py (runs the cells), table.py (classifiers).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fqvit.models.config import DetectorConfig
from fqvit.study.detector_cells import DetectorBench, DetectorResult
from fqvit.study.methods import Method
from fqvit.study.published import published_box_ap
from fqvit.study.table import grid, name_of, title_of

# Released Swin backbones: {(width, depths): name}
BACKBONES: dict[tuple[int, tuple[int, ...]], str] = {
    (96, (2, 2, 6, 2)): "swin_tiny",
    (96, (2, 2, 18, 2)): "swin_small",
    (128, (2, 2, 18, 2)): "swin_base",
}
COCO_CLASSES = 80


class DetectorRow(msgspec.Struct, frozen=True):
    """One cell: average precisions in percent; None if the annotations have no such objects or no masks.

    detector: architecture and, if known, backbone   runs: as in Method   published: the paper's box AP on COCO val2017; None if
    the paper has none
    """

    model: str
    detector: str
    method: str
    bits: str
    runs: str
    calibration_images: int
    images: int
    box_ap: float | None
    box_ap50: float | None
    box_ap75: float | None
    mask_ap: float | None
    mask_ap50: float | None
    mask_ap75: float | None
    box_against_float: float | None
    mask_against_float: float | None
    published: float | None
    detections: int
    file_bytes: int
    fingerprint: str
    calibration_seconds: float
    seconds: float


def architecture(name: str, config: DetectorConfig) -> str:
    """Return the name of a detector with its backbone, such as mask_rcnn_swin_small, if the backbone is a released Swin."""
    backbone = BACKBONES.get((config.backbone.width, config.backbone.depths))
    return name if backbone is None else f"{name}_{backbone}"


def row(bench: DetectorBench, method: Method, result: DetectorResult, exact: DetectorResult) -> DetectorRow:
    """Make a row. exact: the cell of the float detector"""
    config = bench.detector.module.config
    detector = architecture(bench.detector.name, config)
    recipe = "float" if method.recipe is None else method.recipe.name
    return DetectorRow(
        bench.name,
        detector,
        method.label,
        method.bits,
        method.runs,
        result.calibration_images,
        result.images,
        result.scores["box_ap"],
        result.scores["box_ap50"],
        result.scores["box_ap75"],
        result.scores["mask_ap"],
        result.scores["mask_ap50"],
        result.scores["mask_ap75"],
        _difference(result.scores["box_ap"], exact.scores["box_ap"]),
        _difference(result.scores["mask_ap"], exact.scores["mask_ap"]),
        published_box_ap(detector, recipe, method.bits) if config.classes == COCO_CLASSES else None,
        result.detections,
        result.file_bytes,
        result.fingerprint,
        round(result.calibration_seconds, 1),
        round(result.seconds, 1),
    )


def _difference(value: float | None, exact: float | None) -> float | None:
    return None if value is None or exact is None else value - exact


def markdown(rows: Sequence[DetectorRow]) -> str:
    """Format one table per detector; with several detectors, an overview of all of them comes first."""
    models = list(dict.fromkeys(row.model for row in rows))
    parts = [_overview(rows, models)] if len(models) > 1 else []
    parts += [_model([row for row in rows if row.model == model]) for model in models]
    notes = "Average precision (AP) in percent, over IoU thresholds from 0.5 to 0.95; AP50: at 0.5. Against float: AP points."
    if any(row.published is not None for row in rows):
        notes += " Published: box AP on COCO val2017, 5,000 images."
    return "\n\n".join([*parts, notes]) + "\n"


def _overview(rows: Sequence[DetectorRow], models: Sequence[str]) -> str:
    methods = {row.method: row for row in rows}
    cells = {(row.method, row.model): row for row in rows}
    known = any(row.published is not None for row in rows)
    body = []
    for label, any_row in methods.items():
        found = [cells.get((label, model)) for model in models]
        body.append([name_of(any_row), any_row.bits, *("" if row is None else _pair(row) for row in found)])
    return grid(["box AP / mask AP (published box AP)" if known else "box AP / mask AP", "W/A/Attn", *models], body, 2)


def _pair(row: DetectorRow) -> str:
    text = f"{_text(row.box_ap)} / {_text(row.mask_ap)}"
    return text if row.published is None else f"{text} ({row.published:.1f})"


def _model(rows: Sequence[DetectorRow]) -> str:
    known = any(row.published is not None for row in rows)
    head = ["method", "W/A/Attn", "box AP", "mask AP", "against float", "box AP50", "mask AP50", "MB"]
    body = []
    for row in rows:
        is_float = row.runs == "float"
        against = f"{_signed(row.box_against_float)} / {_signed(row.mask_against_float)}"
        cells = [name_of(row), row.bits, _text(row.box_ap), _text(row.mask_ap), "" if is_float else against]
        cells += [_text(row.box_ap50), _text(row.mask_ap50), "" if is_float else f"{row.file_bytes / 1e6:.1f}"]
        if known:
            cells.append(_text(row.published, ""))
        body.append(cells)
    return f"{title_of(rows)}\n\n{grid([*head, *(['published box AP'] if known else [])], body, 2)}"


def _text(value: float | None, absent: str = "-") -> str:
    return absent if value is None else f"{value:.1f}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f}"
