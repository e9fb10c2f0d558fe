"""Define the commands that serve programs: to browsers that run them, and over HTTP. app.py registers them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fqvit.cli.options import Json, Threads


def web(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE.fqvit]", help="Program or detector. Default: the embedded model.", show_default=False),
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
        list[Path], typer.Argument(metavar="FILE.fqvit...", help="Programs and detectors to serve.", show_default=False)
    ],
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on. 0.0.0.0: all networks.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="Port. 0: any free one.")] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the API key that clients must send. Default: $FQVIT_API_KEY, if set."),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Most images that run together.")] = 8,
    queue: Annotated[int, typer.Option(metavar="N", help="Most images that wait; more get status 429.")] = 256,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest time of one request.")] = 30.0,
    max_body: Annotated[int, typer.Option(metavar="BYTES", help="Largest body of a request.")] = 20_000_000,
    max_pixels: Annotated[int, typer.Option(metavar="N", help="Most pixels of one image.")] = 50_000_000,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Serve programs over HTTP: classification, embeddings in OpenAI's format, and detection."""
    from fqvit.cli.commands import serve as serve_command
    from fqvit.serve.limits import Limits

    limits = Limits(body=max_body, pixels=max_pixels, queue=queue, batch=batch, seconds=timeout)
    serve_command.run(files, host, port, limits, threads, api_key_file, as_json)
