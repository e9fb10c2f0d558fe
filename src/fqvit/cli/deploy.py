"""Define the commands that deploy and publish a program: export, web, serve and card. app.py registers them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fqvit.cli.options import ExportKind, Json, Program, QdqAttention, QdqTarget, Threads, parse_size
from fqvit.system.hub import local_program


def export(
    file: Program,
    to: Annotated[
        ExportKind,
        typer.Option(
            help="onnx: integer-only ONNX. qdq: ONNX for runtimes that fuse Q/DQ nodes. c: C99. vectors: .npy test vectors."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="PATH", help="Output path. Default: named after FILE, in the current folder."),
    ] = None,
    target: Annotated[QdqTarget | None, typer.Option(help="qdq: target runtime. Default: ort.")] = None,
    attention: Annotated[
        QdqAttention | None, typer.Option(help="qdq: emulate 4-bit log2 codes, or use 8-bit uniform codes. Default: uniform.")
    ] = None,
    image: Annotated[
        Path | None, typer.Option(metavar="IMAGE", help="vectors: input image. Default: a built-in test image.")
    ] = None,
    prefix: Annotated[
        str | None, typer.Option(metavar="NAME", help="c: prefix of all C names, to link several models.")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="HxW", help="Detectors: size of the images. Default: landscape, the largest size in the settings."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Export a program or a detector for other runtimes. All kinds except qdq are bit-exact."""
    from fqvit.cli.commands import export as export_command

    shape = None if size is None else parse_size(size)
    options: dict[str, object] = {"target": target, "attention": attention, "image": image, "prefix": prefix, "size": shape}
    given = {name: value for name, value in options.items() if value is not None}
    export_command.run(file, to.value, out, given, as_json)


def web(
    file: Annotated[
        Path | None,
        typer.Argument(
            parser=local_program,
            metavar="[FILE.fqvit]",
            help="Program or detector, also on the hub. Default: the embedded model.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Output folder. Default: named after FILE, in the current folder."),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page to browsers on this machine until Ctrl-C, and open it.")
    ] = False,
    port: Annotated[int, typer.Option(metavar="N", help="With --serve: port on 127.0.0.1. 0: any free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="With --serve: open the page in a browser.")] = True,
    as_json: Json = False,
) -> None:
    """Write a web page that runs a program in the browser, or serve it on this machine."""
    from fqvit.cli.commands import web as web_command

    web_command.run(file, out, serve, port, browser, as_json)


def serve(
    files: Annotated[
        list[Path],
        typer.Argument(
            parser=local_program,
            metavar="FILE.fqvit...",
            help="Programs and detectors to serve, also from the hub.",
            show_default=False,
        ),
    ],
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on. 0.0.0.0: all networks.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="Port. 0: any free one.")] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the API key that clients must send. Default: $FQVIT_API_KEY, if set."),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Maximum number of images per batch.")] = 8,
    queue: Annotated[
        int, typer.Option(metavar="N", help="Maximum number of waiting images; further requests get status 429.")
    ] = 256,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Maximum time per request.")] = 30.0,
    max_body: Annotated[int, typer.Option(metavar="BYTES", help="Maximum size of a request body.")] = 20_000_000,
    max_pixels: Annotated[int, typer.Option(metavar="N", help="Maximum number of pixels per image.")] = 50_000_000,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Serve programs over HTTP: classification, embeddings in OpenAI's format, and detection."""
    from fqvit.cli.commands import serve as serve_command
    from fqvit.serve.limits import Limits

    limits = Limits(body=max_body, pixels=max_pixels, queue=queue, batch=batch, seconds=timeout)
    serve_command.run(files, host, port, limits, threads, api_key_file, as_json)


def card(
    file: Program,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            "--eval", metavar="FILE.json", help="Output of `fqvit eval --json` or `fqvit detect eval --json`. Repeatable."
        ),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the data that was evaluated, such as imagenet-1k.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME", help="Float model on the hub. Default: ORG/NAME if quantized from hf:ORG/NAME."),
    ] = None,
    licence: Annotated[
        str | None, typer.Option("--license", metavar="NAME", help="Licence of the weights, such as apache-2.0.")
    ] = None,
    repository: Annotated[
        str | None, typer.Option("--repo", metavar="ORG/NAME", help="Hub repository of the card, for its examples.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE.md", help="Output file, such as README.md. Default: stdout.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a model card: accuracy, sizes, recipe, fingerprint, and how to run the program."""
    from fqvit.cli.commands import card as card_command

    card_command.run(file, results or [], dataset, base, licence, repository, out, as_json)
