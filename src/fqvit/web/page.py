"""Write the web page and a program to a folder. The page works on any static server, and when it is opened as a file.

`make web` builds the page: one HTML file with the engine as WebAssembly, an embedded model and sample images. The folder adds a
program to it. Browsers do not let a page that is opened as a file read other files, but they run scripts next to it: therefore
the folder also contains the program as a script.

See also: server.py, web/ in the repository (the sources of the page).
"""

from __future__ import annotations

import base64
from importlib.resources import files
from pathlib import Path

from fqvit.errors import FqvitError
from fqvit.export.folder import replacing_folder, write_manifest

PAGE = "index.html"
MODEL = "model.fqvit"
SCRIPT = f"{MODEL}.js"
FORMAT = "web 1"
MAX_SCRIPT_BYTES = 100_000_000  # larger programs are not written as a script: browsers limit its length

_WITHOUT_MODEL = '<meta name="fqvit-model" content="">'
_WITH_MODEL = f'<meta name="fqvit-model" content="{MODEL}">'


def page_path() -> Path:
    """Return the path of the built page, which may not exist."""
    return Path(str(files("fqvit") / "assets" / "web" / PAGE))


def page_html(with_model: bool) -> bytes:
    """Return the page. with_model: the page loads `MODEL` from its own folder; otherwise it uses the embedded model."""
    path = page_path()
    if not path.is_file():
        raise FqvitError(f"{path}: the page is not built. Run `make wasm web` in the repository, or install a wheel.")
    text = path.read_text(encoding="utf-8")
    if _WITHOUT_MODEL not in text:
        raise FqvitError(f"{path}: the page was built by another version of fqvit. Run `make wasm web` again.")
    return text.replace(_WITHOUT_MODEL, _WITH_MODEL if with_model else _WITHOUT_MODEL, 1).encode()


def write_page(folder: str | Path, program: Path | None) -> list[str]:
    """Write the page and a program (None: only the page) to a folder, atomically. Return the names of the files."""
    content = {PAGE: page_html(program is not None)}
    if program is not None:
        data = program.read_bytes()
        content[MODEL] = data
        if len(data) <= MAX_SCRIPT_BYTES:
            content[SCRIPT] = b'globalThis.fqvitModel="' + base64.b64encode(data) + b'"\n'
    with replacing_folder(folder) as temporary:
        for name, data in content.items():
            (temporary / name).write_bytes(data)
        write_manifest(temporary, FORMAT, {})
    return list(content)
