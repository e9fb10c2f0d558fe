"""`fqvit bench` of a detector: measure its time, memory and time by part, compared with the float detector in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fqvit.bench import ops, report
from fqvit.bench.detector import DetectorBench, bench_pixels, measure_detector, parts_of, parts_text, profile
from fqvit.cli.output import say, say_json
from fqvit.detect.fixed.detector import IntegerDetector
from fqvit.detect.image_files import read_rgb
from fqvit.errors import FqvitError
from fqvit.system.progress import track


def run(
    file: Path,
    libraries: Sequence[str],
    batches: Sequence[int],
    threads: Sequence[int],
    rounds: int,
    weights: str | None,
    image: Path | None,
    by_op: bool,
    as_json: bool,
) -> None:
    if list(batches) != [1]:
        raise FqvitError(f"--batch {','.join(map(str, batches))}: detectors run one image at a time. Leave it out.")
    header = IntegerDetector(file, 1).header
    recipe = header.pyramid.recipe.get("name")
    pixels = bench_pixels(header, None if image is None else read_rgb(image))
    bench = measure_detector(file, pixels, libraries, weights, threads, rounds, track)
    found = bench.found
    times = profile(file, pixels, track) if by_op else []
    height, width = pixels.shape[:2]
    if as_json:
        result: dict[str, object] = {
            "file": str(file),
            "kind": "detector",
            "model": header.model,
            "recipe": recipe,
            "rounds": rounds,
            "image": None if image is None else str(image),
            "size": [height, width],
            "detections": bench.detections,
        }
        say_json({**result, **_summary(bench), **({"by_op": ops.summary(times)} if by_op else {})})
        return
    assert found.peak is not None
    machine = f"{report.machine()['cpu']}, {found.peak.isa}"
    say(f"{file}: {header.model}, recipe {recipe}; {machine}; {report.count(rounds, 'round')}.")
    say(f"Image: {image or 'random'}, {height} x {width} after resizing; {_detections(bench)}.\n")
    say(report.text(found))
    for timings in found.timings:
        say("\n" + parts_text(timings))
    if not any(bench.detections.values()):
        say("\nNo detections, so the mask heads did not run. Measure with a photo (--image IMAGE).")
    if by_op:
        say("\n" + ops.text(times, found.peak))


def _detections(bench: DetectorBench) -> str:
    counts = bench.detections
    if len(set(counts.values())) == 1:
        return report.count(next(iter(counts.values())), "detection")
    return ", ".join(f"{name} {report.count(number, 'detection')}" for name, number in counts.items())


def _summary(bench: DetectorBench) -> dict[str, object]:
    """Return the fields of --json that all programs have, with the times by part of each result added."""
    summary = report.summary(bench.found)
    parts = [{timing.name: parts_of(timing) for timing in timings} for timings in bench.found.timings]
    rounded = [{name: {part: round(ms, 4) for part, ms in own.items()} for name, own in one.items()} for one in parts]
    return {**summary, "parts_ms": rounded}
