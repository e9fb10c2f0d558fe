"""Render the report of a detector as one self-contained HTML page. detector.html arranges it.

See also: frame.py (what all pages share), detector.py (the data), detector_plots.py (figures), page.py (classifiers).
"""

from __future__ import annotations

from typing import Any

from fqvit.detect.program import DetectorProgram
from fqvit.report import detector_plots, plots
from fqvit.report.detector import LOWEST, DetectorReport, DrawnImage
from fqvit.report.frame import About, Card, Picture, Subject, cards_of, in_order, render_page, safe


def render_detector(report: DetectorReport, about: About) -> str:
    """Return the page as HTML text. Raises FqvitError if jinja2 is not installed."""
    subject = subject_of_detector(report)
    context = {
        "report": report,
        "cards": [*_cards(report), *cards_of(subject)],
        "agreements": report.comparison.detections,
        "images_drawn": _groups(report, about),
        "pictures": [(one, safe(one.svg)) for one in detector_pictures(report)],
        "lowest_drawn": max(LOWEST, report.program.settings.score),
        "parts": _parts(report),
    }
    return render_page("detector.html", subject, about, context, ("detector.css",))


def detector_pictures(report: DetectorReport) -> list[Picture]:
    """Draw the figures, except for the errors of sites."""
    scores = (
        "Every dot is a detection. Matched detections lie near the diagonal; those of only one detector lie outside of the"
        " axes. Detections with a low score appear and disappear easily, because small errors move them across the threshold of"
        f" {report.program.settings.score:g}."
    )
    times = (
        "One image, one thread, median of wall times. Between the networks are padding, proposals with non-maximum suppression,"
        " RoIAlign, and selecting detections; the float detector computes these steps in numpy."
    )
    return [
        Picture("scores", "Scores, float and integer", scores, detector_plots.scores(report.matches)),
        Picture("parts", "Time by part", times, detector_plots.part_times(*report.parts)),
    ]


def detector_pictures_of(report: DetectorReport) -> list[tuple[str, str]]:
    """Draw every figure as (name, SVG), to be written to files."""
    found = [(one.key, one.svg) for one in detector_pictures(report)]
    return [*found, ("site-errors", plots.site_errors(in_order(report.sites, report.inspection)))]


def subject_of_detector(report: DetectorReport) -> Subject:
    """Return what every page says about its program."""
    program = report.program
    header = program.pyramid.header
    return Subject(
        model=program.model,
        source=program.source,
        version=program.header.version,
        fingerprint=program.fingerprint(),
        recipe=header.recipe,
        calibration_images=header.images,
        input=_input(program),
        images=report.comparison.images,
        inspection=report.inspection,
        sites=report.sites,
        parameters=report.parameters,
        speed=report.speed,
    )


def _input(program: DetectorProgram) -> str:
    s = program.settings
    return f"uint8 images of any size, resized to a short side of at most {s.short} and a long side of at most {s.long} pixels"


def _cards(report: DetectorReport) -> list[Card]:
    """Return the cards about detections: from the smallest score that is drawn, or all of them if there are none."""
    rows = report.comparison.detections
    row = next((row for row in rows if row.score >= LOWEST and row.float_count), rows[0])
    if not row.float_count:
        return [Card("detections", str(row.integer_count), "of the program; the float detector finds nothing in these images")]
    share = 100 * row.matched / row.float_count
    found = f"of {row.float_count:,} float detections with a score of at least {row.score:g} have an integer partner"
    alone = f"float detections without a partner; {row.extra} integer detections without one"
    cards = [Card("boxes found", f"{share:.1f} %", found), Card("missing", str(row.missing), alone)]
    if row.box_iou is not None and row.mask_iou is not None and row.score_difference is not None:
        cards.append(Card("box overlap", f"{row.box_iou:.3f}", "mean IoU of the boxes of matched detections"))
        cards.append(Card("mask overlap", f"{row.mask_iou:.3f}", "mean IoU of the masks of matched detections"))
        largest = f"mean over matched detections; largest {row.largest_score_difference:.3f}"
        cards.append(Card("score change", f"{row.score_difference:.4f}", largest))
    return cards


def _groups(report: DetectorReport, about: About) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Return (title, text, images) of the groups of drawn images; empty groups are left out."""
    few = "Evenly spaced images." if report.comparison.images > len(report.drawn) else "All images."
    most = "The images with the most missing and extra detections among the others."
    groups = (("Float and integer side by side", few, report.drawn), ("Where they differ most", most, report.differing))
    return [(title, text, [_shown(one, about) for one in images]) for title, text, images in groups if images]


def _shown(one: DrawnImage, about: About) -> dict[str, Any]:
    words = [f"{one.matched} matched", f"{one.missing} missing", f"{one.extra} extra"]
    if one.box_iou is not None and one.mask_iou is not None:
        words.append(f"IoU of boxes {one.box_iou:.3f}, of masks {one.mask_iou:.3f}")
    name = one.name.removeprefix(about.where).lstrip("/\\") or one.name
    sides = (("float", one.float_picture, one.counts[0]), ("integer", one.integer_picture, one.counts[1]))
    return {
        "name": name,
        "words": ", ".join(words),
        "sides": sides,
        "size": one.size,
        "same": not one.missing and not one.extra,
    }


def _parts(report: DetectorReport) -> list[tuple[str, int, int, float | None, str]]:
    """Return (name, ops, sites, lowest decibels, its site) of each network."""
    rows = []
    for name, program in report.program.parts():
        part = report.comparison.parts.get(name)
        worst = min(
            ((row.integer_db, row.site) for row in (part.sites if part else ()) if row.integer_db is not None),
            default=(None, ""),
        )
        rows.append((name, len(program.ops), len(program.header.sites), *worst))
    return rows
