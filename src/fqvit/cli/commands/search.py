"""`fqvit search`: find the nearest vectors of an embedding file, with integer arithmetic only."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fqvit.cli.output import Unreadable, say, say_json
from fqvit.data.images import UnreadableImage
from fqvit.errors import FqvitError
from fqvit.inference import embeddings
from fqvit.inference.embeddings import Embeddings
from fqvit.inference.model import load
from fqvit.inference.products import ONE
from fqvit.inference.search import nearest, searchable
from fqvit.system.progress import busy, track
from fqvit.system.text import table


def run(
    file: Path,
    images: list[Path],
    model: Path | None,
    queries: Path | None,
    output: str | None,
    count: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Search with images, which `model` embeds, or with the vectors of another embedding file."""
    if (queries is None) == (not images):
        raise FqvitError("search: expected either images (with --model FILE.fqvit) or an embedding file (--queries FILE).")
    if count < 1:
        raise FqvitError(f"--top {count}: expected at least 1.")
    gallery = embeddings.read(file)
    name = searchable(gallery.info, str(file), output).name
    unreadable = Unreadable(len(images))
    if queries is not None:
        wanted = embeddings.read(queries)
    else:
        wanted = _embedded(images, model, gallery, name, threads, unreadable)
    gallery.check_same_program(wanted, str(queries or model))
    if name not in wanted.info:
        raise FqvitError(f"{queries}: no output {name!r} to compare with {file}. Embed the queries with --output {name}.")
    start = time.perf_counter()
    with busy(f"searching {len(gallery)} vectors"):
        found = nearest(gallery, wanted, name, count, threads)
    seconds = time.perf_counter() - start
    results = [
        {"query": query, "neighbours": [_row(gallery, row, score) for row, score in zip(rows, scores, strict=True)]}
        for query, rows, scores in zip(wanted.names, found.rows.tolist(), found.scores.tolist(), strict=True)
    ]
    if as_json:
        about = {"file": str(file), "model": gallery.model, "output": name, "vectors": len(gallery)}
        say_json({**about, "seconds": round(seconds, 3), "results": results})
    else:
        _print(results)
    unreadable.raise_if_any()


def _embedded(
    images: list[Path], path: Path | None, gallery: Embeddings, name: str, threads: int | None, unreadable: Unreadable
) -> Embeddings:
    """Embed the images that can be read."""
    if path is None:
        raise FqvitError("search: images need the program that made the embeddings. Pass it (--model FILE.fqvit).")
    model = load(path, threads)
    found = model.embed([], name)
    gallery.check_same_program(found, str(path))  # before any work
    for image in track(images, len(images), "embedding", "images"):
        try:
            found = found.joined(model.embed(image, name))
        except UnreadableImage as error:
            unreadable.add(error)
    return found


def _row(gallery: Embeddings, row: int, score: int) -> dict[str, object]:
    return {"name": gallery.names[row], "row": row, "score": score, "cosine": round(score / ONE, 6)}


def _print(results: list[dict[str, Any]]) -> None:
    for number, result in enumerate(results):
        rows = [(row["name"], str(row["row"]), f"{row['cosine']:.4f}") for row in result["neighbours"]]
        say(("\n" if number else "") + result["query"])
        say(table(("name", "row", "cosine"), rows))
