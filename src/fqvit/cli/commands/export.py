"""`fqvit export`: write a program as a file or folder for other runtimes. Each kind is a module of export/."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

from fqvit.cli import inputs
from fqvit.cli.output import say, say_json
from fqvit.errors import FqvitError
from fqvit.ir.program import Program
from fqvit.runtime.onnx import INSTALL
from fqvit.system.text import size

# {kind: (module of export/, suffix of the default output name)}. If the suffix has no dot, the output is a folder.
KINDS = {"onnx": ("onnx", ".onnx"), "qdq": ("qdq", ".qdq.onnx"), "c": ("c", "_c"), "vectors": ("vectors", "_vectors")}
OPTIONS = {"target": "qdq", "attention": "qdq", "image": "vectors", "prefix": "c"}  # {option: its kind}


def run(file: Path, to: str, out: Path | None, options: Mapping[str, object], as_json: bool) -> None:
    for option in options:
        if OPTIONS[option] != to:
            raise FqvitError(f"--{option}: only valid with --to {OPTIONS[option]}. Leave it out.")
    module, ending = KINDS[to]
    target = out or Path(f"{file.stem}{ending}")
    if "." in ending:
        inputs.check_output(target, file)
    else:
        inputs.check_parent(target)
    try:
        writer = importlib.import_module(f"fqvit.export.{module}")
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise FqvitError(f"--to {to}: needs onnx, {INSTALL}") from None
    program = Program.load(file)
    notes = list(writer.export(program, target, **options) or ())
    files = [target] if target.is_file() else [path for path in sorted(target.rglob("*")) if path.is_file()]
    written = sum(path.stat().st_size for path in files)
    if as_json:
        result = {"file": str(file), "to": to, "out": str(target), "files": len(files), "bytes": written, "notes": notes}
        say_json(result | {"fingerprint": program.fingerprint()})
        return
    many = f"{len(files)} files, " if len(files) > 1 else ""
    say("\n".join((f"{target}: {many}{size(written)}, from {file} ({program.header.model})", *notes)))
