"""`fqvit serve`: serve programs and detectors over HTTP."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fqvit.cli.commands.detectors import check_threads
from fqvit.cli.output import say, say_json, warn
from fqvit.errors import FqvitError
from fqvit.serve.limits import Limits

KEY = "FQVIT_API_KEY"


def run(
    files: Sequence[Path], host: str, port: int, limits: Limits, threads: int | None, key_file: Path | None, as_json: bool
) -> None:
    check_threads(threads)
    key = _key(key_file)
    try:
        from fqvit.serve.gate import LOOPBACK
        from fqvit.serve.run import serve
    except ModuleNotFoundError as error:
        raise FqvitError(f"serve needs {error.name}, which is not installed. Run `pip install 'fqvit[serve]'`.") from None

    def started(url: str, names: Sequence[str]) -> None:
        if key is None and host not in LOOPBACK:
            warn(f"--host {host}: everybody who can reach this address can use the server. Consider --api-key-file.")
        if as_json:
            say_json({"url": url, "models": list(names)})
        else:
            say(f"{url}: {', '.join(names)} (Ctrl-C stops the server)")
        sys.stdout.flush()

    serve(files, host, port, limits, threads, key, started)


def _key(file: Path | None) -> bytes | None:
    """Return the API key from a file or from the environment.

    The key itself is not an option, because other users of the machine can read command lines.
    """
    where = KEY if file is None else str(file)
    if file is None:
        if KEY not in os.environ:
            return None
        key = os.environ[KEY].encode().strip()
    else:
        try:
            key = file.read_bytes().strip()
        except OSError as error:
            raise FqvitError(f"{file}: cannot be read ({error.strerror}). Expected a file with the API key.") from None
    if len(key) < 8 or not key.isascii() or len(key.split()) != 1:
        raise FqvitError(f"{where}: expected an API key of at least 8 ASCII characters without spaces.")
    return key
