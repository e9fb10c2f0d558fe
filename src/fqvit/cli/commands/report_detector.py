"""`fqvit report` of a detector: write an HTML page with float and integer detections side by side, and print a summary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from PIL import Image

from fqvit.cli import inputs
from fqvit.cli.commands import detectors
from fqvit.cli.commands.compare_detector import detection_table
from fqvit.cli.commands.report import checked_target, command_line, now, write
from fqvit.cli.output import say, say_json, warn, warn_of_skipped
from fqvit.detect.image_files import ImageFiles
from fqvit.detect.program import DetectorProgram
from fqvit.errors import FqvitError
from fqvit.system.progress import track

if TYPE_CHECKING:
    from fqvit.report.detector import DetectorReport

LIMIT = 50


def run(
    file: Path,
    weights: str | None,
    data: Path | None,
    classes: Path | None,
    limit: int | None,
    out: Path | None,
    pictures: Path | None,
    measured: Path | None,
    as_json: bool,
) -> None:
    for option, value in (("--classes", classes), ("--table", measured)):
        if value is not None:
            raise FqvitError(f"{option} {value}: not for detectors. Leave it out.")
    program = DetectorProgram.load(file)
    target = checked_target(file, out, pictures, weights)
    files = detectors.images_in(data, "report", LIMIT if limit is None else limit)
    from fqvit.report.detector import gather_detector
    from fqvit.report.detector_page import detector_pictures_of, render_detector
    from fqvit.report.frame import About

    detector = detectors.float_of_program(program, weights, "report")
    warnings = inputs.other_weights(detector, program, file)
    for text in warnings:
        warn(text)
    found = gather_detector(program, file, detector, _named(files), len(files))
    skipped = warn_of_skipped(files)
    options = {"--weights": weights, "--data": data, "--limit": limit, "-o": target, "--pictures": pictures}
    about = About(
        command=command_line(file, options),
        file=str(file),
        where=str(data),
        date=now(),
        names=program.settings.classes,
        warnings=warnings,
        skipped=skipped,
    )
    figures = [] if pictures is None else detector_pictures_of(found)
    written = write(target, render_detector(found, about), pictures, figures)
    if as_json:
        say_json(summary(found) | {"file": str(file)} | written.summary() | {"skipped": skipped})
        return
    speed = found.speed
    say(f"{file} compared with the float detector {program.model} on {found.comparison.images} images ({data}).\n")
    say(detection_table(found.comparison.detections))
    say(f"\nAbout {speed.ratio:.1f}x the speed of PyTorch on one thread; `fqvit bench` measures precisely.")
    say(written.text())


def _named(files: ImageFiles) -> Iterator[tuple[str, Image.Image]]:
    for index, image in track(files, len(files), "float and integer", "images"):
        yield str(files.paths[index]), image


def summary(found: DetectorReport) -> dict[str, object]:
    """Return the object that --json prints."""
    program, inspection, speed = found.program, found.inspection, found.speed
    integer, exact = ({part: round(ms, 3) for part, ms in own.items()} for own in found.parts)
    return {
        "kind": "detector",
        "model": program.model,
        "images": found.comparison.images,
        "detections": msgspec.to_builtins(found.comparison.detections),
        "program_bytes": inspection.total,
        "float32_bytes": 4 * found.parameters,
        "float_ops": inspection.floats,
        "proof_count": len(inspection.proofs),
        "fingerprint": program.fingerprint(),
        "speed": {"integer_ms": round(speed.integer_ms, 3), "float_ms": round(speed.float_ms, 3), "isa": speed.isa},
        "parts_ms": {"integer": integer, "float": exact},
        "sites": msgspec.to_builtins(found.sites.sites),
    }
