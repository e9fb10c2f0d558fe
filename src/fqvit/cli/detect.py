"""Define the commands of `fqvit detect`: one function per command, as in app.py."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Literal

import typer

from fqvit.cli import guard
from fqvit.cli.options import (
    Annotations,
    Bits,
    CalibrationImages,
    DetectorBackend,
    DetectorCalib,
    DetectorData,
    DetectorRuntime,
    DetectorSettings,
    DetectorStudyOptions,
    DetectorWeights,
    EveryBits,
    Json,
    Limit,
    MaxSize,
    Methods,
    Program,
    ProgramOut,
    Recipe,
    TableOut,
    Threads,
    one_option_per_field,
)
from fqvit.system.hub import local_program

app = typer.Typer(
    help="Quantize and run object detectors. Supports Mask R-CNN and Cascade Mask R-CNN with Swin backbones.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
command = functools.partial(guard.command, app)


BACKENDS: dict[DetectorBackend | None, Literal["native", "reference"] | None] = {
    None: None,
    DetectorBackend.native: "native",
    DetectorBackend.reference: "reference",
}


@command("quantize")
def quantize(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="mask_rcnn or cascade_mask_rcnn. Default: recognized from the weights."),
    ] = None,
    weights: DetectorWeights = None,
    settings: DetectorSettings = None,
    calib: DetectorCalib = None,
    images: CalibrationImages = None,
    recipe: Recipe = None,
    bits: Bits = None,
    max_loss: Annotated[
        float | None,
        typer.Option(
            metavar="POINTS", help="Recipe auto: largest expected loss of classification accuracy, in percentage points."
        ),
    ] = None,
    max_size: MaxSize = None,
    out: ProgramOut = None,
    as_json: Json = False,
) -> None:
    """Quantize a float detector to an integer-only program."""
    from fqvit.cli.commands import detect_quantize

    detect_quantize.run(model, weights, settings, calib, images, recipe, bits, max_loss, max_size, out, as_json)


@command("eval")
def evaluate(
    file: Annotated[
        Path | None,
        typer.Argument(
            parser=local_program, metavar="FILE.fqvit", help="Quantized detector. Or pass --weights.", show_default=False
        ),
    ] = None,
    weights: DetectorWeights = None,
    settings: DetectorSettings = None,
    data: DetectorData = None,
    annotations: Annotations = None,
    limit: Limit = None,
    backend: DetectorRuntime = None,
    threads: Threads = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE.json", help="Also write the detections as COCO results.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the COCO average precision of boxes and masks. Accepts a program or a float detector."""
    from fqvit.cli.commands import detect_eval

    detect_eval.run(
        file,
        weights=weights,
        settings=settings,
        data=data,
        annotations=annotations,
        limit=limit,
        backend=BACKENDS[backend],
        threads=threads,
        out=out,
        as_json=as_json,
    )


@command("predict")
def predict(
    file: Program,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE|DIR...", help="Image files or folders.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE.json", help="Write COCO results with masks to this file.")
    ] = None,
    score: Annotated[float | None, typer.Option(metavar="X", help="Omit detections with a lower score.")] = None,
    backend: DetectorRuntime = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Detect objects in images: boxes, classes, scores and masks."""
    from fqvit.cli.commands import detect_predict

    detect_predict.run(file, images, out, score, BACKENDS[backend], threads, as_json)


@command("draw")
def draw(
    file: Annotated[
        Path | None,
        typer.Argument(
            parser=local_program, metavar="FILE.fqvit", help="Quantized detector. Or pass --results.", show_default=False
        ),
    ] = None,
    images: Annotated[
        list[Path] | None, typer.Argument(metavar="IMAGE|DIR...", help="Image files or folders.", show_default=False)
    ] = None,
    results: Annotated[Path | None, typer.Option(metavar="FILE.json", help="File written by predict or eval.")] = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the images in the results.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder for the drawn images.")] = None,
    score: Annotated[float, typer.Option(metavar="X", help="Omit detections with a lower score.")] = 0.3,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Draw detections into images. Writes one PNG per image, with boxes, masks, class names and scores."""
    from fqvit.cli.commands import detect_draw

    detect_draw.run(file, images or [], results, data, out, score, threads, as_json)


@command("table")
@one_option_per_field
def table(
    methods: Methods = None,
    bits: EveryBits = None,
    *,
    options: DetectorStudyOptions,
    out: TableOut = None,
    as_json: Json = False,
) -> None:
    """Compare the average precision of quantization methods. Also lists float and published results. Results are cached."""
    from fqvit.cli.commands import detect_table

    detect_table.run(methods, bits, options, out or [], as_json)
