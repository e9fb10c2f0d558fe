"""`fqvit classify`: show the five best classes of each image, by logits or by text embeddings."""

from __future__ import annotations

import hashlib
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
Answer = dict[str, Any]  # result for one image: "top"; with --logits also "logits" and "pixels"


def run(file: Path, images: list[Path], text: Path | None, output: str | None, logits: bool, as_json: bool) -> None:
    """Classify the images and print the results one by one, or all together as JSON.

    Unreadable image files are reported on stderr; the command continues with the others and fails at the end. In a folder, tar
    or Parquet file, unreadable images are skipped with a warning, as long as they are at most 1 % of the images.
    text: text embeddings for zero-shot classification   output: the embedding to compare with them
    logits: add all logits as integers, and the SHA-256 of the prepared pixels, so that other runtimes can be compared
    """
    if logits and (text is not None or not as_json):
        wrong = "not with text embeddings. Leave out --zero-shot." if text is not None else "only for JSON. Pass --json too."
        raise FqvitError(f"--logits: {wrong}")
    if output is not None and text is None:
        raise FqvitError("--output: only for zero-shot classification. Pass text embeddings too (--zero-shot FILE.npz).")
    engine = Engine(file)
    answer_to = _classifier(file, engine, logits) if text is None else _zero_shot(file, engine, text, output)
    several = is_collection(images)
    preprocess = engine.header.preprocess
    unreadable = Unreadable(0 if several else len(images))
    pictures = _collection(open_images(images, preprocess)) if several else _files(images, preprocess, unreadable)
    results: list[dict[str, Any]] = []
    for number, (name, pixels) in enumerate(pictures):
        found = {"image": name, **answer_to(pixels[None])}
        if as_json:
            results.append(found)
        else:
            _print(found, number)
    if as_json:
        about: dict[str, object] = {"file": str(file), "model": engine.header.model}
        if logits:
            about |= {"fingerprint": engine.fingerprint, "scale": engine.header.output.scale}
        say_json({**about, "results": results})
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


def _classifier(file: Path, engine: Engine, all_logits: bool) -> Callable[[NDArray[np.uint8]], Answer]:
    """Return a function that maps one image to its best classes by logit. all_logits: add all logits as integers"""
    output, names = engine.header.output, engine.classes
    if output.kind != "logits":
        raise not_logits(file, output.kind)

    def answer_to(pixels: NDArray[np.uint8]) -> Answer:
        logits = engine.run(pixels)[0]
        best: Rows = [
            {"class": i, "name": None if names is None else names[i], "logit": round(int(logits[i]) * output.scale, 4)}
            for i in top(logits, BEST)
        ]
        if not all_logits:
            return {"top": best}
        return {"top": best, "logits": logits.tolist(), "pixels": hashlib.sha256(pixels.tobytes()).hexdigest()}

    return answer_to


def _zero_shot(file: Path, engine: Engine, path: Path, output: str | None) -> Callable[[NDArray[np.uint8]], Answer]:
    """Return a function that maps one image to its best classes by integer cosine similarity to text embeddings."""
    text, embed = read_text(path), Embedder(file, output, engine)
    embed.check_text(str(path), text)
    index = text.index(engine.threads)

    def answer_to(pixels: NDArray[np.uint8]) -> Answer:
        found = index.search(embed(pixels), embed.info.zero, BEST)
        best: Rows = [
            {"class": i, "name": text.names[i], "score": score, "cosine": round(score / ONE, 6)}
            for i, score in zip(found.rows[0].tolist(), found.scores[0].tolist(), strict=True)
        ]
        return {"top": best}

    return answer_to


def _print(result: dict[str, Any], number: int) -> None:
    value = "cosine" if "cosine" in result["top"][0] else "logit"
    digits = 4 if value == "cosine" else 2
    rows = [(row["name"] or f"class {row['class']}", str(row["class"]), f"{row[value]:.{digits}f}") for row in result["top"]]
    say(("\n" if number else "") + result["image"])
    say(table(("name", "class", value), rows))
