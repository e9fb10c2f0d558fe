"""Write a detector as a folder of integer-only ONNX files, and detect.py, which runs them with ONNX Runtime and numpy.

The results of detect.py are those of the engine, bit for bit. docs/reference/detector-exports.md describes the files.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from fqvit.detect.export.facts import Size, facts, input_size, networks
from fqvit.detect.program import DetectorProgram
from fqvit.export.folder import check_free, replacing_folder, write_manifest
from fqvit.export.onnx.writer import model

FORMAT = "detector onnx 1"
BUILT = ("results.json",)  # a file that detect.py may have written; a new export may replace it


def export(program: DetectorProgram, path: str | Path, size: Size | None = None) -> None:
    """Write the folder `path` atomically. An earlier export at `path` is replaced; other files there raise FqvitError.

    size: height and width of the images; None: landscape images of the largest size that the settings allow
    """
    check_free(Path(path), BUILT)
    program.verify()
    shape = input_size(program, size)
    with replacing_folder(path, BUILT) as folder:
        for name, part in networks(program, shape).items():
            (folder / f"{name}.onnx").write_bytes(model(part).SerializeToString())
        text = json.dumps(facts(program, shape), indent=1, ensure_ascii=True)
        (folder / "detector.json").write_text(text + "\n", encoding="utf-8")
        script = files("fqvit.detect.export") / "templates" / "detect.py"
        (folder / "detect.py").write_text(script.read_text(encoding="utf-8"), encoding="utf-8", newline="\n")
        write_manifest(folder, FORMAT, {"model": program.model, "fingerprint": program.fingerprint(), "size": list(shape)})
