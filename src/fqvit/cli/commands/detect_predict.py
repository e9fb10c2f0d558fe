"""`fqvit detect predict`: what a detector finds in images, as a table or as COCO's results."""

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
    """Images that cannot be read are named on stderr; the others are looked at all the same, and the command fails."""
    least = detectors.check_score(score)
    paths = expand_folders(images)
    if out is not None:
        inputs.check_output(out, file, *paths)
    ready = detectors.program(file, backend, threads)
    unreadable = Unreadable(len(paths))
    results: list[NamedResult] = []
    for number, seen in enumerate(detectors.each(ready, paths, least, unreadable)):
        results += seen.results
        if out is None and not as_json:
            say(("\n" if number else "") + _text(seen))
    count = len(paths) - len(unreadable.errors)
    if not count:
        unreadable.refuse()  # before an older output is lost for nothing
    if out is not None:
        write_results(out, results)
    if as_json:
        found: dict[str, object] = {"out": str(out)} if out is not None else {"results": results}
        say_json(
            {"file": str(file), "model": ready.model, "backend": ready.backend, "images": count, "detections": len(results)}
            | found
        )
    elif out is not None:
        say(f"{out}: {len(results)} detections in {'1 image' if count == 1 else f'{count} images'}")
    unreadable.refuse()


def _text(seen: detectors.Seen) -> str:
    head = f"{seen.name} ({seen.image.width} x {seen.image.height})"
    if not seen.results:
        return f"{head}\nnothing found"
    rows = [(r["category"], f"{r['score']:.3f}", *(f"{side:.1f}" for side in r["bbox"])) for r in seen.results]
    return f"{head}\n{table(('class', 'score', 'x', 'y', 'width', 'height'), rows)}"
