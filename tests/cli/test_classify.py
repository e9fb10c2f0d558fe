"""`fqvit classify`: number of classes, class names, probabilities and CSV files."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fqvit.models import embedded
from tests.cli.command_line import assert_rejected, fqvit
from tests.factories import embedded_program


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program and two photos, which is the working directory."""
    embedded_program("fmnist_vit").save(tmp_path / "a.fqvit")
    (tmp_path / "photos").mkdir()
    for number, pixels in enumerate(embedded.test_images()[0][:2]):
        Image.fromarray(pixels[:, :, 0]).save(tmp_path / "photos" / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_probabilities_are_the_softmax_of_all_logits(place: Path) -> None:
    (found,) = fqvit("classify", "a.fqvit", "photos/0.png", "--top", "10", "--json", "--logits").json["results"]
    scale = fqvit("classify", "a.fqvit", "photos/0.png", "--json", "--logits").json["scale"]
    total = sum(math.exp(code * scale) for code in found["logits"])
    assert len(found["top"]) == 10
    for row in found["top"]:
        assert row["probability"] == pytest.approx(math.exp(found["logits"][row["class"]] * scale) / total, abs=1e-6)
    assert "probability" in fqvit("classify", "a.fqvit", "photos/0.png").out


def test_top_and_classes_change_the_rows(place: Path) -> None:
    (place / "names.txt").write_text("\n".join(f"thing {number}" for number in range(10)))
    out = fqvit("classify", "a.fqvit", "photos", "--top", "1", "--classes", "names.txt").out
    assert out.count("thing ") == 2
    (place / "short.txt").write_text("one\ntwo")
    assert_rejected(fqvit("classify", "a.fqvit", "photos", "--classes", "short.txt"), "2 classes, but a.fqvit has 10")
    assert_rejected(fqvit("classify", "a.fqvit", "photos", "--top", "0"), "--top 0: expected at least 1")


def test_results_are_written_to_a_csv_file(place: Path) -> None:
    done = fqvit("classify", "a.fqvit", "photos", "-o", "found.csv", "--top", "3")
    assert done.code == 0 and done.out == "found.csv: classes of 2 images\n"
    rows = list(csv.DictReader((place / "found.csv").open(encoding="utf-8", newline="")))
    assert len(rows) == 6 and list(rows[0]) == ["image", "rank", "class", "name", "probability", "logit"]
    assert [row["rank"] for row in rows] == ["1", "2", "3"] * 2
    top = fqvit("classify", "a.fqvit", "photos", "--json").json["results"][0]["top"][0]
    assert (int(rows[0]["class"]), rows[0]["name"], float(rows[0]["logit"])) == (top["class"], top["name"], top["logit"])
    assert_rejected(fqvit("classify", "a.fqvit", "photos", "-o", "found.txt"), "ends in .csv")


def test_csv_files_of_text_embeddings_have_cosines(place: Path) -> None:
    from fqvit.cli.commands.classify import _csv

    rows = [{"image": "a,b.png", "top": [{"class": 0, "name": "cat", "score": 5, "cosine": 0.25}]}]
    assert _csv(rows) == 'image,rank,class,name,cosine,score\n"a,b.png",1,0,cat,0.25,5\n'
    assert _csv([]) == "image,rank,class,name\n"
    np.savez(place / "text.npz", embeddings=np.ones((2, 4)), names=["a", "b"])
    refused = fqvit("classify", "a.fqvit", "photos", "--zero-shot", "text.npz", "--classes", "names.txt")
    assert_rejected(refused, "--classes: the text embeddings have names")
