"""The report of programs with embeddings and tokens: its figures, worst images, JSON, and escaping of hostile names."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jinja2")

import fqvit
from fqvit.data.images import Batch
from fqvit.models import embedded
from fqvit.quant.recipe import with_bits
from fqvit.report.embeddings import SHOWN
from fqvit.report.frame import About
from fqvit.report.gather import BATCH, Report, gather
from fqvit.report.page import embedding_pictures, pictures_of, render
from fqvit.system.progress import track
from tests.cli.command_line import fqvit as run
from tests.report.test_page import Reader

IMAGES = 40
HOSTILE = '"><script>window.broken = 6</script>'


def made(folder: Path, outputs: tuple[str, ...], images: int = IMAGES) -> Report:
    """Gather the report of a program with low bit widths, so that some nearest neighbours change."""
    model = fqvit.load_model("fmnist_vit")
    recipe = with_bits(fqvit.load_recipe("minmax"), "4/5/4")
    program = fqvit.lower(model, fqvit.calibrate(model, embedded.calibration_images()[:32], recipe, outputs=outputs))
    path = folder / "model.fqvit"
    program.save(path)
    pixels, labels = (part[::10][:images] for part in embedded.test_images())
    batches = [
        Batch(
            pixels[at : at + BATCH],
            labels[at : at + BATCH],
            [f"photos/{i}{HOSTILE}.png" for i in range(at, at + len(pixels[at : at + BATCH]))],
        )
        for at in range(0, len(pixels), BATCH)
    ]
    return gather(fqvit.Program.load(path), path, model, batches, len(pixels), track)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return made(tmp_path_factory.mktemp("embeddings"), ("embedding", "tokens", "logits", "embedding:sign"))


@pytest.fixture(scope="module")
def page(report: Report) -> str:
    return render(report, About("fqvit report", "model.fqvit", "photos", "today", [str(i) for i in range(10)]))


def test_outputs_are_summarized_over_all_images(report: Report) -> None:
    quality = report.embeddings
    assert quality is not None and quality.main == "embedding"
    assert [(one.name, one.images) for one in quality.outputs] == [
        (name, IMAGES) for name in ("embedding", "tokens", "embedding:sign")
    ]
    for one in quality.outputs:
        values = quality.cosines[one.name]
        assert one.mean_cosine == pytest.approx(values.mean()) and one.worst == values.min()
        assert one.worst <= one.first_percentile <= one.mean_cosine < 1
    assert [one.neighbour_agreement is None for one in quality.outputs] == [False, True, False]
    assert 20 < (quality.outputs[0].neighbour_agreement or 0) < 100
    assert report.predictions is not None and report.predictions.images == IMAGES


def test_the_worst_images_are_those_with_the_lowest_cosines(report: Report) -> None:
    quality = report.embeddings
    assert quality is not None and len(quality.worst) == SHOWN
    values = quality.cosines["embedding"]
    order = np.argsort(values)[:SHOWN]
    pixels = embedded.test_images()[0][::10]
    for one, at in zip(quality.worst, order.tolist(), strict=True):
        assert one.path == f"photos/{at}{HOSTILE}.png" and one.cosine == values[at]
        np.testing.assert_array_equal(one.pixels, pixels[at])
        assert one.float_neighbour is not None and one.float_neighbour.path != one.path


def test_sites_have_cosines_and_tokens_have_colours(report: Report) -> None:
    assert all(row.cosine is not None and row.lowest_cosine is not None for row in report.sites.sites)
    assert all((row.lowest_cosine or 0) <= (row.cosine or 0) for row in report.sites.sites)
    quality = report.embeddings
    assert quality is not None and quality.token_site == "outputs.tokens" and len(quality.tokens) == 3
    assert all(one.float_colours.shape == (7, 7, 3) for one in quality.tokens)


def test_figures_are_well_formed_and_named(report: Report) -> None:
    found = dict(pictures_of(report, []))
    assert {"embedding-cosines", "layer-cosines", "token-colours"} <= found.keys()
    for svg in found.values():
        ElementTree.fromstring(svg)
    assert found["token-colours"].count("data:image/png") == 6


def test_the_page_shows_embeddings_and_escapes_names(page: str, report: Report) -> None:
    read = Reader(page)
    assert [tag for tag, _ in read.tags].count("script") == 1
    assert not [key for _, attributes in read.tags for key in attributes if key.startswith("on") or key == "style"]
    ids = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) and {"embeddings", "output-table", "token-colours", "disagreements"} <= set(ids)
    assert {value[1:] for _, a in read.tags if (value := a.get("href") or "").startswith("#")} <= set(ids)
    assert "nearest, integer" in page  # low bit widths change some nearest neighbours
    images = [attributes for tag, attributes in read.tags if tag == "img"]
    assert all(attributes.get("alt") and (attributes["src"] or "").startswith("data:") for attributes in images)
    names = {attributes["alt"] for attributes in images}
    assert report.embeddings is not None and {one.path.removeprefix("photos/") for one in report.embeddings.worst} <= names


def test_the_report_of_a_program_with_logits_only_does_not_mention_embeddings(report: Report) -> None:
    plain = dataclasses.replace(report, embeddings=None)
    text = render(plain, About("fqvit report", "model.fqvit", "photos", "today", [str(i) for i in range(10)]))
    assert embedding_pictures(plain) == [] and '"embeddings"' not in text and ".worst" not in text and ">Cosine<" not in text


@pytest.mark.parametrize("images", [1, 2])
def test_very_few_images_have_no_neighbours(tmp_path: Path, images: int) -> None:
    report = made(tmp_path, ("embedding",), images)
    quality = report.embeddings
    assert quality is not None and quality.outputs[0].neighbour_agreement is None
    assert len(quality.worst) == images and quality.worst[0].float_neighbour is None
    text = render(report, About("fqvit report", "model.fqvit", "photos", "today", []))
    assert "nearest" not in text.split('id="embeddings"')[1].split("<ol")[1].split("</ol>")[0]


def test_the_commands_write_the_documented_fields(tmp_path: Path) -> None:
    file = tmp_path / "m.fqvit"
    assert run("quantize", "fmnist_swin", "--images", 8, "--output", "embedding,tokens", "-o", file).code == 0
    fields = {
        "name",
        "kind",
        "shape",
        "dtype",
        "images",
        "mean_cosine",
        "first_percentile",
        "worst",
        "worst_image",
        "neighbour_agreement",
    }
    done = run("report", file, "--limit", 12, "-o", tmp_path / "r.html", "--pictures", tmp_path / "p", "--json").json
    assert done["accuracy"] is None and [set(one) for one in done["outputs"]] == [fields] * 2
    assert len(done["worst_images"]) == 12 and set(done["worst_images"][0]) == {"name", "cosine"}
    assert (tmp_path / "p" / "token-colours.svg").exists()
    assert "gives features (embedding, tokens)" in (tmp_path / "r.html").read_text()
    shown = run("report", file, "--limit", 12, "-o", tmp_path / "r.html")
    assert "cosine to float: mean 0.9" in shown.out and "same nearest neighbour for" in shown.out
    compared = run("compare", file, "--json").json
    assert [set(one) for one in compared["outputs"]] == [fields] * 2 and "cosine" in compared["sites"][0]
    said = run("compare", file, "--baseline", file).out
    assert "worst image" in said and "baseline mean" in said and "neighbours" in said
