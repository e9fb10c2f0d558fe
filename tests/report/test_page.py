"""The report page is escaped, self-contained and complete, and the command writes it or reports mistakes."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fqvit.models import embedded
from tests.cli.command_line import assert_rejected, fqvit
from tests.report.conftest import HOSTILE, Made


class Reader(HTMLParser):
    """Collects tags with their attributes, and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_table_adds_the_figure_of_accuracy_against_size(programs: Path, tmp_path: Path) -> None:
    table, out = tmp_path / "table.csv", tmp_path / "r.html"
    head = "model,method,bits,runs,top1,file_bytes\n"
    table.write_text(head + "fmnist_vit,float,32/32/32,float,92.4,0\nfmnist_vit,w4,4/8/4,integer,91.0,330000\n")
    done = fqvit("report", programs / "vit.fqvit", "--limit", 40, "-o", out, "--table", table)
    assert done.code == 0
    page = out.read_text()
    assert "Accuracy against file size" in page and "w4 4/8/4" in page and "The coloured name is this program" in page
    table.write_text(head + "other,w4,4/8/4,integer,91.0,330000\n")
    words = ("report", programs / "vit.fqvit", "-o", out, "--table", table)
    assert_rejected(fqvit(*words), "has no row for an integer program of fmnist_vit", "Leave out --table")


def test_hostile_names_are_escaped(made: Made) -> None:
    read = Reader(made.page)
    kinds = {tag for tag, _ in read.tags}
    assert (
        [tag for tag, _ in read.tags].count("script") == 1
        and not kinds & {"i", "u", "iframe", "object"}
        and "<b>model</b>" in "".join(read.words)
    )
    assert not [key for _, attributes in read.tags for key in attributes if key.startswith("on") or key == "style"]
    text = "".join(read.words)
    shown = {HOSTILE[guess.label] for one in made.report.predictions.disagreements for guess in one.float_guesses}  # type: ignore[union-attr]
    assert len(shown) >= 8 and all(name in text for name in shown)
    assert "<u>careful</u>" in text and "<i>model</i>.fqvit" in text and HOSTILE[3] in text


def test_the_page_references_no_external_resources(made: Made) -> None:
    urls = [value for _, attributes in Reader(made.page).tags for key in ("src", "href") if (value := attributes.get(key))]
    assert urls and all(url.startswith(("#", "data:")) for url in urls)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', made.page)
    assert policy is not None and "default-src &#39;none&#39;" in policy[1] and "unsafe" not in policy[1]
    assert "url(" not in made.page and "@import" not in made.page


def test_ids_are_unique_and_every_link_has_a_target(made: Made) -> None:
    tags = Reader(made.page).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {value[1:] for _, a in tags if (value := a.get("href") or "").startswith("#")} <= set(ids)


def test_every_site_has_a_row_and_the_summary_has_the_accuracy(made: Made) -> None:
    sites = made.report.inspection.sites
    assert made.page.count('<th scope="row"><code>') >= len(sites)
    assert all(f"<code>{row.site}</code>" in made.page for row in sites)
    assert made.report.fingerprint in made.page
    accuracy = made.report.predictions.accuracy()  # type: ignore[union-attr]
    assert accuracy is not None and f"{accuracy.integer_top1:.1f} %" in made.page


def test_the_page_is_small(made: Made) -> None:
    assert len(made.page.encode()) < 600_000


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    assert fqvit("quantize", "--images", 16, "-o", folder / "vit.fqvit").code == 0
    assert fqvit("quantize", "fmnist_swin", "--images", 16, "--features", "pooled", "-o", folder / "pooled.fqvit").code == 0
    return folder


def with_images(folder: Path, names: list[str]) -> Path:
    """Write one test image per name into the folder and return the folder."""
    for i, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(embedded.test_images()[0][i * 90, ..., 0]).save(path)
    return folder


def test_the_command_writes_a_page_figures_and_json(programs: Path) -> None:
    start = time.perf_counter()
    out, folder = programs / "r.html", programs / "pictures"
    done = fqvit("report", programs / "vit.fqvit", "--limit", 40, "-o", out, "--pictures", folder, "--json").json
    assert done["images"] == 40 and done["float_ops"] == 0 and done["bytes"] == out.stat().st_size
    assert done["accuracy"].keys() == {"exact_top1", "exact_top5", "integer_top1", "integer_top5", "pair"}
    assert done["accuracy"]["integer_top1"] > 70 and done["agreement"] > 90
    assert done["exp_gaps"]["polynomials"]["code"] == pytest.approx(1.913e-3, rel=1e-3)
    assert 0.5 < done["attention"]["share_below_sixteenth"] < 1 and done["attention"]["log2_bins_below_sixteenth"] == 12
    assert sorted(path.name for path in folder.iterdir()) == sorted(Path(name).name for name in done["pictures"])
    assert (folder / "attention-maps-1.svg").read_text().startswith("<?xml")
    assert json.dumps(done) and time.perf_counter() - start < 30


def test_images_without_labels_give_agreement_but_no_accuracy(programs: Path, tmp_path: Path) -> None:
    data = with_images(tmp_path / "photos", [f"{i}.png" for i in range(5)])
    done = fqvit("report", programs / "vit.fqvit", "--data", data, "-o", tmp_path / "r.html", "--json")
    assert done.json["accuracy"] is None and done.json["agreement"] is not None and done.err == ""
    page = (tmp_path / "r.html").read_text()
    assert "no labels" in page and 'id="classes"' not in page


def test_folders_that_are_not_classes_give_a_warning(programs: Path, tmp_path: Path) -> None:
    data = with_images(tmp_path / "photos", ["summer/1.png", "winter/2.png"])
    done = fqvit("report", programs / "vit.fqvit", "--data", data, "-o", tmp_path / "r.html")
    assert done.code == 0 and "warning: the images are read without labels" in done.err and "summer" in done.err
    assert "read without labels" in (tmp_path / "r.html").read_text()


def test_feature_programs_have_a_report(programs: Path, tmp_path: Path) -> None:
    done = fqvit("report", programs / "pooled.fqvit", "--limit", 16, "-o", tmp_path / "r.html", "--json").json
    assert done["accuracy"] is None and done["agreement"] is None and done["sites"]
    page = (tmp_path / "r.html").read_text()
    assert "gives features (pooled)" in page and 'id="disagreements"' not in page


def test_the_number_of_class_names_is_checked(programs: Path, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("\n".join(f"thing {i}" for i in range(9)))
    assert_rejected(fqvit("report", programs / "vit.fqvit", "--classes", names), "9 classes", "has 10")


def test_mistakes_are_reported_in_one_line(programs: Path, tmp_path: Path) -> None:
    assert_rejected(fqvit("report", tmp_path / "none.fqvit"), "none.fqvit")
    assert_rejected(fqvit("report", programs / "vit.fqvit", "-o", tmp_path / "no" / "r.html"), "no such folder")
    assert_rejected(
        fqvit("report", programs / "vit.fqvit", "--data", tmp_path / "nowhere", "-o", tmp_path / "r.html"), "no such folder"
    )
    (tmp_path / "file").write_text("")
    assert_rejected(
        fqvit("report", programs / "vit.fqvit", "--pictures", tmp_path / "file", "-o", tmp_path / "r.html"), "is a file"
    )
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (("jinja2",), "needs jinja2, which is not installed. Run `pip install 'fqvit[report]'`."),
        (("torch",), "needs torch, which is not installed. Run `pip install 'fqvit[quantize]'`."),
        (("jinja2", "torch"), "needs torch and jinja2, which are not installed. Run `pip install 'fqvit[quantize,report]'`."),
    ],
)
def test_all_missing_packages_are_named_with_the_install_command(
    missing: tuple[str, ...], said: str, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in missing else found(name, *rest))
    assert_rejected(fqvit("report", programs / "vit.fqvit", "-o", tmp_path / "r.html"), said)


def test_a_single_image_is_enough(programs: Path, tmp_path: Path) -> None:
    done = fqvit("report", programs / "vit.fqvit", "--limit", 1, "-o", tmp_path / "r.html", "--json").json
    assert done["images"] == 1 and np.isfinite(done["speed"]["integer_ms"])
