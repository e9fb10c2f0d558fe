"""`fqvit detect predict`: detect objects in images, and print a table or write COCO results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fqvit.cli import inputs
from fqvit.cli.commands import detectors
from fqvit.cli.output import Unreadable, say, say_json
from fqvit.detect.image_files import expand_folders
from fqvit.detect.results import NamedResult, write_results
from fqvit.system.text import table

if TYPE_CHECKING:
    from fqvit.detect.fixed.detector import Backend


def run(
    file: Path,
    images: list[Path],
    out: Path | None,
    score: float | None,
    backend: Backend | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Detect objects. Unreadable images are reported on stderr; the command goes on with the others and fails at the end."""
    least = detectors.check_score(score)
    paths = expand_folders(images)
    if out is not None:
        inputs.check_output(out, file, *paths)
    detector = detectors.load_program(file, backend, threads)
    unreadable = Unreadable(len(paths))
    results: list[NamedResult] = []
    for number, found in enumerate(detectors.detect_images(detector, paths, least, unreadable)):
        results += found.results
        if out is None and not as_json:
            say(("\n" if number else "") + _text(found))
    count = len(paths) - len(unreadable.errors)
    if not count:
        unreadable.raise_if_any()  # before an existing output is replaced by an empty one
    if out is not None:
        write_results(out, results)
    if as_json:
        output: dict[str, object] = {"out": str(out)} if out is not None else {"results": results}
        say_json(
            {
                "file": str(file),
                "model": detector.model,
                "backend": detector.backend,
                "images": count,
                "detections": len(results),
            }
            | output
        )
    elif out is not None:
        detections = "1 detection" if len(results) == 1 else f"{len(results)} detections"
        say(f"{out}: {detections} in {'1 image' if count == 1 else f'{count} images'}")
    unreadable.raise_if_any()


def _text(found: detectors.ImageResults) -> str:
    head = f"{found.name} ({found.image.width} x {found.image.height})"
    if not found.results:
        return f"{head}\nnothing found"
    rows = [(r["category"], f"{r['score']:.3f}", *(f"{side:.1f}" for side in r["bbox"])) for r in found.results]
    return f"{head}\n{table(('class', 'score', 'x', 'y', 'width', 'height'), rows)}"
