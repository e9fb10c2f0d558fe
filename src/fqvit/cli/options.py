"""Define the options and arguments that several commands share, and the choices of options.

A command has one parameter per option. StudyOptions stands for the ten options that `table`, `ablate` and `sweep-k` share,
Settings for those that describe a bare state dict.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from fqvit.cli.groups import complete_model, complete_recipe
from fqvit.errors import FqvitError
from fqvit.system.hub import local_program


class Backend(StrEnum):
    native = "native"
    reference = "reference"
    onnx = "onnx"


class DetectorBackend(StrEnum):
    native = "native"
    reference = "reference"


class EmbeddingKind(StrEnum):
    parquet = "parquet"
    safetensors = "safetensors"


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


class Pool(StrEnum):
    token = "token"
    avg = "avg"
    token_avg = "token_avg"
    map = "map"
    none = "none"


class Activation(StrEnum):
    gelu = "gelu"
    gelu_tanh = "gelu_tanh"
    quick_gelu = "quick_gelu"


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Program = Annotated[
    Path,
    typer.Argument(
        parser=local_program,
        metavar="FILE.fqvit",
        help="Quantized program, also on the hub: hf:ORG/NAME or hf:ORG/NAME/FILE.fqvit@REVISION.",
        show_default=False,
    ),
]
ModelOrPath = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Name, checkpoint file, folder or hf:ORG/NAME. Default: fmnist_vit.",
        autocompletion=complete_model,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(metavar="FILE|DIR|hf:ORG/NAME", help="Checkpoint of the float model, or a folder with config.json."),
]
Size = Annotated[
    str | None, typer.Option(metavar="N|HxW", help="Image size, if not that of the checkpoint: pixels, or height x width.")
]
Classes = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Class names: text with one per line, or a JSON list of names or of [id, name] pairs."),
]
OutputNames = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Outputs, separated by commas: logits, embedding, class, mean, tokens. class@9: after block 9. "
        "Suffixes: :u8 :u16 :i32 (type), :l2 (unit length), :sign (one bit per channel).",
    ),
]
Calib = Annotated[
    Path | None,
    typer.Option(metavar="DIR|TAR|PARQUET", help="Calibration images without labels: a folder, tar or Parquet files."),
]
Data = Annotated[
    Path | None,
    typer.Option(metavar="DIR|TAR|PARQUET", help="Test images: a folder with one sub-folder per class, tar or Parquet files."),
]
Limit = Annotated[int | None, typer.Option(metavar="N", help="Use at most N images, evenly spaced.")]
CalibrationImages = Annotated[int | None, typer.Option(metavar="N", help="Use at most N calibration images, evenly spaced.")]
Recipe = Annotated[
    str | None,
    typer.Option(metavar="NAME|FILE.toml", help="Quantization recipe. Default: fqvit.", autocompletion=complete_recipe),
]
Bits = Annotated[
    str | None, typer.Option(metavar="W/A/ATTN", help="Bit widths of weights, activations and attention, such as 8/8/4.")
]
ProgramOut = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="OUT.fqvit", help="Output file. Default: MODEL.fqvit in the current folder."),
]
OneOutput = Annotated[
    str | None, typer.Option(metavar="NAME", help="Output of the program. Default: the first one that is an embedding.")
]
ZeroShot = Annotated[
    Path | None,
    typer.Option(metavar="FILE.npz", help="Text embeddings as classes: arrays embeddings [classes, C] and names [classes]."),
]
Device = Annotated[str, typer.Option(metavar="cpu|cuda|mps", help="Device of the float model.")]

# Settings that cannot be derived from a state dict without a config or a known name.
Heads = Annotated[int | None, typer.Option(metavar="N", help="Number of heads, if neither config nor name determines it.")]
PoolChoice = Annotated[Pool | None, typer.Option("--pool", help="Pooling, if neither config nor name determines it.")]
ActivationChoice = Annotated[
    Activation | None, typer.Option("--activation", help="Activation of the MLPs, if neither config nor name determines it.")
]

# Options of fqvit table, detect table, ablate and sweep-k.
Methods = Annotated[
    str | None,
    typer.Option(metavar="NAME[@W/A/ATTN],...", help="Recipes or .toml files. Default: the paper's methods and fqvit."),
]
EveryBits = Annotated[
    str | None, typer.Option("--bits", metavar="W/A/ATTN,...", help="Run every method at each of these bit widths.")
]
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
DetectorCalib = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of calibration images without labels.")]
DetectorData = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the images.")]
Annotations = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="COCO instances file. Default: instances.json in the folder of --data.")
]


@dataclass(frozen=True)
class Settings:
    """Settings that cannot be derived from a bare state dict."""

    heads: Heads = None
    pool: PoolChoice = None
    activation: ActivationChoice = None

    def given(self) -> dict[str, Any]:
        """Return the settings that were given, as arguments of load_model."""
        pool, activation = (None if choice is None else choice.value for choice in (self.pool, self.activation))
        found = {"heads": self.heads, "pool": pool, "activation": activation}
        return {name: value for name, value in found.items() if value is not None}


def parse_size(text: str) -> tuple[int, int]:
    """Parse the value of --size: height and width."""
    match = re.fullmatch(r"([1-9]\d{0,3})(?:x([1-9]\d{0,3}))?", text)
    if match is None:
        raise FqvitError(f"--size {text}: expected pixels, such as 224, or height x width, such as 224x320.")
    return int(match[1]), int(match[2] or match[1])


@dataclass(frozen=True)
class SettingsAndSize(Settings):
    """Settings of a bare state dict, and the image size."""

    size: Size = None

    def given(self) -> dict[str, Any]:
        if self.size is None:
            return super().given()
        return super().given() | {"size": parse_size(self.size)}


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


@dataclass(frozen=True)
class DetectorStudyOptions:
    """The options of `detect table`, except the methods and the outputs."""

    weights: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]FILE,...", help="Checkpoints of float detectors, .pth or .safetensors.")
    ] = None
    settings: DetectorSettings = None
    calib: DetectorCalib = None
    data: DetectorData = None
    annotations: Annotations = None
    limit: Limit = None
    images: CalibrationImages = None
    cache: CellCache = None
    fresh: Fresh = False
    threads: Threads = None


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


MaxSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Largest file that recipe auto may write, such as 4.5MB or 4500000.")
]
SaveRecipe = Annotated[
    Path | None,
    typer.Option(metavar="FILE.toml", help="Also save the recipe, with all bit widths that auto chose, for use with --recipe."),
]
MeasuredTable = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.csv", help="Also plot accuracy against size for the programs in this results file of `fqvit table`."
    ),
]
