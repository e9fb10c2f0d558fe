"""Define the commands for files of embeddings. app.py registers them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fqvit.cli.options import EmbeddingKind, Json, Program, Threads


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
            help="Output: .npy, .parquet or .safetensors, or a folder (OUT/) for one file per input.",
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
