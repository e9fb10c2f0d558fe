"""Define the commands for files of embeddings. app.py registers them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fqvit.cli.options import Json, OneOutput, Threads


def search(
    file: Annotated[
        Path,
        typer.Argument(metavar="EMBEDDINGS", help="Embedding file to search in, as `embed` writes it.", show_default=False),
    ],
    images: Annotated[
        list[Path] | None, typer.Argument(metavar="[IMAGE...]", help="Images to search for.", show_default=False)
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="FILE.fqvit", help="The program that made the embeddings; it embeds the images.")
    ] = None,
    queries: Annotated[
        Path | None, typer.Option(metavar="EMBEDDINGS", help="Search for the vectors of this file instead of images.")
    ] = None,
    output: OneOutput = None,
    top: Annotated[int, typer.Option(metavar="N", help="Number of neighbours.")] = 5,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Find the nearest images of an embedding file, by integer cosines."""
    from fqvit.cli.commands import search as search_command

    search_command.run(file, images or [], model, queries, output, top, threads, as_json)
