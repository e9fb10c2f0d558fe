"""`fqvit export`: write a program or a detector as a file or folder for other runtimes.

Each kind is a module of export/, or of detect/export/ for detectors.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

from fqvit.cli import inputs
from fqvit.cli.output import say, say_json
from fqvit.detect.program import DetectorProgram
from fqvit.errors import FqvitError
from fqvit.ir.file import DETECTOR, kind_of
from fqvit.ir.program import Program
from fqvit.runtime.onnx import INSTALL
from fqvit.system.progress import busy
from fqvit.system.text import size

# {kind: (module of export/, suffix of the default output name)}. If the suffix has no dot, the output is a folder.
KINDS = {"onnx": ("onnx", ".onnx"), "qdq": ("qdq", ".qdq.onnx"), "c": ("c", "_c"), "vectors": ("vectors", "_vectors")}
# {option: the kinds of export that accept it}
OPTIONS = {"target": ("qdq",), "attention": ("qdq",), "image": ("vectors",), "prefix": ("c",), "size": ("onnx", "c")}
DETECTOR_KINDS = ("onnx", "c", "vectors")  # each is a module of detect/export/ and writes a folder


def run(file: Path, to: str, out: Path | None, options: Mapping[str, object], as_json: bool) -> None:
    for option in options:
        if to not in OPTIONS[option]:
            raise FqvitError(f"--{option}: only valid with --to {' or '.join(OPTIONS[option])}. Leave it out.")
    is_detector = kind_of(file) == DETECTOR
    if is_detector and to not in DETECTOR_KINDS:
        kinds = ", ".join(DETECTOR_KINDS[:-1])
        raise FqvitError(f"--to {to}: not available for detectors. Use {kinds} or {DETECTOR_KINDS[-1]}.")
    module, ending = KINDS[to]
    target = out or Path(f"{file.stem}_{to}" if is_detector else f"{file.stem}{ending}")
    if "." in ending and not is_detector:
        inputs.check_output(target, file)
    else:
        inputs.check_parent(target)
    if is_detector and "prefix" in options:
        raise FqvitError("--prefix: not available for detectors, whose networks have prefixes already. Leave it out.")
    if not is_detector and "size" in options:
        raise FqvitError("--size: only valid for detectors. A program has a fixed image size; leave it out.")
    try:
        writer = importlib.import_module(f"fqvit.{'detect.' if is_detector else ''}export.{module}")
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise FqvitError(f"--to {to}: needs onnx, {INSTALL}") from None
    program = DetectorProgram.load(file) if is_detector else Program.load(file)
    with busy(f"exporting to {to}"):
        notes = list(writer.export(program, target, **options) or ())
    files = [target] if target.is_file() else [path for path in sorted(target.rglob("*")) if path.is_file()]
    written = sum(path.stat().st_size for path in files)
    if as_json:
        result = {"file": str(file), "to": to, "out": str(target), "files": len(files), "bytes": written, "notes": notes}
        say_json(result | {"fingerprint": program.fingerprint()})
        return
    model = program.model if isinstance(program, DetectorProgram) else program.header.model
    many = f"{len(files)} files, " if len(files) > 1 else ""
    say("\n".join((f"{target}: {many}{size(written)}, from {file} ({model})", *notes)))
