"""`fqvit web`: write a web page that runs a program in the browser, or serve it on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fqvit.cli import inputs
from fqvit.cli.output import say, say_json
from fqvit.errors import FqvitError
from fqvit.ir.file import DETECTOR, kind_of
from fqvit.system.text import size
from fqvit.web.page import MODEL, PAGE, page_html, write_page
from fqvit.web.server import Server


def run(file: Path | None, out: Path | None, serve: bool, port: int, browser: bool, as_json: bool) -> None:
    if not serve and (port or not browser):
        raise FqvitError(f"--{'port' if port else 'no-browser'}: only with --serve. Leave it out.")
    if not serve and file is None and out is None:
        raise FqvitError("web: expected a program (FILE.fqvit), an output folder (-o DIR) or --serve.")
    html = page_html(file is not None)  # first: without the page there is nothing to do
    fingerprint = None if file is None else _checked(file)
    if out is None and not serve and file is not None:
        out = Path(f"{file.stem}-web")
    if out is not None:
        inputs.check_parent(out)
        names = write_page(out, file)
        if as_json:
            say_json({"out": str(out), "files": names, "fingerprint": fingerprint})
        else:
            total = sum((out / name).stat().st_size for name in names)
            say(f"{out}: {', '.join(names)} ({size(total)}). Open {out / PAGE}, or copy the folder to any static web server.")
    if serve:
        content = {PAGE: html}
        if file is not None:
            content[MODEL] = file.read_bytes()
        _serve(content, port, browser, as_json)


def _checked(file: Path) -> str:
    """Load the program, so that the page does not get a damaged one, and return its fingerprint."""
    if kind_of(file) == DETECTOR:
        from fqvit.detect.fixed.detector import IntegerDetector

        return IntegerDetector(file).fingerprint
    from fqvit.runtime.native import Engine

    return Engine(file).fingerprint


def _serve(content: dict[str, bytes], port: int, browser: bool, as_json: bool) -> None:
    """Serve until Ctrl-C, which ends the command with exit code 130 as in every command."""
    with Server(content, port) as server:
        if as_json:
            say_json({"address": server.address})
        else:
            say(f"{server.address} (Ctrl-C stops the server)")
        sys.stdout.flush()
        if browser and _has_display():
            import webbrowser

            webbrowser.open(server.address)
        server.serve_forever()


def _has_display() -> bool:
    """Return whether a graphical browser can be shown. A text browser would take over the terminal."""
    return sys.platform in ("darwin", "win32") or any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))
