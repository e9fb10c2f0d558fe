"""Define the commands for files of embeddings. app.py registers them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fqvit.cli.options import EmbeddingKind, Json, OneOutput, Program, Threads
from fqvit.system.hub import local_program


def embed(
    file: Program,
    images: Annotated[
        list[Path],
        typer.Argument(
            metavar="IMAGE...|DIR|TAR|PARQUET", help="Image files, a folder, tar or Parquet files.", show_default=False
        ),
    ],
    out: Annotated[
        str,
        typer.Option(
            "--out",
            "-o",
            metavar="OUT",
            help="Output: .npy, .parquet or .safetensors, or a folder (OUT/): one file per tar, Parquet file or 10,000 images.",
        ),
    ],
    output: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Outputs of the program, separated by commas. Default: all.")
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Images per batch. The result does not depend on it.")] = 16,
    threads: Threads = None,
    kind: Annotated[
        EmbeddingKind | None, typer.Option("--format", help="Format of files in a folder. Default: parquet.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the embeddings of images to a file. An interrupted run continues where it stopped."""
    from fqvit.cli.commands import embed as embed_command

    embed_command.run(file, images, out, output, batch, threads, None if kind is None else kind.value, as_json)


def search(
    file: Annotated[
        Path,
        typer.Argument(metavar="EMBEDDINGS", help="Embedding file to search in, as `embed` writes it.", show_default=False),
    ],
    images: Annotated[
        list[Path] | None, typer.Argument(metavar="IMAGE...", help="Images to search for.", show_default=False)
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            parser=local_program, metavar="FILE.fqvit", help="The program that made the embeddings; it embeds the images."
        ),
    ] = None,
    queries: Annotated[
        Path | None, typer.Option(metavar="EMBEDDINGS", help="Search for the vectors of this file instead of images.")
    ] = None,
    output: OneOutput = None,
    top: Annotated[int, typer.Option(metavar="N", help="Number of neighbours.")] = 5,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Find the nearest images of an embedding file, by integer cosine similarity."""
    from fqvit.cli.commands import search as search_command

    search_command.run(file, images or [], model, queries, output, top, threads, as_json)
