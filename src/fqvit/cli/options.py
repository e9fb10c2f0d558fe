"""Options and arguments that several commands share, and the choices that an option may have.

A command lists each option as a parameter; StudyOptions stands for those that `table`, `ablate` and `sweep-k` have in common.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer


class Backend(StrEnum):
    native = "native"
    reference = "reference"
    onnx = "onnx"


class DetectorBackend(StrEnum):
    native = "native"
    reference = "reference"


class ExportKind(StrEnum):
    onnx = "onnx"
    qdq = "qdq"
    c = "c"
    vectors = "vectors"


class QdqTarget(StrEnum):
    ort = "ort"
    openvino = "openvino"
    tensorrt = "tensorrt"


class QdqAttention(StrEnum):
    log2 = "log2"
    uniform = "uniform"


class Features(StrEnum):
    tokens = "tokens"
    pooled = "pooled"


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Program = Annotated[Path, typer.Argument(metavar="FILE.fqvit", show_default=False)]
Weights = Annotated[str | None, typer.Option(metavar="FILE|hf:ORG/NAME", help="Checkpoint of the float model.")]
Classes = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Class names, one a line; or JSON: a list of them or of [id, name] pairs.")
]
Calib = Annotated[
    Path | None, typer.Option(metavar="DIR|TAR", help="Images for calibration, a folder or tar shards; no labels.")
]
Data = Annotated[Path | None, typer.Option(metavar="DIR|TAR", help="Test images, one sub-folder a class, or tar shards.")]
Limit = Annotated[int | None, typer.Option(metavar="N", help="At most so many images, spread evenly.")]
CalibrationImages = Annotated[int | None, typer.Option(metavar="N", help="At most so many calibration images.")]
Recipe = Annotated[str | None, typer.Option(metavar="NAME|FILE.toml", help="How to quantize; default fqvit.")]
Bits = Annotated[str | None, typer.Option(metavar="W/A/ATTN", help="Bit widths, such as 8/8/4.")]
ProgramOut = Annotated[Path | None, typer.Option("--out", "-o", metavar="OUT.fqvit", help="Default: MODEL.fqvit here.")]
Device = Annotated[str, typer.Option(metavar="cpu|cuda|mps", help="Where the float model runs.")]

# fqvit table | ablate | sweep-k
OneModel = Annotated[str | None, typer.Argument(metavar="MODEL", help="One model; or several by --models.")]
Models = Annotated[
    list[str] | None, typer.Option(metavar="NAME=FILE,...", help="Models and their checkpoints; default: the embedded ones.")
]
CellCache = Annotated[
    Path | None, typer.Option("--cache", metavar="DIR", help="Where finished cells are kept; default ~/.cache/fqvit/cells.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Do finished cells again.")]
TableOut = Annotated[list[Path] | None, typer.Option("--out", "-o", metavar="FILE", help="Also to .md, .csv or .json.")]
FigureOut = Annotated[list[Path] | None, typer.Option("--out", "-o", metavar="FILE", help="Also to .md, .csv, .json or .svg.")]

# fqvit detect
DetectorWeights = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Checkpoint of the float detector: .pth or .safetensors.")
]
DetectorSettings = Annotated[
    Path | None,
    typer.Option(metavar="FILE.toml|FILE.json", help="What weights do not tell: image size, anchors, thresholds, class names."),
]
RunBy = Annotated[DetectorBackend | None, typer.Option(help="What runs the program; default native. The bits are the same.")]
Threads = Annotated[int | None, typer.Option(metavar="N", help="Default: every core.")]


@dataclass(frozen=True)
class StudyOptions:
    """What `table`, `ablate` and `sweep-k` are given alike."""

    models: Models = None
    weights: Weights = None
    calib: Calib = None
    data: Data = None
    classes: Classes = None
    limit: Limit = None
    images: CalibrationImages = None
    cache: CellCache = None
    fresh: Fresh = False
    device: Device = "cpu"


def one_option_per_field(function: Callable[..., None]) -> Callable[..., None]:
    """Give typer one option per field where a parameter of `function` is a dataclass. Typer itself has no groups of options."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            kinds = get_type_hints(groups[name], include_extras=True)
            parameters += [_keyword(field.name, field.default, kinds[field.name]) for field in fields(groups[name])]
        else:
            parameters.append(_keyword(name, parameter.default, hints[name]))

    @functools.wraps(function)
    def flat(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        function(**given)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _keyword(name: str, default: object, kind: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
