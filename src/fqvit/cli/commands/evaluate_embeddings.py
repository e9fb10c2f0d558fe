"""`fqvit eval --knn` and `fqvit eval --zero-shot`: accuracy of a program that outputs embeddings instead of logits.

Both give one score per class, so top-1 and top-5 have the same meaning as for a classifier.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fqvit.cli import inputs
from fqvit.cli.output import say, say_json
from fqvit.data.images import existing_folder
from fqvit.data.parquet import are_parquet
from fqvit.data.shards import are_shards
from fqvit.distributed.workers import Workers
from fqvit.errors import FqvitError
from fqvit.evaluate.accuracy import Accuracy, Run, Scores, measure
from fqvit.evaluate.knn import class_scores, float_similarity
from fqvit.inference.embedder import Embedder
from fqvit.inference.zero_shot import read_text

BATCH = 8


def run(
    path: Path,
    gallery: Path | None,
    text: Path | None,
    data: Path | None,
    classes: Path | None,
    output: str | None,
    weights: str | None,
    settings: dict[str, Any],
    limit: int | None,
    other: str | None,
    as_json: bool,
) -> None:
    """Check the combination of options and evaluate. other: an option that does not apply, if given"""
    if gallery is not None and text is not None:
        raise FqvitError("--knn and --zero-shot: both decide the class. Pass only one of them.")
    if path.suffix != ".fqvit":
        raise FqvitError(f"{path}: --knn and --zero-shot evaluate a program. Pass a .fqvit file.")
    if text is not None and (weights is not None or settings):
        other = "--weights" if weights is not None else f"--{next(iter(settings))}"
    if other is not None:
        raise FqvitError(f"{other}: has no effect with {'--knn' if text is None else '--zero-shot'}. Leave it out.")
    if data is None:
        raise FqvitError(f"{path}: no images given. Pass a folder with one sub-folder per class (--data DIR).")
    if gallery is not None:
        _run_knn(path, gallery, data, classes, output, weights, settings, limit, as_json)
    elif text is not None:
        _run_zero_shot(path, text, data, classes, output, limit, as_json)


def _run_knn(
    path: Path,
    gallery: Path,
    data: Path,
    classes: Path | None,
    output: str | None,
    weights: str | None,
    settings: dict[str, Any],
    limit: int | None,
    as_json: bool,
) -> None:
    """Measure nearest-neighbour accuracy and, with the weights of the float model, the agreement with it."""
    workers = Workers.from_environment()
    embed = Embedder(path, output)
    names, ids = _classes(gallery, classes)
    shown = inputs.labelled(gallery, embed.engine.header.model, embed.engine.header.preprocess, names, ids, None, workers)
    images = inputs.labelled(data, embed.engine.header.model, embed.engine.header.preprocess, names, ids, limit, workers)
    start = time.perf_counter()
    run = class_scores(embed, embed.similarity, shown.batches(BATCH, "gallery"), len(names), workers)
    found = measure(run, images.batches(BATCH, "evaluating"), workers)
    seconds = time.perf_counter() - start
    more: dict[str, object] = {"gallery": len(shown.source), "output": embed.info.name}
    if weights is not None or settings:
        compared = _float_run(embed, weights, settings, shown, len(names), workers)
        exact = measure(compared, images.batches(BATCH, "float model"), workers)
        agreement = 100 * float((exact.predictions == found.predictions).mean())
        more |= {"float_top1": round(exact.top1, 4), "agreement": round(agreement, 4)}
    if workers.first:
        _report(path, embed, images, found, seconds, workers, more, as_json)


def _run_zero_shot(
    path: Path, text: Path, data: Path, classes: Path | None, output: str | None, limit: int | None, as_json: bool
) -> None:
    """Measure the accuracy of zero-shot classification with the text embeddings of a file."""
    workers = Workers.from_environment()
    embed, written = Embedder(path, output), read_text(text)
    embed.check_text(str(text), written)
    given = inputs.read_classes(classes)
    if given is not None and len(given.names) != len(written.names):
        raise FqvitError(f"{classes}: {len(given.names)} classes, but {text} has {len(written.names)}. Pass one name per text.")
    names, ids = (given.names, given.ids) if given is not None else (written.names, ())
    images = inputs.labelled(data, embed.engine.header.model, embed.engine.header.preprocess, names, ids, limit, workers)
    index = written.index(embed.engine.threads)
    start = time.perf_counter()
    found = measure(lambda pixels: index.scores(embed(pixels), embed.info.zero), images.batches(BATCH, "evaluating"), workers)
    seconds = time.perf_counter() - start
    if workers.first:
        more: dict[str, object] = {"text": str(text), "classes": len(names), "output": embed.info.name}
        _report(path, embed, images, found, seconds, workers, more, as_json)


def _classes(gallery: Path, classes: Path | None) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names and ids of the classes: those of --classes, or the sub-folders of a gallery of image files."""
    given = inputs.read_classes(classes)
    if given is not None:
        return given.names, given.ids
    if are_shards(gallery) or are_parquet(gallery):
        raise FqvitError(f"{gallery}: a gallery of tar or Parquet files needs class names. Pass them (--classes FILE).")
    folders = [entry.name for entry in existing_folder(gallery).iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return sorted(folders), ()


def _float_run(
    embed: Embedder, weights: str | None, settings: dict[str, Any], gallery: inputs.Images, classes: int, workers: Workers
) -> Run:
    """Return a function that computes class scores of the float model from cosine similarities of the same output."""
    inputs.require_torch("eval --knn --weights")
    import torch

    from fqvit.evaluate.compare import outputs_of
    from fqvit.models.graph import returned_outputs
    from fqvit.models.outputs import output_graph
    from fqvit.models.pixels import normalise

    header = embed.engine.header
    model, p = inputs.model_of_program(header, weights, **settings), header.preprocess
    features, names = outputs_of(header, model)
    graph = output_graph(model.module, (p.channels, p.height, p.width), features, names)
    wanted = (graph.outputs if names else returned_outputs(model.module, graph))[embed.position]

    @torch.no_grad()
    def forward(images: NDArray[np.uint8]) -> Scores:
        found = dict(zip(graph.outputs, graph.run_all(normalise(images, p)), strict=True))
        values: Scores = found[wanted].cpu().numpy()
        return values

    return class_scores(forward, float_similarity, gallery.batches(BATCH, "float gallery"), classes, workers)


def _report(
    path: Path,
    embed: Embedder,
    images: inputs.Images,
    found: Accuracy,
    seconds: float,
    workers: Workers,
    more: dict[str, object],
    as_json: bool,
) -> None:
    if as_json:
        result: dict[str, object] = {
            "target": str(path),
            "model": embed.engine.header.model,
            "backend": "native",
            "top1": round(found.top1, 4),
            "top5": round(found.top5, 4),
            "images": found.images,
            "skipped": images.skipped,
            "workers": workers.size,
            "seconds": round(seconds, 3),
            "ms_per_image": round(1000 * found.seconds / found.images, 3),
        }
        say_json(result | more)
        return
    kind = "text embeddings" if "text" in more else f"nearest of {more['gallery']} gallery images"
    say(f"{path} (output {embed.info.name}, {kind}) on {found.images} images ({images.where}): {seconds:.1f} s")
    say(f"top-1 {found.top1:.2f} %")
    say(f"top-5 {found.top5:.2f} %")
    if "agreement" in more:
        say(f"float top-1 {more['float_top1']:.2f} %, same class as float {more['agreement']:.2f} %")
