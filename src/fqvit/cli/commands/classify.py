"""`fqvit classify`: show the five best classes of each image, by logits or by text embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fqvit.cli.output import Unreadable, not_logits, say, say_json, warn_of_skipped
from fqvit.data.images import Source, UnreadableImage, read_image
from fqvit.data.places import is_collection, open_images
from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.evaluate.accuracy import top
from fqvit.inference.embedder import Embedder
from fqvit.inference.products import ONE
from fqvit.inference.zero_shot import read_text
from fqvit.runtime.native import Engine
from fqvit.system.progress import track
from fqvit.system.text import table

BEST = 5
BATCH = 16  # images that are decoded together


Rows = list[dict[str, object]]


def run(file: Path, images: list[Path], text: Path | None, output: str | None, as_json: bool) -> None:
    """Classify the images and print the results one by one, or all together as JSON.

    Unreadable image files are reported on stderr; the command goes on with the others and fails at the end. In a folder, tar or
    Parquet file, up to 1 % of the images are skipped with a warning if they are unreadable.
    text: text embeddings for zero-shot classification   output: the embedding to compare with them
    """
    if output is not None and text is None:
        raise FqvitError("--output: only for zero-shot classification. Pass text embeddings too (--zero-shot FILE.npz).")
    engine = Engine(file)
    best_of = _classifier(file, engine) if text is None else _zero_shot(file, engine, text, output)
    several = is_collection(images)
    preprocess = engine.header.preprocess
    unreadable = Unreadable(0 if several else len(images))
    pictures = _collection(open_images(images, preprocess)) if several else _files(images, preprocess, unreadable)
    results: list[dict[str, Any]] = []
    for number, (name, pixels) in enumerate(pictures):
        found = {"image": name, "top": best_of(pixels[None])}
        if as_json:
            results.append(found)
        else:
            _print(found, number)
    if as_json:
        say_json({"file": str(file), "model": engine.header.model, "results": results})
    unreadable.raise_if_any()


def _files(images: list[Path], preprocess: Preprocess, unreadable: Unreadable) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Yield the name and the pixels of each readable image file."""
    for path in track(images, len(images), "classifying", "images"):
        try:
            yield str(path), read_image(path, preprocess)
        except UnreadableImage as error:
            unreadable.add(error)


def _collection(source: Source) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Yield the name and the pixels of each readable image of a folder, tar or Parquet file."""
    for batch in track(source.batches(BATCH), -(-len(source) // BATCH), "classifying"):
        yield from zip(batch.paths, batch.images, strict=True)
    warn_of_skipped(source)


def _classifier(file: Path, engine: Engine) -> Callable[[NDArray[np.uint8]], Rows]:
    """Return a function from one image to its best classes, by the logits."""
    output, names = engine.header.output, engine.classes
    if output.kind != "logits":
        raise not_logits(file, output.kind)

    def best(pixels: NDArray[np.uint8]) -> Rows:
        logits = engine.run(pixels)[0]
        return [
            {"class": i, "name": None if names is None else names[i], "logit": round(int(logits[i]) * output.scale, 4)}
            for i in top(logits, BEST)
        ]

    return best


def _zero_shot(file: Path, engine: Engine, path: Path, output: str | None) -> Callable[[NDArray[np.uint8]], Rows]:
    """Return a function from one image to its best classes, by integer cosines to text embeddings."""
    text, embed = read_text(path), Embedder(file, output, engine)
    embed.check_text(str(path), text)
    index = text.index(engine.threads)

    def best(pixels: NDArray[np.uint8]) -> Rows:
        found = index.search(embed(pixels), embed.info.zero, BEST)
        return [
            {"class": i, "name": text.names[i], "score": score, "cosine": round(score / ONE, 6)}
            for i, score in zip(found.rows[0].tolist(), found.scores[0].tolist(), strict=True)
        ]

    return best


def _print(result: dict[str, Any], number: int) -> None:
    value = "cosine" if "cosine" in result["top"][0] else "logit"
    digits = 4 if value == "cosine" else 2
    rows = [(row["name"] or f"class {row['class']}", str(row["class"]), f"{row[value]:.{digits}f}") for row in result["top"]]
    say(("\n" if number else "") + result["image"])
    say(table(("name", "class", value), rows))
