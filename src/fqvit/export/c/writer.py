"""Export to C99: a folder that `make` turns into ./classify, and whose model.c a firmware can link.

The same integers as every other runtime, by plain loops: no float, no allocation, no libc in the model. c_plan.py decides what
runs when and where buffers lie, c_emit.py and c_ops.py write model.c, c_text.py its constants; templates/c has what is the same
in every export. docs/export-c.md is the page.
"""

from __future__ import annotations

import shutil
from importlib.resources import as_file, files
from pathlib import Path

from fqvit.export.c.emit import CEmitter
from fqvit.export.c.plan import plan
from fqvit.export.c.text import Prefix, comment
from fqvit.export.folder import check_free, replacing_folder, write_manifest
from fqvit.ir.program import Program

FORMAT = "c 1"
TEMPLATES = ("fqvit_ops.h", "fqvit_ops.c", "Makefile")
BUILT = ("classify",)


def export(program: Program, path: str | Path, prefix: str | None = None) -> None:
    """Writes the folder `path`; an earlier export there is replaced, anything else refused.

    prefix: in place of `model` in functions and constants and, in capitals, of `FQVIT` in model.h's macros, so that several
    models fit into one program.
    """
    naming = Prefix.of(prefix)
    check_free(Path(path), BUILT)
    program.check_plain("export to C")
    verified = program.verify()
    emitter = CEmitter(program, verified, plan(program, verified), naming)
    code = emitter.code()
    with replacing_folder(path, BUILT) as folder:
        head = f"/* {comment(program.header.model)}, written by fqvit from {program.fingerprint()[:16]}. Do not edit. */\n"
        _write(folder / "model.c", head + code)
        _write(folder / "model.h", head + emitter.header())
        guard = naming.apply("#ifndef FQVIT_WEIGHTS_H\n#define FQVIT_WEIGHTS_H\n\n#include <stdint.h>\n\n")
        _write(folder / "weights.h", f"{head}{guard}{''.join(emitter.arrays.declarations())}\n#endif\n")
        for i, part in enumerate(emitter.arrays.files()):
            with (folder / f"weights{i}.c").open("w", encoding="utf-8", newline="\n") as file:
                file.write(f'{head}#include "weights.h"\n')
                file.writelines(part)
        templates = files("fqvit.export.c") / "templates"
        for name in TEMPLATES:
            with as_file(templates / name) as template:
                shutil.copyfile(template, folder / name)
        _write(folder / "main.c", naming.apply((templates / "main.c").read_text(encoding="utf-8")))
        _write(folder / "README.txt", naming.apply(readme(program, emitter)))
        sizes = {"arena_bytes": emitter.plan.arena_bytes, "constant_bytes": emitter.arrays.bytes}
        names = {"model": program.header.model, "fingerprint": program.fingerprint()}
        write_manifest(folder, FORMAT, {**names, **sizes})


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")  # the same bytes on every machine


def readme(program: Program, emitter: CEmitter) -> str:
    height, width, channels = program.input_shape
    output = program.header.output
    shape = " x ".join(map(str, emitter.values[output.buffer].shape))
    preprocess = program.header.preprocess
    meaning = f"Scores times {output.scale:.6g} are near the float model's logits."
    if output.kind != "logits":
        meaning = f"Outputs are codes: value = (code - {output.zero}) * {output.scale:.6g}"
        meaning += "." if output.alpha is None else ", times 2^alpha of its channel."
    return f"""\
{comment(program.header.model)} as C99, without floats. Written by fqvit from program
{program.fingerprint()}.

    make
    ./classify image.rgb        one integer a line: {output.kind}, {shape}
    ./classify --sizes

image.rgb has {height * width * channels} bytes: {height} rows of {width} pixels, {channels} byte(s) each, upright, 0 is black.
Resize the shorter side to {preprocess.resize} ({preprocess.interpolation}), then cut out the middle. Mean and standard
deviation are inside the weights: nothing is to be subtracted or divided.

RAM    {emitter.plan.arena_bytes:>9,} bytes of arena (FQVIT_ARENA_BYTES), the image, the outputs, and less than 1 kB of stack
flash  {emitter.arrays.bytes:>9,} bytes of constants, and some 10 kB of code and descriptions of ops

To link it into a firmware: every .c file but main.c, and model_run() of model.h. It needs <stdint.h> and <stddef.h> alone.

{meaning}
"""
