"""Define the commands of the paper's evaluation: table, ablate, sweep-k and bitops. app.py registers them."""

from __future__ import annotations

from typing import Annotated

import typer

from fqvit.cli.options import EveryBits, FigureOut, Json, Methods, OneModel, StudyOptions, TableOut, one_option_per_field


@one_option_per_field
def table(
    methods: Methods = None,
    bits: EveryBits = None,
    *,
    options: StudyOptions,
    out: TableOut = None,
    as_json: Json = False,
) -> None:
    """Compare the top-1 accuracy of quantization methods. Also lists float and published results. Finished cells are cached."""
    from fqvit.cli.commands import table as table_command

    table_command.run(methods, bits, options, out or [], as_json)


@one_option_per_field
def ablate(
    model: OneModel = None,
    *,
    options: StudyOptions,
    out: FigureOut = None,
    as_json: Json = False,
) -> None:
    """Measure what each part of the paper's method gains and costs. Finished cells are cached."""
    from fqvit.cli.commands import ablate as ablate_command

    ablate_command.run(model, options, out or [], as_json)


@one_option_per_field
def sweep_k(
    model: OneModel = None,
    recipe: Annotated[str, typer.Option(metavar="NAME|FILE.toml", help="Recipe in which K is varied.")] = "fq-vit",
    largest: Annotated[int, typer.Option(metavar="K", help="Largest K. The sweep starts at 0.")] = 6,
    *,
    options: StudyOptions,
    out: FigureOut = None,
    as_json: Json = False,
) -> None:
    """Measure how the accuracy depends on K, the largest exponent of the Power-of-Two Factor. Finished cells are cached."""
    from fqvit.cli.commands import sweep as sweep_command

    sweep_command.run(model, recipe, largest, options, out or [], as_json)


def bitops(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Name of a model. Default: fmnist_vit.")] = None,
    bits: Annotated[
        str | None, typer.Option(metavar="W/A/ATTN", help="Also count at these bit widths, in the usual convention.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME|FILE.toml", help="Also count this recipe, such as one that auto saved.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="List all layers.")] = False,
    as_json: Json = False,
) -> None:
    """Count the bit operations of a model per image. Conventions: the paper's, and weight x activation bits per product."""
    from fqvit.cli.commands import bitops as bitops_command

    bitops_command.run(model, bits, recipe, layers, as_json)
