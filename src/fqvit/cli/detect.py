"""`fqvit detect ...` on the command line: one function a command, each only its options. Neighbour: cli.py."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Literal

import typer

from fqvit.cli import guard
from fqvit.cli.options import (
    Bits,
    DetectorBackend,
    DetectorSettings,
    DetectorWeights,
    Json,
    Limit,
    Program,
    ProgramOut,
    Recipe,
    RunBy,
    Threads,
)

app = typer.Typer(
    help="Detectors as integer-only programs. Boxes, classes and masks of Swin Mask R-CNN and Cascade Mask R-CNN.",
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
        str | None, typer.Argument(metavar="MODEL", help="mask_rcnn or cascade_mask_rcnn; default: what the weights are.")
    ] = None,
    weights: DetectorWeights = None,
    settings: DetectorSettings = None,
    calib: Annotated[Path | None, typer.Option(metavar="DIR", help="Images for calibration; no labels.")] = None,
    images: Annotated[int | None, typer.Option(metavar="N", help="At most so many of them, spread evenly.")] = None,
    recipe: Recipe = None,
    bits: Bits = None,
    out: ProgramOut = None,
    as_json: Json = False,
) -> None:
    """Turn a float detector's checkpoint into an integer-only one."""
    from fqvit.cli.commands import detect_quantize

    detect_quantize.run(model, weights, settings, calib, images, recipe, bits, out, as_json)


@command("eval")
def evaluate(
    file: Annotated[Path | None, typer.Argument(metavar="FILE.fqvit", help="Or --weights.", show_default=False)] = None,
    weights: DetectorWeights = None,
    settings: DetectorSettings = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the images.")] = None,
    annotations: Annotated[Path | None, typer.Option(metavar="FILE.json", help="COCO's instances file.")] = None,
    limit: Limit = None,
    backend: RunBy = None,
    threads: Threads = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE.json", help="Also the results, as COCO's.")] = None,
    as_json: Json = False,
) -> None:
    """Measure COCO's average precision of boxes and masks. Of a program, or of a float detector."""
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
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE|DIR...", show_default=False)],
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE.json", help="As COCO's results, with masks.")] = None,
    score: Annotated[float | None, typer.Option(metavar="X", help="Leave out what scores less.")] = None,
    backend: RunBy = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Find objects in images: boxes, classes, scores and masks."""
    from fqvit.cli.commands import detect_predict

    detect_predict.run(file, images, out, score, BACKENDS[backend], threads, as_json)


@command("draw")
def draw(
    file: Annotated[Path | None, typer.Argument(metavar="FILE.fqvit", help="Or --results.", show_default=False)] = None,
    images: Annotated[list[Path] | None, typer.Argument(metavar="IMAGE|DIR...", show_default=False)] = None,
    results: Annotated[Path | None, typer.Option(metavar="FILE.json", help="What predict or eval wrote.")] = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the images of the results are.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder for the pictures.")] = None,
    score: Annotated[float, typer.Option(metavar="X", help="Leave out what scores less.")] = 0.3,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Draw what is found in images. One PNG each, with boxes, masks, names and scores."""
    from fqvit.cli.commands import detect_draw

    detect_draw.run(file, images or [], results, data, out, score, threads, as_json)
