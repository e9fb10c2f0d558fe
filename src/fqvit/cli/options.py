"""Define the options and arguments that several commands share, and the choices of options.

A command has one parameter per option. StudyOptions stands for the ten options that `table`, `ablate` and `sweep-k` share.
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
Program = Annotated[Path, typer.Argument(metavar="FILE.fqvit", help="Quantized program.", show_default=False)]
Weights = Annotated[str | None, typer.Option(metavar="FILE|hf:ORG/NAME", help="Checkpoint of the float model.")]
Classes = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Class names: text with one per line, or a JSON list of names or of [id, name] pairs."),
]
Calib = Annotated[
    Path | None, typer.Option(metavar="DIR|TAR", help="Calibration images without labels: a folder or tar shards.")
]
Data = Annotated[
    Path | None,
    typer.Option(metavar="DIR|TAR", help="Test images: a folder with one sub-folder per class, or tar shards."),
]
Limit = Annotated[int | None, typer.Option(metavar="N", help="Use at most N images, evenly spaced.")]
CalibrationImages = Annotated[int | None, typer.Option(metavar="N", help="Use at most N calibration images, evenly spaced.")]
Recipe = Annotated[str | None, typer.Option(metavar="NAME|FILE.toml", help="Quantization recipe. Default: fqvit.")]
Bits = Annotated[
    str | None, typer.Option(metavar="W/A/ATTN", help="Bit widths of weights, activations and attention, such as 8/8/4.")
]
ProgramOut = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="OUT.fqvit", help="Output file. Default: MODEL.fqvit in the current folder."),
]
Device = Annotated[str, typer.Option(metavar="cpu|cuda|mps", help="Device of the float model.")]

# Options of fqvit table, ablate and sweep-k.
OneModel = Annotated[str | None, typer.Argument(metavar="MODEL", help="A single model. Use --models for several.")]
Models = Annotated[
    list[str] | None, typer.Option(metavar="NAME=FILE,...", help="Models and their checkpoints. Default: the embedded models.")
]
CellCache = Annotated[
    Path | None, typer.Option("--cache", metavar="DIR", help="Folder for finished cells. Default: ~/.cache/fqvit/cells.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Recompute finished cells.")]
TableOut = Annotated[
    list[Path] | None,
    typer.Option("--out", "-o", metavar="FILE", help="Also write the results to a .md, .csv or .json file. Repeatable."),
]
FigureOut = Annotated[
    list[Path] | None,
    typer.Option("--out", "-o", metavar="FILE", help="Also write the results to a .md, .csv, .json or .svg file. Repeatable."),
]

# Options of fqvit detect.
DetectorWeights = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Checkpoint of the float detector, .pth or .safetensors.")
]
DetectorSettings = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.toml|FILE.json",
        help="Settings that a checkpoint does not contain: image size, anchors, thresholds, class names.",
    ),
]
DetectorRuntime = Annotated[
    DetectorBackend | None, typer.Option(help="Runtime of the program. Default: native. Both give the same bits.")
]
Threads = Annotated[int | None, typer.Option(metavar="N", help="Number of threads. Default: all cores.")]


@dataclass(frozen=True)
class StudyOptions:
    """The options that `table`, `ablate` and `sweep-k` share."""

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
    """Give typer one option per field if a parameter of `function` is a dataclass. Typer itself has no option groups."""
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
