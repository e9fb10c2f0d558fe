"""`fqvit classify`: show the five best classes of each image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fqvit.cli.output import Unreadable, not_logits, say, say_json
from fqvit.data.images import UnreadableImage, read_image
from fqvit.evaluate.accuracy import top
from fqvit.runtime.native import Engine
from fqvit.system.progress import track
from fqvit.system.text import table

BEST = 5


def run(file: Path, images: list[Path], as_json: bool) -> None:
    """Classify the images. Unreadable ones are reported on stderr; the command goes on with the others and fails at the end."""
    engine = Engine(file)
    output = engine.header.output
    if output.kind != "logits":
        raise not_logits(file, output.kind)
    results, unreadable = [], Unreadable(len(images))
    for path in track(images, len(images), "classifying", "images"):
        try:
            pixels = read_image(path, engine.header.preprocess)
        except UnreadableImage as error:
            unreadable.add(error)
            continue
        logits: np.ndarray[Any, Any] = engine.run(pixels[None])[0]
        best = [_row(engine, index, int(logits[index])) for index in top(logits, BEST)]
        results.append({"image": str(path), "top": best})
    if as_json:
        say_json({"file": str(file), "model": engine.header.model, "results": results})
    else:
        _print(results)
    unreadable.raise_if_any()


def _row(engine: Engine, index: int, code: int) -> dict[str, object]:
    names = engine.classes
    logit = code * engine.header.output.scale
    return {"class": index, "name": None if names is None else names[index], "logit": round(logit, 4)}


def _print(results: list[dict[str, Any]]) -> None:
    for number, result in enumerate(results):
        rows = [(row["name"] or f"class {row['class']}", str(row["class"]), f"{row['logit']:.2f}") for row in result["top"]]
        say(("\n" if number else "") + result["image"])
        say(table(("name", "class", "logit"), rows))
