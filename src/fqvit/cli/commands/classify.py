"""`fqvit classify`: show the best classes of each image, by logits or by text embeddings."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fqvit.cli import inputs
from fqvit.cli.output import Unreadable, not_logits, say, say_json, warn_of_skipped
from fqvit.data.images import Source, UnreadableImage, read_image
from fqvit.data.places import is_collection, open_images
from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.inference.embedder import Embedder
from fqvit.inference.products import ONE
from fqvit.inference.results import best_scores
from fqvit.inference.zero_shot import read_text
from fqvit.runtime.native import Engine
from fqvit.system.files import write_atomically
from fqvit.system.progress import track
from fqvit.system.text import table

BATCH = 16  # images that are decoded together
COLUMNS = ("image", "rank", "class", "name")  # of a CSV file, before the scores

Rows = list[dict[str, Any]]
Answer = dict[str, Any]  # result for one image: "top"; with --logits also "logits" and "pixels"


@dataclass(frozen=True)
class Wanted:
    """What to show. top: classes per image   classes: file of class names   out: CSV file

    text: text embeddings for zero-shot classification   output: the embedding to compare with them
    logits: add all logits as integers, and the SHA-256 of the prepared pixels, so that other runtimes can be compared
    """

    top: int
    classes: Path | None
    out: Path | None
    text: Path | None
    output: str | None
    logits: bool
    as_json: bool

    def check(self, file: Path) -> None:
        """Raise FqvitError for options that do not fit together."""
        if self.top < 1:
            raise FqvitError(f"--top {self.top}: expected at least 1.")
        if self.logits and (self.text is not None or not self.as_json):
            wrong = (
                "only for JSON. Pass --json too." if self.text is None else "not with text embeddings. Leave out --zero-shot."
            )
            raise FqvitError(f"--logits: {wrong}")
        if self.output is not None and self.text is None:
            raise FqvitError("--output: only for zero-shot classification. Pass text embeddings too (--zero-shot FILE.npz).")
        if self.classes is not None and self.text is not None:
            raise FqvitError("--classes: the text embeddings have names. Leave out --classes.")
        if self.out is not None:
            if self.out.suffix.lower() != ".csv":
                raise FqvitError(f"-o {self.out}: expected a name that ends in .csv. For JSON, pass --json.")
            inputs.check_output(self.out, file, self.classes, self.text)


def run(file: Path, images: list[Path], wanted: Wanted) -> None:
    """Classify the images and print the results one by one, or all together as JSON, or write them to a CSV file.

    Unreadable image files are reported on stderr; the command continues with the others and fails at the end. In a folder, tar
    or Parquet file, unreadable images are skipped with a warning, as long as they are at most 1 % of the images.
    """
    wanted.check(file)
    engine = Engine(file)
    answer_to = _classifier(file, engine, wanted) if wanted.text is None else _zero_shot(file, engine, wanted.text, wanted)
    several = is_collection(images)
    preprocess = engine.header.preprocess
    unreadable = Unreadable(0 if several else len(images))
    pictures = _collection(open_images(images, preprocess)) if several else _files(images, preprocess, unreadable)
    results: list[dict[str, Any]] = []
    for number, (name, pixels) in enumerate(pictures):
        found = {"image": name, **answer_to(pixels[None])}
        if wanted.as_json or wanted.out is not None:
            results.append(found)
        else:
            _print(found, number)
    if wanted.out is not None:
        write_atomically(wanted.out, lambda temporary: temporary.write_text(_csv(results), encoding="utf-8", newline=""))
    if wanted.as_json:
        about: dict[str, object] = {"file": str(file), "model": engine.header.model}
        if wanted.logits:
            about |= {"fingerprint": engine.fingerprint, "scale": engine.header.output.scale}
        say_json({**about, "results": results})
    elif wanted.out is not None:
        count = "1 image" if len(results) == 1 else f"{len(results)} images"
        say(f"{wanted.out}: classes of {count}")
    unreadable.raise_if_any()


def _csv(results: list[dict[str, Any]]) -> str:
    """Return one row per image and class. Scores are probability and logit, or cosine and score for text embeddings."""
    scores = [key for key in ("probability", "logit", "cosine", "score") if results and key in results[0]["top"][0]]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*COLUMNS, *scores))
    for result in results:
        for rank, row in enumerate(result["top"], 1):
            writer.writerow((result["image"], rank, row["class"], row["name"] or "", *(row[key] for key in scores)))
    return text.getvalue()


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


def _classifier(file: Path, engine: Engine, wanted: Wanted) -> Callable[[NDArray[np.uint8]], Answer]:
    """Return a function that maps one image to its best classes by logit."""
    output, names = engine.header.output, engine.classes
    if output.kind != "logits":
        raise not_logits(file, output.kind)
    if (given := inputs.read_classes(wanted.classes)) is not None:
        count = engine.outputs[0].shape[-1]
        if len(given.names) != count:
            raise FqvitError(f"{wanted.classes}: {len(given.names)} classes, but {file} has {count}. Pass one name per logit.")
        names = tuple(given.names)

    def answer_to(pixels: NDArray[np.uint8]) -> Answer:
        logits = engine.run(pixels)[0]
        best: Rows = [
            {
                "class": score.index,
                "name": score.name,
                "probability": round(score.probability, 6),
                "logit": round(score.logit, 4),
            }
            for score in best_scores(logits, output.scale, names, wanted.top)
        ]
        if not wanted.logits:
            return {"top": best}
        return {"top": best, "logits": logits.tolist(), "pixels": hashlib.sha256(pixels.tobytes()).hexdigest()}

    return answer_to


def _zero_shot(file: Path, engine: Engine, path: Path, wanted: Wanted) -> Callable[[NDArray[np.uint8]], Answer]:
    """Return a function that maps one image to its best classes by integer cosine similarity to text embeddings."""
    text, embed = read_text(path), Embedder(file, wanted.output, engine)
    embed.check_text(str(path), text)
    index = text.index(engine.threads)

    def answer_to(pixels: NDArray[np.uint8]) -> Answer:
        found = index.search(embed(pixels), embed.info.zero, wanted.top)
        best: Rows = [
            {"class": i, "name": text.names[i], "score": score, "cosine": round(score / ONE, 6)}
            for i, score in zip(found.rows[0].tolist(), found.scores[0].tolist(), strict=True)
        ]
        return {"top": best}

    return answer_to


def _print(result: dict[str, Any], number: int) -> None:
    by_logits = "logit" in result["top"][0]
    heads = ("name", "class", "probability", "logit") if by_logits else ("name", "class", "cosine")
    rows = [
        (row["name"] or f"class {row['class']}", str(row["class"]))
        + ((f"{row['probability']:.2%}", f"{row['logit']:.2f}") if by_logits else (f"{row['cosine']:.4f}",))
        for row in result["top"]
    ]
    say(("\n" if number else "") + result["image"])
    say(table(heads, rows))
