"""Write a program as a folder of C99: `make` builds ./classify from it, and firmware can link its model.c.

The code consists of plain loops without floats, allocation or libc, and matches the reference bit for bit.
See also: plan.py (order of ops, offsets of buffers), emit.py and ops.py (model.c), text.py (constants), templates/ (files that
are the same in every export), docs/reference/c.md.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

from fqvit.data.preprocess import resized_size
from fqvit.export.c.emit import CEmitter
from fqvit.export.c.outputs import meaning
from fqvit.export.c.plan import plan
from fqvit.export.c.text import Prefix, comment
from fqvit.export.folder import check_free, replacing_folder, write_manifest
from fqvit.ir.program import Program

FORMAT = "c 1"
TEMPLATES = ("fqvit_ops.h", "fqvit_ops.c", "Makefile")
BUILT = ("classify",)


def export(program: Program, path: str | Path, prefix: str | None = None) -> None:
    """Write the folder `path` atomically. An earlier export at `path` is replaced; other files there raise FqvitError.

    prefix: replaces `model` in functions and constants and, in upper case, `FQVIT` in the macros of model.h, so that several
    models can be linked into one program
    """
    naming = Prefix.of(prefix)
    check_free(Path(path), BUILT)
    program.check_pixels("export to C")
    program.verify()
    with replacing_folder(path, BUILT) as folder:
        emitter = write_model(program, folder, naming)
        copy_templates(folder, "fqvit.export.c", TEMPLATES)
        main = files("fqvit.export.c") / "templates" / "main.c"
        write_text(folder / "main.c", naming.apply(main.read_text(encoding="utf-8")))
        write_text(folder / "README.txt", naming.apply(readme(program, emitter)))
        sizes = {"arena_bytes": emitter.plan.arena_bytes, "constant_bytes": emitter.arrays.bytes}
        names = {"model": program.header.model, "fingerprint": program.fingerprint()}
        write_manifest(folder, FORMAT, {**names, **sizes})


def write_model(program: Program, folder: Path, prefix: Prefix) -> CEmitter:
    """Write model.c, model.h, weights.h and weights*.c of a program, which may be a network of a detector."""
    verified = program.verify()
    emitter = CEmitter(program, verified, plan(program, verified), prefix)
    code = emitter.code()
    head = f"/* {comment(program.header.model)}, written by fqvit from {program.fingerprint()[:16]}. Do not edit. */\n"
    write_text(folder / "model.c", head + code)
    write_text(folder / "model.h", head + emitter.header())
    guard = prefix.apply("#ifndef FQVIT_WEIGHTS_H\n#define FQVIT_WEIGHTS_H\n\n#include <stdint.h>\n\n")
    write_text(folder / "weights.h", f"{head}{guard}{''.join(emitter.arrays.declarations())}\n#endif\n")
    for i, part in enumerate(emitter.arrays.files()):
        with (folder / f"weights{i}.c").open("w", encoding="utf-8", newline="\n") as file:
            file.write(f'{head}#include "weights.h"\n')
            file.writelines(part)
    return emitter


def copy_templates(folder: Path, package: str, names: Sequence[str]) -> None:
    """Copy files of a package's folder `templates`."""
    for name in names:
        with as_file(files(package) / "templates" / name) as template:
            shutil.copyfile(template, folder / name)


def write_text(path: Path, text: str) -> None:
    """Write a text file: the same bytes on every system."""
    path.write_text(text, encoding="utf-8", newline="\n")


def readme(program: Program, emitter: CEmitter) -> str:
    height, width, channels = program.input_shape
    preprocess = program.header.preprocess
    resize = f"Resize the shorter side of the image to {preprocess.resize}"
    if preprocess.squash:
        resized_width, resized_height = resized_size(width, height, preprocess.resize)
        resize = f"Resize the image to {resized_height} rows of {resized_width} pixels, ignoring its aspect ratio"
    items = emitter.outputs.items
    lists = ", then ".join(f"{item.name}, {' x '.join(map(str, item.shape))}" for item in items)
    meanings = "\n".join(f"{item.name} ({item.output.kind}): {meaning(item)}" for item in items)
    return f"""\
{comment(program.header.model)} as C99, without floats. Written by fqvit from program
{program.fingerprint()}.

    make
    ./classify image.rgb        prints one integer per line: {lists}
    ./classify --sizes

image.rgb has {height * width * channels} bytes: {height} rows of {width} pixels with {channels} byte(s) each, top row first;
0 is black. {resize} ({preprocess.interpolation}), then crop the center.
Do not subtract a mean or divide by a standard deviation: both are part of the weights.

RAM    {emitter.plan.arena_bytes:>9,} bytes of arena (FQVIT_ARENA_BYTES), plus image, outputs and less than 1 kB of stack
flash  {emitter.arrays.bytes:>9,} bytes of constants, plus about 10 kB of code and op descriptions

To use the model in firmware, compile every .c file except main.c and call model_run(), declared in model.h. The code needs only
<stdint.h> and <stddef.h>. The outputs approximate those of the float model:

{meanings}
"""
