"""The report of a detector is escaped, self-contained and complete, and the command writes it or reports mistakes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fqvit.bench.detector_runs import BETWEEN, NETWORKS
from fqvit.errors import FqvitError
from fqvit.evaluate.compare import Comparison
from fqvit.evaluate.compare_detector import DetectorComparison
from fqvit.evaluate.detections import Match, Pair, agreement
from fqvit.report import detector_plots, plots
from fqvit.report.detector import gather_detector
from fqvit.report.detector_page import _cards, detector_pictures_of
from fqvit.report.frame import in_order
from tests.cli.command_line import assert_rejected, fqvit
from tests.detect.saved import home as home
from tests.detect.saved import shape_detector, shape_program
from tests.report.conftest import DRAWN, DetectorPage
from tests.report.test_page import Reader


def test_hostile_names_are_escaped_and_nothing_is_loaded(detector: DetectorPage) -> None:
    reader = Reader(detector.page)
    scripts = [attributes for tag, attributes in reader.tags if tag == "script"]
    assert len(scripts) == 1 and "<b>bold</b>" not in detector.page and "<u>careful</u>" not in detector.page
    for tag, attributes in reader.tags:
        for name in ("src", "href"):
            value = attributes.get(name) or ""
            assert value.startswith(("data:", "#")) or not value, (tag, value[:60])
    ids = [attributes["id"] for _, attributes in reader.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    targets = {attributes["href"] for tag, attributes in reader.tags if tag == "a"}
    assert all((target or "#")[1:] in ids for target in targets)


def test_every_site_has_a_row_and_every_drawn_image_two_pictures(detector: DetectorPage) -> None:
    report, reader = detector.report, Reader(detector.page)
    words = " ".join(reader.words)
    names = {row.site for row in report.inspection.sites}
    assert {"neck.output.0", "boxes.0/roi features", "masks.0/relu"} <= names and all(name in words for name in names)
    pictures = [attributes["src"] for tag, attributes in reader.tags if tag == "img"]
    drawn = len(report.drawn) + len(report.differing)
    assert len(pictures) == 2 * drawn and all((picture or "").startswith("data:image/jpeg") for picture in pictures)
    assert len(report.drawn) == report.sites.images == DRAWN and report.comparison.images == 4
    assert "boxes found" in words and "box overlap" in words and "speed (rough)" in words
    assert report.inspection.total == Path(detector.path.parent / "detector.fqvit").stat().st_size
    assert report.inspection.floats == 0 and len(report.inspection.proofs) > 50
    assert len(detector.page) < 3_000_000


def test_sites_are_in_network_order(detector: DetectorPage) -> None:
    report = detector.report
    rows = in_order(report.sites, report.inspection)
    assert len(rows) == len(report.sites.sites)
    parts = [row.site.partition("/")[0] if "/" in row.site else row.site.partition(".")[0] for row in rows]
    assert list(dict.fromkeys(parts)) == ["backbone", "neck", "rpn_head", "boxes.0", "masks.0"]
    assert parts == sorted(parts, key=["backbone", "neck", "rpn_head", "boxes.0", "masks.0"].index)
    assert next(row.site for row in rows if "/" in row.site) == "boxes.0/roi features"
    labels = [name for _, name in plots.block_starts(rows)]
    assert {"FPN", "RPN", "boxes", "masks"} <= set(labels) and "0.0" in labels


def test_figures_show_all_scores_and_parts(detector: DetectorPage) -> None:
    found = dict(detector_pictures_of(detector.report))
    assert list(found) == ["scores", "parts", "site-errors"]
    pairs = sum(len(match.pairs) for match in detector.report.matches)
    assert f"{pairs:,} matched" in found["scores"]
    assert all(f">{part}</text>" in found["parts"] for part in (*NETWORKS, *BETWEEN, "between the networks"))


def test_detections_without_a_partner_are_drawn_outside_of_the_axes() -> None:
    match = Match(np.array([0.9, 0.4]), np.array([0.8, 0.3]), [Pair((0, 0), (0.9, 0.8), 0.9, 0.8)], [1], [1])
    svg = detector_plots.scores([match])
    assert "float 0.400, no integer detection" in svg and "integer 0.300, no float detection" in svg
    assert "float 0.900, integer 0.800" in svg and "1 missing" in svg and "1 extra" in svg


def test_a_report_without_detections_says_so(detector: DetectorPage) -> None:
    import dataclasses

    empty = Match(np.zeros(0), np.zeros(0), [], [], [])
    comparison = DetectorComparison(1, {"pyramid": Comparison(1, [], None, None)}, [agreement([empty], 0.05)])
    (card,) = _cards(dataclasses.replace(detector.report, comparison=comparison))
    assert card.figure == "0" and "finds nothing" in card.more


def test_a_report_without_images_is_an_error(tmp_path: Path) -> None:
    shape_program().save(tmp_path / "d.fqvit")
    with pytest.raises(FqvitError, match="no images were read"):
        gather_detector(shape_program(), tmp_path / "d.fqvit", shape_detector(), [], 0)


def test_the_command_writes_a_page_and_figures(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    words = ("report", "shapes.fqvit", "--weights", "shapes.safetensors", "--data", "val", "--limit", 2)
    out, folder = tmp_path / "r.html", tmp_path / "figures"
    found = fqvit(*words, "-o", out, "--pictures", folder, "--json").json
    assert found["kind"] == "detector" and found["images"] == 2 and found["bytes"] == out.stat().st_size
    assert found["program_bytes"] == Path("shapes.fqvit").stat().st_size < found["float32_bytes"]
    assert len(found["pictures"]) == 3 and all(Path(path).read_text().startswith("<?xml") for path in found["pictures"])
    assert found["detections"][0]["float_count"] > 0 and set(found["parts_ms"]) == {"integer", "float"}
    text = out.read_text(encoding="utf-8")
    assert "000001.jpg" in text and "fqvit report shapes.fqvit --weights shapes.safetensors --data val --limit 2" in text
    said = fqvit(*words[:-1], 1, "-o", out)
    assert said.code == 0 and "Written:" in said.out and "mask IoU" in said.out


def test_mistakes_are_reported_in_one_line(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    weights, out = ("--weights", "shapes.safetensors"), ("-o", tmp_path / "r.html")
    for words, said in (
        ((*out, "--data", "val"), "--weights FILE"),
        ((*out, *weights), "--data DIR"),
        ((*out, *weights, "--data", "nowhere"), "nowhere"),
        ((*out, *weights, "--data", "val", "--classes", "names.txt"), "--classes"),
        ((*out, *weights, "--data", "val", "--table", "t.csv"), "--table"),
        ((*out, *weights, "--data", "val", "--heads", "3"), "--heads"),
        (("-o", "shapes.fqvit", *weights, "--data", "val"), "would be overwritten"),
    ):
        assert_rejected(fqvit("report", "shapes.fqvit", *words), said)
    assert not (tmp_path / "r.html").exists()
