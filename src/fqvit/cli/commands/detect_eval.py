"""`fqvit detect eval`: measure the COCO average precision of an integer or float detector."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from fqvit.cli import inputs
from fqvit.cli.commands import detectors
from fqvit.cli.output import say, say_json, warn, warn_of_skipped
from fqvit.detect.results import NamedResult, write_results
from fqvit.errors import FqvitError
from fqvit.evaluate.coco import NAMES, average_precision, categories_of, open_coco, require_pycocotools
from fqvit.system.progress import track
from fqvit.system.text import table

if TYPE_CHECKING:
    from fqvit.detect.fixed.detector import Backend

HEADS = ("AP", "AP50", "AP75", "small", "medium", "large")


def run(
    file: Path | None,
    *,
    weights: Path | None,
    settings: Path | None,
    data: Path | None,
    annotations: Path | None,
    limit: int | None,
    backend: Backend | None,
    threads: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    if (file is None) == (weights is None):
        raise FqvitError("detect eval: pass either a quantized detector (FILE.fqvit) or a float checkpoint (--weights FILE).")
    for option, value, needs in (("--backend", backend, file), ("--settings", settings, weights)):
        if value is not None and needs is None:
            said = "a float detector has no backends" if needs is file else "a .fqvit file contains its settings"
            raise FqvitError(f"{option}: {said}. Leave it out.")
    if data is None:
        raise FqvitError(
            "detect eval: no images given. Pass a folder of images (--data DIR) and their annotations"
            " (--annotations FILE.json; default: instances.json in the folder)."
        )
    if out is not None:
        inputs.check_output(out, file, weights, settings, annotations)
    require_pycocotools()
    coco = open_coco(data, annotations, limit)
    if out is not None:
        inputs.check_output(out, coco.annotations)
    ids, files = coco.ids, coco.files
    if file is not None:
        detector = detectors.load_program(file, backend, threads)
    else:
        assert weights is not None
        detector = detectors.load_float(weights, settings, threads)
    categories, warnings = categories_of(coco, detector.settings, detector.classes)
    for warning in warnings:
        warn(warning)

    start = time.perf_counter()
    results: list[NamedResult] = []
    seen = []
    for i, image in track(files, len(files), "detecting", "images"):
        seen.append(ids[i])
        results += detector.results(image, ids[i], coco.file_name(i))
    seconds = time.perf_counter() - start
    skipped = warn_of_skipped(files)
    if not seen:
        raise FqvitError(f"{data}: none of the images can be read. Repair or remove them.")
    scores = average_precision(coco.truth, results, seen, categories)
    if out is not None:
        write_results(out, results)
    if as_json:
        say_json(
            {
                "target": detector.source,
                "model": detector.model,
                "backend": detector.backend,
                **{name: None if value is None else round(value, 4) for name, value in scores.items()},
                "images": len(seen),
                "skipped": skipped,
                "detections": len(results),
                "out": None if out is None else str(out),
                "seconds": round(seconds, 3),
                "seconds_per_image": round(seconds / len(seen), 4),
            }
        )
        return
    each = f"{seconds:.1f} s, {seconds / len(seen):.2f} s per image"
    say(f"{detector.source} ({detector.model}, {detector.backend}) on {len(seen)} images ({data}): {each}")
    cells = {kind: [scores[f"{kind}_{name}"] for name in NAMES] for kind in ("box", "mask")}
    rows = [(kind, *("-" if value is None else f"{value:.1f}" for value in values)) for kind, values in cells.items()]
    say(table(("", *HEADS), rows))
    if out is not None:
        say(f"{len(results)} detections in {out}")
