"""`fqvit compare` of a detector: match its boxes and masks with the float detector's, and list the errors of all sites."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fqvit.cli import inputs
from fqvit.cli.commands import detectors
from fqvit.cli.commands.compare import site_table
from fqvit.cli.output import say, say_json, warn, warn_of_skipped
from fqvit.detect.program import DetectorProgram
from fqvit.errors import FqvitError
from fqvit.evaluate.detections import Agreement
from fqvit.system.progress import track
from fqvit.system.text import table

if TYPE_CHECKING:
    from fqvit.evaluate.compare import Comparison
    from fqvit.evaluate.compare_detector import DetectorComparison


def run(file: Path, weights: str | None, data: Path | None, limit: int, baseline: Path | None, as_json: bool) -> None:
    program = DetectorProgram.load(file)
    other = None if baseline is None else DetectorProgram.load(baseline)
    if other is not None and (other.model, other.settings) != (program.model, program.settings):
        raise FqvitError(
            f"{baseline}: its model or settings differ from those of {file}. Pass two programs of the same detector."
        )
    files = detectors.images_in(data, "compare", limit)
    inputs.require_torch("compare")
    from fqvit.evaluate.compare_detector import DetectorComparer
    from fqvit.models.device import one_thread

    with one_thread():
        detector = detectors.float_of_program(program, weights, "compare")
        comparers = [DetectorComparer(each, detector) for each in (program, other) if each is not None]
        for text in inputs.other_weights(detector, program, file):
            warn(text)
        for index, image in track(files, len(files), "comparing", "images"):
            for comparer in comparers:
                comparer.add(image, str(files.paths[index]))
    skipped = warn_of_skipped(files)
    found = comparers[0].result()
    before = comparers[1].result() if baseline is not None else None
    if as_json:
        result = {"file": str(file), "kind": "detector", "model": program.model, "images": found.images, "skipped": skipped}
        result |= _summary(found)
        say_json(result if before is None else result | {"baseline": {"file": str(baseline)} | _summary(before)})
        return
    say(f"{file} compared with the float detector {program.model} on {found.images} images ({data}).")
    say("Detections by minimum score. Matched: same class, boxes with an IoU of at least 0.5. Means are over matched pairs.\n")
    say(detection_table(found.detections))
    if before is not None:
        say(f"\nThe same for {baseline}:\n{detection_table(before.detections)}")
    say(
        "\nSignal-to-noise ratio in dB, worst first: integer program, its float simulation, and the rounding of this site only."
    )
    if before is not None:
        say(f"Last two columns: the integer program {baseline}, and the gain over it.")
    for name, part in found.parts.items():
        say(f"\n{title(name, part)}")
        say(site_table(part, None if before is None else before.parts.get(name)))


def title(name: str, part: Comparison) -> str:
    """Return a line about one network, such as "boxes.0: 5 sites, 512 boxes"."""
    what = "image" if name == "pyramid" else "box"
    plural = {"image": "images", "box": "boxes"}
    return f"{name}: {len(part.sites)} sites, {part.images} {what if part.images == 1 else plural[what]}"


def detection_table(rows: Sequence[Agreement]) -> str:
    """Return the table of detections, with one row per minimum score."""
    heads = (
        "score",
        "float",
        "integer",
        "matched",
        "IoU 0.75",
        "missing",
        "extra",
        "box IoU",
        "mask IoU",
        "score diff",
        "largest",
    )
    cells = []
    for row in rows:
        counts = (row.float_count, row.integer_count, row.matched, row.close, row.missing, row.extra)
        means = (row.box_iou, row.mask_iou, row.score_difference, row.largest_score_difference)
        cells.append((f">= {row.score:g}", *map(str, counts), *("-" if mean is None else f"{mean:.4f}" for mean in means)))
    return table(heads, cells)


def _summary(found: DetectorComparison) -> dict[str, Any]:
    return {
        "detections": msgspec.to_builtins(found.detections),
        "parts": {
            name: {"inputs": part.images, "sites": msgspec.to_builtins(part.sites)} for name, part in found.parts.items()
        },
    }
