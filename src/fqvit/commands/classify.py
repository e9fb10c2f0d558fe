"""`fqvit classify`: the five best classes of each image, by a program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fqvit.commands.output import say, say_json, table, warn
from fqvit.errors import FqvitError
from fqvit.evaluate.accuracy import top
from fqvit.images import UnreadableImage, read_image
from fqvit.ir.program import Program
from fqvit.progress import track
from fqvit.runtime.reference import Reference

BEST = 5


def run(file: Path, images: list[Path], as_json: bool) -> None:
    """Images that cannot be read are named on stderr; the others are classified all the same, and the command fails."""
    program = Program.load(file)
    output = program.header.output
    if output.kind != "logits":
        raise FqvitError(f"{file}: gives features ({output.kind}), not classes. Quantize without --features.")
    reference, results, unreadable = Reference(program), [], 0
    for path in track(images, len(images), "classifying", "images"):
        try:
            pixels = read_image(path, program.header.preprocess)
        except UnreadableImage as error:
            unreadable += 1
            warn(str(error))
            continue
        logits: np.ndarray[Any, Any] = reference.run(pixels[None])[0]
        best = [_row(program, index, int(logits[index])) for index in top(logits, BEST)]
        results.append({"image": str(path), "top": best})
    if as_json:
        say_json({"file": str(file), "model": program.header.model, "results": results})
    else:
        _print(results)
    if unreadable:
        raise FqvitError(f"{unreadable} of {len(images)} images cannot be read. Repair or remove them.")


def _row(program: Program, index: int, code: int) -> dict[str, object]:
    names = program.classes
    logit = code * program.header.output.scale
    return {"class": index, "name": None if names is None else names[index], "logit": round(logit, 4)}


def _print(results: list[dict[str, Any]]) -> None:
    for number, result in enumerate(results):
        rows = [(row["name"] or f"class {row['class']}", str(row["class"]), f"{row['logit']:.2f}") for row in result["top"]]
        say(("\n" if number else "") + result["image"])
        say(table(("name", "class", "logit"), rows))
