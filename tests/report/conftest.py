"""Fixtures: one small report of the embedded ViT, and one of a detector, for all tests in this folder.

The program has low bit widths, so that its predictions differ from those of the float model, and its class names contain HTML
that tries to break out of the page.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("jinja2")

import fqvit
from fqvit.evaluate.accuracy import arrays
from fqvit.models import embedded
from fqvit.quant.recipe import with_bits
from fqvit.report.detector import DetectorReport, gather_detector
from fqvit.report.detector_page import render_detector
from fqvit.report.frame import About
from fqvit.report.gather import BATCH, Report, gather
from fqvit.report.page import render
from fqvit.system.progress import track
from tests.detect.saved import shape_detector, shape_program
from tests.detect.test_programs import sample_images

HOSTILE = (
    "<script>window.broken = 1</script>",
    '"><img src=x onerror="window.broken = 2">',
    "</style></svg><b>bold</b>",
    "{{ 7 * 7 }}",
    "javascript:alert(1)",
    "& &lt; &amp;",
    "' onmouseover='window.broken=3",
    "\u202ereversed",
    "a very long name " * 12,
    "]]>-->",
)


DRAWN = 2  # images of the detector that are drawn


@dataclass(frozen=True)
class Made:
    report: Report
    page: str
    path: Path


@dataclass(frozen=True)
class DetectorPage:
    report: DetectorReport
    page: str
    path: Path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("report")
    model = fqvit.load_model("fmnist_vit", classes=HOSTILE)
    recipe = with_bits(fqvit.load_recipe("minmax"), "4/5/4")
    program = fqvit.lower(model, fqvit.calibrate(model, embedded.calibration_images()[:32], recipe))
    header = msgspec.structs.replace(
        program.header,
        model="<b>model</b>",
        source="<script>window.broken = 4</script>",
        recipe=program.header.recipe | {"name": "\"'><script>window.broken = 5</script>"},
    )
    program = fqvit.Program(header, program.constants)
    file = folder / "model.fqvit"
    program.save(file)
    pixels, labels = embedded.test_images()
    batches = arrays(pixels[::4], labels[::4], BATCH)
    report = gather(fqvit.Program.load(file), file, model, batches, len(pixels[::4]), track)
    about = About(
        command="fqvit report '<script>'",
        file="<i>model</i>.fqvit",
        where="a & b",
        date="today",
        names=HOSTILE,
        warnings=["<u>careful</u>"],
    )
    page = render(report, about)
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return Made(report, page, path)


@pytest.fixture(scope="session")
def detector(tmp_path_factory: pytest.TempPathFactory) -> DetectorPage:
    """Make the report of a small random detector on four images, with hostile class and file names."""
    folder = tmp_path_factory.mktemp("detector")
    own = shape_program()
    program = dataclasses.replace(own, settings=msgspec.structs.replace(own.settings, classes=HOSTILE[:8]))
    file = folder / "detector.fqvit"
    program.save(file)
    images = [(f"{folder}/{name}", image) for name, image in zip(HOSTILE, sample_images(), strict=False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fqvit.report.detector.DRAWN", DRAWN)  # comparing sites is slow
        report = gather_detector(program, file, shape_detector(), images, len(images))
    about = About("fqvit report '<script>'", "<i>detector</i>.fqvit", str(folder), "today", HOSTILE[:8], ["<u>careful</u>"])
    page = render_detector(report, about)
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return DetectorPage(report, page, path)
