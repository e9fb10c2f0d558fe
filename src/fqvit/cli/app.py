"""Define the command line: one function per command, which declares its options and calls a module of commands/.

Nothing heavy is imported before a command needs it. A user error prints one line to stderr and exits with code 2.
"""

from __future__ import annotations

import functools
import io
import sys
import warnings
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fqvit.cli import deploy, embeddings, guard, study
from fqvit.cli.completion import repair_zsh_script
from fqvit.cli.detect import app as detect_app
from fqvit.cli.groups import GroupedCommands
from fqvit.cli.options import (
    Backend,
    Bits,
    Calib,
    CalibrationImages,
    Classes,
    Data,
    Device,
    Features,
    Json,
    Limit,
    MaxSize,
    MeasuredTable,
    ModelOrPath,
    OneOutput,
    OutputNames,
    Program,
    ProgramOut,
    Recipe,
    SaveRecipe,
    Settings,
    SettingsAndSize,
    Weights,
    ZeroShot,
    one_option_per_field,
)
from fqvit.errors import FqvitError
from fqvit.system.hub import local_program, names_program

app = typer.Typer(
    help="Quantize vision transformers to integer-only programs, and run them.",
    cls=GroupedCommands,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: importing rich would double the time of `fqvit --help`
    pretty_exceptions_enable=False,
)
app.add_typer(detect_app, name="detect")
repair_zsh_script()
command = functools.partial(guard.command, app)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"fqvit {version('fqvit')}")
        raise typer.Exit


@app.callback()
def general(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Handle the options that precede the command."""


def main() -> NoReturn:
    """Parse sys.argv and run the command. Called by __main__.py."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # warnings of libraries are for developers; commands print their own
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may have characters that the terminal lacks
    with guard.one_line_errors():  # each command does this as well; here it is for `--help`
        app(prog_name="fqvit")
    raise AssertionError("typer returned")


@command("models")
def models(as_json: Json = False) -> None:
    """List the known models with their preprocessing, the supported families, and the ops that other models may contain."""
    from fqvit.cli.commands import models as models_command

    models_command.run(as_json)


@command("check")
@one_option_per_field
def check(
    model: ModelOrPath = None,
    weights: Weights = None,
    *,
    settings: SettingsAndSize,
    as_json: Json = False,
) -> None:
    """Check whether a model is supported, and show its preprocessing."""
    from fqvit.cli.commands import check as check_command

    check_command.run(model, weights, settings.given(), as_json)


@command("quantize")
@one_option_per_field
def quantize(
    model: ModelOrPath = None,
    weights: Weights = None,
    calib: Calib = None,
    recipe: Recipe = None,
    bits: Bits = None,
    profile: Annotated[
        str | None, typer.Option(metavar="npu", help="Restrict the recipe to a target. npu: symmetric int8 only.")
    ] = None,
    device: Device = "cpu",
    output: OutputNames = None,
    features: Annotated[Features | None, typer.Option(help="Deprecated: use --output.")] = None,
    images: CalibrationImages = None,
    k: Annotated[int | None, typer.Option(metavar="K", help="Largest exponent of the Power-of-Two Factor, 0 to 8.")] = None,
    max_loss: Annotated[
        float | None, typer.Option(metavar="X", help="Percentage points of top-1 accuracy that recipe auto may lose.")
    ] = None,
    max_size: MaxSize = None,
    classes: Classes = None,
    save_recipe: SaveRecipe = None,
    save_calibration: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Also save the calibration to this file.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Use a saved calibration, including its recipe.")
    ] = None,
    *,
    settings: SettingsAndSize,
    out: ProgramOut = None,
    as_json: Json = False,
) -> None:
    """Quantize a float checkpoint to an integer-only program."""
    from fqvit.cli.commands import quantize as quantize_command

    quantize_command.run(
        model_name=model,
        weights=weights,
        settings=settings.given(),
        calib=calib,
        recipe_name=recipe,
        bits=bits,
        profile=profile,
        device=device,
        outputs=output,
        features=None if features is None else features.value,
        images=images,
        k=k,
        max_loss=max_loss,
        max_size=max_size,
        classes=classes,
        save_recipe=save_recipe,
        save_calibration=save_calibration,
        calibration_file=calibration,
        out=out,
        as_json=as_json,
    )


@command("eval")
@one_option_per_field
def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.fqvit|FILE.onnx|MODEL",
            help="Program, exported program, or float model, also on the hub: hf:ORG/NAME.",
            show_default=False,
        ),
    ],
    weights: Weights = None,
    data: Data = None,
    classes: Classes = None,
    backend: Annotated[Backend | None, typer.Option(help="Runtime of a program. Default: native.")] = None,
    limit: Limit = None,
    device: Device = "cpu",
    knn: Annotated[
        Path | None,
        typer.Option(metavar="DIR|TAR|PARQUET", help="Embeddings: labelled gallery images; the nearest one decides the class."),
    ] = None,
    zero_shot: ZeroShot = None,
    output: OneOutput = None,
    *,
    settings: SettingsAndSize,
    as_json: Json = False,
) -> None:
    """Measure top-1 and top-5 accuracy of a program or float model."""
    if weights is None and names_program(target):
        target = str(local_program(target))
    if knn is not None or zero_shot is not None:
        from fqvit.cli.commands import evaluate_embeddings

        other = "--backend" if backend not in (None, Backend.native) else "--device" if device != "cpu" else None
        evaluate_embeddings.run(
            Path(target), knn, zero_shot, data, classes, output, weights, settings.given(), limit, other, as_json
        )
        return
    from fqvit.cli.commands import evaluate as evaluate_command

    if output is not None:
        raise FqvitError("--output: only with --knn or --zero-shot. Leave it out.")
    runtime = None if backend is None else backend.value
    evaluate_command.run(target, weights, data, classes, runtime, limit, device, settings.given(), as_json)


@command("classify")
def classify(
    file: Program,
    images: Annotated[
        list[Path],
        typer.Argument(
            metavar="IMAGE...|DIR|TAR|PARQUET", help="Image files, a folder, tar or Parquet files.", show_default=False
        ),
    ],
    top: Annotated[int, typer.Option(metavar="N", help="Number of classes per image.")] = 5,
    classes: Classes = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE.csv", help="Write one row per image and class to this file instead."),
    ] = None,
    zero_shot: ZeroShot = None,
    output: OneOutput = None,
    logits: Annotated[
        bool, typer.Option("--logits", help="With --json: add all logits as integers, to compare with other runtimes.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the best classes of each image, with their probabilities."""
    from fqvit.cli.commands import classify as classify_command

    classify_command.run(file, images, classify_command.Wanted(top, classes, out, zero_shot, output, logits, as_json))


command("embed")(embeddings.embed)
command("search")(embeddings.search)


@command("inspect")
def inspect(
    file: Program,
    sites: Annotated[bool, typer.Option("--sites", help="List all quantized sites.")] = False,
    ops: Annotated[bool, typer.Option("--ops", help="List all ops.")] = False,
    proofs: Annotated[bool, typer.Option("--proofs", help="List all overflow proofs.")] = False,
    as_json: Json = False,
) -> None:
    """Show the contents of a program and its overflow proofs."""
    from fqvit.cli.commands import inspect as inspect_command

    inspect_command.run(file, sites, ops, proofs, as_json)


@command("compare")
@one_option_per_field
def compare(
    file: Program,
    weights: Weights = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR|TAR|PARQUET", help="Images without labels: a folder, tar or Parquet files.")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="Use at most N images, evenly spaced.")] = 8,
    baseline: Annotated[
        Path | None, typer.Option(parser=local_program, metavar="FILE.fqvit", help="Also show the gain over this program.")
    ] = None,
    *,
    settings: Settings,
    as_json: Json = False,
) -> None:
    """Compare a program with its float model, site by site; detectors also box by box, embeddings image by image."""
    from fqvit.cli.commands import compare as compare_command

    compare_command.run(file, weights, data, limit, baseline, settings.given(), as_json)


@command("report")
@one_option_per_field
def report(
    file: Program,
    weights: Weights = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR|TAR|PARQUET", help="Images, with or without labels: a folder, tar or Parquet files."),
    ] = None,
    classes: Classes = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Use at most N images, evenly spaced. Default: 1000; detectors: 50.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="OUT.html", help="Output file. Default: named after FILE, in the current folder."),
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write the figures as SVG files to this folder.")
    ] = None,
    table: MeasuredTable = None,
    *,
    settings: Settings,
    as_json: Json = False,
) -> None:
    """Write an HTML report about a program or a detector, with figures."""
    from fqvit.cli.commands import report as report_command

    report_command.run(file, weights, data, classes, limit, out, pictures, table, settings.given(), as_json)


@command("bench")
@one_option_per_field
def bench(
    file: Program,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Other runtimes, separated by commas, or none. Default: torch,onnxruntime,openvino; for detectors torch.",
        ),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="N,...", help="Batch sizes.")] = "1",
    threads: Annotated[str, typer.Option(metavar="N,...", help="Numbers of threads.")] = "1",
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds. Each runtime is measured once per round.")] = 10,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|DIR|hf:ORG/NAME",
            help="Checkpoint for the other runtimes. Default: the embedded weights if the model has any, else random ones.",
        ),
    ] = None,
    image: Annotated[
        Path | None,
        typer.Option(metavar="IMAGE", help="Detectors: photo to measure with. Default: a random image of the largest size."),
    ] = None,
    ops: Annotated[bool, typer.Option("--ops", help="Also show the engine's time per op.")] = False,
    *,
    settings: Settings,
    as_json: Json = False,
) -> None:
    """Measure the time and memory of a program or detector and of other runtimes."""
    from fqvit.cli.commands import bench as bench_command

    bench_command.run(file, against, batch, threads, rounds, weights, settings.given(), image, ops, as_json)


command("export")(deploy.export)
command("web")(deploy.web)
command("serve")(deploy.serve)
command("card")(deploy.card)
command("table")(study.table)
command("ablate")(study.ablate)
command("sweep-k")(study.sweep_k)
command("bitops")(study.bitops)


@command("doctor")
def doctor(as_json: Json = False) -> None:
    """Check the installation. Shows CPU, versions and missing packages, and tests the compiled kernels."""
    from fqvit.cli.commands import doctor as doctor_command

    doctor_command.run(as_json)
