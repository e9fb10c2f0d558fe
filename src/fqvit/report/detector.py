"""Run the float and the integer detector on images and gather all data of a detector's report. Needs torch.

All images are used to compare detections; a few evenly spaced ones are drawn, and their sites are compared.
See also: detector_page.py (shows the data), evaluate/compare_detector.py, gather.py (classifiers and embeddings).
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fqvit.bench.detector import parts_of
from fqvit.bench.detector_floats import FloatRun
from fqvit.bench.detector_runs import IntegerRun
from fqvit.bench.rounds import Timing
from fqvit.detect.draw import draw
from fqvit.detect.model.detector import FloatDetector
from fqvit.detect.program import DetectorProgram
from fqvit.errors import FqvitError
from fqvit.evaluate.compare import Comparison
from fqvit.evaluate.compare_detector import ROI_FEATURES, ComparedImage, DetectorComparer, DetectorComparison
from fqvit.evaluate.detections import Match
from fqvit.evaluate.inspect import Inspection, SiteRow, inspect_part, merged, part_name
from fqvit.ir.program import Program
from fqvit.models.device import one_thread
from fqvit.report.maps import jpeg
from fqvit.report.speed import Speed, alternate
from fqvit.runtime.native import instruction_set, instruction_sets

DRAWN = 8  # images that are drawn and whose sites are compared
DIFFERING = 4  # further images that are drawn: those in which the detectors differ most
LOWEST = 0.3  # score of the detections that are drawn, and of those that count for DIFFERING
SIDE = 720  # long side of a drawn image in pixels


@dataclass(frozen=True)
class DrawnImage:
    """An image with the detections of the float and of the integer detector, as data: URIs.

    counts: drawn detections of both   matched, missing, extra: as in evaluate.detections.Agreement, for scores from LOWEST
    """

    name: str
    size: tuple[int, int]
    float_picture: str
    integer_picture: str
    counts: tuple[int, int]
    matched: int
    missing: int
    extra: int
    box_iou: float | None
    mask_iou: float | None


@dataclass(frozen=True)
class DetectorReport:
    """All data of one report.

    sites: the sites of all networks   drawn: evenly spaced images   differing: images in which the detectors differ most
    parts: median milliseconds of each part of a run, integer and float; see bench/detector.py
    """

    program: DetectorProgram
    inspection: Inspection
    comparison: DetectorComparison
    sites: Comparison
    matches: list[Match]
    drawn: list[DrawnImage]
    differing: list[DrawnImage]
    speed: Speed
    parts: tuple[dict[str, float], dict[str, float]]
    parameters: int


def gather_detector(
    program: DetectorProgram, path: Path, detector: FloatDetector, images: Iterable[tuple[str, Image.Image]], total: int
) -> DetectorReport:
    """Gather a report. path: file of the program   images: pairs of name and image, `total` in all

    Raises FqvitError if there are no images.
    """
    comparer = DetectorComparer(program, detector)
    wanted = {i * total // DRAWN for i in range(min(DRAWN, total))} if total > DRAWN else set(range(total))
    drawn: list[DrawnImage] = []
    differing: list[tuple[int, ComparedImage, Image.Image]] = []
    pixels: NDArray[np.uint8] | None = None
    with one_thread():
        for number, (name, image) in enumerate(images):
            if number in wanted or pixels is None:
                found = comparer.add(image, name)
                drawn.append(draw_both(image, found))
                pixels = program.prepare(image).pixels if pixels is None else pixels
                continue
            found = comparer.add_detections(image, name)
            differing.append((_differences(found.match), found, image))
            differing = sorted(differing, key=lambda one: -one[0])[:DIFFERING]
        if pixels is None:
            raise FqvitError("report: no images were read. Pass a folder with at least one readable image.")
        speed, parts = _quick_look(program, detector, pixels)
    result = comparer.result()
    return DetectorReport(
        program=program,
        inspection=_inspection(program, path),
        comparison=result,
        sites=_all_sites(result),
        matches=comparer.matches,
        drawn=drawn,
        differing=[draw_both(image, found) for differences, found, image in differing if differences],
        speed=speed,
        parts=parts,
        parameters=sum(parameter.numel() for parameter in detector.module.parameters()),
    )


def draw_both(image: Image.Image, found: ComparedImage) -> DrawnImage:
    """Draw the detections with a score of at least LOWEST."""
    shown = [[result for result in own if result["score"] >= LOWEST] for own in (found.floats, found.integers)]
    pictures = [jpeg(np.asarray(draw(image, own, found.name)), SIDE) for own in shown]
    pairs = [pair for pair in found.match.pairs if pair.scores[0] >= LOWEST]
    missing, extra = _alone(found.match)
    return DrawnImage(
        name=found.name,
        size=image.size,
        float_picture=pictures[0],
        integer_picture=pictures[1],
        counts=(len(shown[0]), len(shown[1])),
        matched=len(pairs),
        missing=missing,
        extra=extra,
        box_iou=statistics.mean(pair.box_iou for pair in pairs) if pairs else None,
        mask_iou=statistics.mean(pair.mask_iou for pair in pairs) if pairs else None,
    )


def _alone(match: Match) -> tuple[int, int]:
    """Return the numbers of missing and of extra detections with a score of at least LOWEST."""
    missing, extra = match.float_scores[match.float_only], match.integer_scores[match.integer_only]
    return int((missing >= LOWEST).sum()), int((extra >= LOWEST).sum())


def _differences(match: Match) -> int:
    return sum(_alone(match))


def _quick_look(
    program: DetectorProgram, detector: FloatDetector, pixels: NDArray[np.uint8]
) -> tuple[Speed, tuple[dict[str, float], dict[str, float]]]:
    """Time both detectors on one resized image, on one thread: see report/speed.py."""
    runs = IntegerRun(program, pixels, 1), FloatRun(detector, pixels)
    names = ("fqvit", "torch fp32")
    timings = [Timing(name, 1, 1) for name in names]

    def timed(number: int) -> None:
        timing, start = timings[number], time.perf_counter()
        runs[number]()
        timing.wall.append(time.perf_counter() - start)
        for part, seconds in runs[number].parts.items():
            timing.parts.setdefault(part, []).append(seconds)

    with torch.inference_mode():
        cpu = alternate(lambda: timed(0), lambda: timed(1))
    integer_ms, float_ms = (statistics.median(own) for own in cpu)
    isa = instruction_set(None) or instruction_sets()[0]
    parts = parts_of(timings[0]), parts_of(timings[1])
    return Speed(integer_ms, float_ms, isa, len(cpu[0])), parts


def _inspection(program: DetectorProgram, path: Path) -> Inspection:
    """Combine the summaries of all networks; the features that a head reads are the first of its sites."""
    parts = {}
    for name, part in program.parts():
        found = inspect_part(part)
        parts[name] = dataclasses.replace(found, sites=[*_roi_features(part), *found.sites])
    return merged(parts, path.stat().st_size)


def _roi_features(program: Program) -> list[SiteRow]:
    roi = program.header.input
    if roi is None:
        return []
    lowest, highest = -roi.zero * roi.scale, (2**roi.bits - 1 - roi.zero) * roi.scale
    return [SiteRow(ROI_FEATURES, "roi", roi.bits, "affine", (roi.scale,), (roi.zero,), 0, lowest, highest)]


def _all_sites(found: DetectorComparison) -> Comparison:
    """Combine the sites of all networks, with the names of _inspection."""
    rows = [
        msgspec.structs.replace(row, site=part_name(part, row.site)) for part, own in found.parts.items() for row in own.sites
    ]
    return Comparison(found.parts["pyramid"].images, rows, None, None)
