"""The command line: one function a command, each only its options; commands/ has what they do.

Nothing heavy is imported before a command needs it. Mistakes of the user are one line on stderr and exit code 2.
"""

from __future__ import annotations

import functools
import io
import sys
import warnings
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fqvit.cli import guard
from fqvit.cli.detect import app as detect_app
from fqvit.cli.options import (
    Backend,
    Bits,
    Calib,
    CalibrationImages,
    Classes,
    Data,
    Device,
    ExportKind,
    Features,
    FigureOut,
    Json,
    Limit,
    OneModel,
    Program,
    ProgramOut,
    QdqAttention,
    QdqTarget,
    Recipe,
    StudyOptions,
    TableOut,
    Weights,
    one_option_per_field,
)

app = typer.Typer(
    help="Vision transformers as integer-only programs.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: importing rich for it would double the time of `fqvit --help`
    pretty_exceptions_enable=False,
)
app.add_typer(detect_app, name="detect")
command = functools.partial(guard.command, app)


def _say_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"fqvit {version('fqvit')}")
        raise typer.Exit


@app.callback()
def general(
    version: Annotated[bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Options that stand before the command."""


def main() -> NoReturn:
    """Parses the words of the command line and runs their command. __main__.py calls it."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # libraries' warnings are for developers; ours are printed as such
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # class names and paths may have letters that a terminal has not
    with guard.one_line_errors():  # commands have it too; this one is for `--help`
        app(prog_name="fqvit")
    raise AssertionError("typer returned")


@command("models")
def models(as_json: Json = False) -> None:
    """List the models, their sizes and their preprocessing."""
    from fqvit.cli.commands import models as models_command

    models_command.run(as_json)


@command("quantize")
def quantize(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Name or hf:ORG/NAME; default fmnist_vit.")] = None,
    weights: Weights = None,
    calib: Calib = None,
    recipe: Recipe = None,
    bits: Bits = None,
    profile: Annotated[str | None, typer.Option(metavar="npu", help="For chips with symmetric int8 only.")] = None,
    device: Device = "cpu",
    features: Annotated[Features | None, typer.Option(help="Stop at features instead of logits.")] = None,
    images: CalibrationImages = None,
    k: Annotated[int | None, typer.Option(metavar="K", help="Largest Power-of-Two Factor.")] = None,
    max_loss: Annotated[float | None, typer.Option(metavar="X", help="Points of top-1 that recipe auto may lose.")] = None,
    classes: Classes = None,
    save_calibration: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Also save the calibration.")] = None,
    calibration: Annotated[Path | None, typer.Option(metavar="FILE.json", help="A saved one, with its recipe.")] = None,
    out: ProgramOut = None,
    as_json: Json = False,
) -> None:
    """Turn a float checkpoint into an integer-only program."""
    from fqvit.cli.commands import quantize as quantize_command

    quantize_command.run(
        model_name=model,
        weights=weights,
        calib=calib,
        recipe_name=recipe,
        bits=bits,
        profile=profile,
        device=device,
        features=None if features is None else features.value,
        images=images,
        k=k,
        max_loss=max_loss,
        classes=classes,
        save_calibration=save_calibration,
        calibration_file=calibration,
        out=out,
        as_json=as_json,
    )


@command("eval")
def evaluate(
    target: Annotated[str, typer.Argument(metavar="FILE.fqvit|FILE.onnx|MODEL", show_default=False)],
    weights: Weights = None,
    data: Data = None,
    classes: Classes = None,
    backend: Annotated[Backend | None, typer.Option(help="What runs a program; default native.")] = None,
    limit: Limit = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Measure top-1 and top-5 of a program, or of a float model."""
    from fqvit.cli.commands import evaluate as evaluate_command

    evaluate_command.run(
        target,
        weights=weights,
        data=data,
        classes=classes,
        backend=None if backend is None else backend.value,
        limit=limit,
        device=device,
        as_json=as_json,
    )


@command("classify")
def classify(
    file: Program,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", show_default=False)],
    as_json: Json = False,
) -> None:
    """Show the five best classes of images."""
    from fqvit.cli.commands import classify as classify_command

    classify_command.run(file, images, as_json)


@command("inspect")
def inspect(
    file: Program,
    sites: Annotated[bool, typer.Option("--sites", help="List every quantized site.")] = False,
    ops: Annotated[bool, typer.Option("--ops", help="List every op.")] = False,
    proofs: Annotated[bool, typer.Option("--proofs", help="List every overflow proof.")] = False,
    as_json: Json = False,
) -> None:
    """Show what is in a program, and why it cannot overflow."""
    from fqvit.cli.commands import inspect as inspect_command

    inspect_command.run(file, sites, ops, proofs, as_json)


@command("compare")
def compare(
    file: Program,
    weights: Weights = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR|TAR", help="Folder of images, or tar shards; no labels.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="At most so many images, spread evenly.")] = 8,
    baseline: Annotated[Path | None, typer.Option(metavar="FILE.fqvit", help="Also the gain over this program.")] = None,
    as_json: Json = False,
) -> None:
    """Show site by site where a program departs from its float model."""
    from fqvit.cli.commands import compare as compare_command

    compare_command.run(file, weights, data, limit, baseline, as_json)


@command("report")
def report(
    file: Program,
    weights: Weights = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR|TAR", help="Images; labels from sub-folders or shards, or none.")
    ] = None,
    classes: Classes = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="At most so many images, default 1000.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="OUT.html", help="Default: named like FILE, here.")] = None,
    pictures: Annotated[Path | None, typer.Option(metavar="DIR", help="Also the pictures as SVG files.")] = None,
    as_json: Json = False,
) -> None:
    """Write one page about a program, with pictures."""
    from fqvit.cli.commands import report as report_command

    report_command.run(
        file, weights=weights, data=data, classes=classes, limit=limit, out=out, pictures=pictures, as_json=as_json
    )


@command("bench")
def bench(
    file: Program,
    against: Annotated[str, typer.Option(metavar="NAMES", help="Peers, with commas between; or none.")] = (
        "torch,onnxruntime,openvino"
    ),
    batch: Annotated[str, typer.Option(metavar="N,...", help="Images at once.")] = "1",
    threads: Annotated[str, typer.Option(metavar="N,...", help="Threads of each.")] = "1",
    rounds: Annotated[int, typer.Option(metavar="N", help="How often each has its turn.")] = 10,
    weights: Annotated[
        str | None, typer.Option(metavar="FILE|hf:ORG/NAME", help="Checkpoint for the peers; default: random weights.")
    ] = None,
    ops: Annotated[bool, typer.Option("--ops", help="Also the engine's time by op.")] = False,
    as_json: Json = False,
) -> None:
    """Measure time and memory of a program beside other runtimes."""
    from fqvit.cli.commands import bench as bench_command

    bench_command.run(file, against, batch, threads, rounds, weights, ops, as_json)


@command("export")
def export(
    file: Program,
    to: Annotated[
        ExportKind, typer.Option(help="onnx: integer-only ONNX. qdq: ONNX for runtimes that fuse. c: C99. vectors: .npy.")
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="PATH", help="Default: named like FILE, here.")] = None,
    target: Annotated[QdqTarget | None, typer.Option(help="qdq: the runtime it is for; default ort.")] = None,
    attention: Annotated[QdqAttention | None, typer.Option(help="qdq: 4-bit codes emulated, or 8 bits.")] = None,
    image: Annotated[Path | None, typer.Option(metavar="IMAGE", help="vectors: what runs; default a test picture.")] = None,
    prefix: Annotated[str | None, typer.Option(metavar="NAME", help="c: before every name, for several models.")] = None,
    as_json: Json = False,
) -> None:
    """Write a program for other runtimes. All kinds but qdq have the same bits."""
    from fqvit.cli.commands import export as export_command

    options: dict[str, object] = {"target": target, "attention": attention, "image": image, "prefix": prefix}
    given = {name: value for name, value in options.items() if value is not None}
    export_command.run(file, to.value, out, given, as_json)


@command("table")
@one_option_per_field
def table(
    methods: Annotated[
        str | None, typer.Option(metavar="NAME[@W/A/ATTN],...", help="Recipes or .toml files; default: the paper's, and ours.")
    ] = None,
    bits: Annotated[str | None, typer.Option(metavar="W/A/ATTN,...", help="Every method at each of these.")] = None,
    *,
    options: StudyOptions,
    out: TableOut = None,
    as_json: Json = False,
) -> None:
    """Compare methods on models by top-1. Beside float and what was published; finished cells are kept."""
    from fqvit.cli.commands import table as table_command

    table_command.run(methods, bits, options, out or [], as_json)


@command("ablate")
@one_option_per_field
def ablate(
    model: OneModel = None,
    *,
    options: StudyOptions,
    out: FigureOut = None,
    as_json: Json = False,
) -> None:
    """Show what each part of the paper's method brings and costs. Finished cells are kept."""
    from fqvit.cli.commands import ablate as ablate_command

    ablate_command.run(model, options, out or [], as_json)


@command("sweep-k")
@one_option_per_field
def sweep_k(
    model: OneModel = None,
    recipe: Annotated[str, typer.Option(metavar="NAME|FILE.toml", help="Whose K is changed.")] = "fq-vit",
    largest: Annotated[int, typer.Option(metavar="K", help="K = 0 .. this.")] = 6,
    *,
    options: StudyOptions,
    out: FigureOut = None,
    as_json: Json = False,
) -> None:
    """Measure accuracy over the largest Power-of-Two Factor K. Finished cells are kept."""
    from fqvit.cli.commands import sweep as sweep_command

    sweep_command.run(model, recipe, largest, options, out or [], as_json)


@command("bitops")
def bitops(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Name; default fmnist_vit.")] = None,
    bits: Annotated[str | None, typer.Option(metavar="W/A/ATTN", help="Also at these bits, in the usual convention.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="List every layer.")] = False,
    as_json: Json = False,
) -> None:
    """Count bit operations for one image. In the paper's convention and in the usual one."""
    from fqvit.cli.commands import bitops as bitops_command

    bitops_command.run(model, bits, layers, as_json)


@command("doctor")
def doctor(as_json: Json = False) -> None:
    """Show CPU, versions and what is missing. Checks the compiled kernels, too."""
    from fqvit.cli.commands import doctor as doctor_command

    doctor_command.run(as_json)
