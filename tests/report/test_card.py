"""`fqvit card`: a model card with metadata for the Hugging Face Hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fqvit.report.card import UNKNOWN_LICENCE, card, read_evaluation, subject_of
from tests.cli.command_line import assert_rejected, fqvit

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
CLASSIFIER, TOKENS, DETECTOR = (GOLDEN / name for name in ("fqvit_v1.fqvit", "tokens_v1.fqvit", "detectors/opencv_v1.fqvit"))
RESULT = {"target": "a.fqvit", "model": "distilled", "backend": "native", "top1": 71.4, "top5": 90.6, "images": 1000}


def metadata(text: str) -> dict[str, object]:
    """Read the YAML front matter. Each value is JSON."""
    lines = text.split("---\n")[1].splitlines()
    return {key: json.loads(value) for key, _, value in (line.partition(": ") for line in lines)}


def test_a_card_has_metadata_facts_accuracy_and_usage(tmp_path: Path) -> None:
    (tmp_path / "eval.json").write_text(f"progress\n{json.dumps(RESULT)}\n")
    (tmp_path / "float.json").write_text(json.dumps({**RESULT, "backend": "float", "top1": 72.0}))
    out = tmp_path / "README.md"
    done = fqvit(
        *("card", CLASSIFIER, "--eval", tmp_path / "eval.json", "--eval", tmp_path / "float.json"),
        *("--dataset", "imagenet-1k", "--license", "apache-2.0", "--base", "timm/deit", "--repo", "me/mine", "-o", out),
    )
    assert done.code == 0 and done.err == "" and str(out) in done.out
    text = out.read_text(encoding="utf-8")
    found = metadata(text)
    assert (found["license"], found["pipeline_tag"], found["base_model"]) == ("apache-2.0", "image-classification", "timm/deit")
    (index,) = found["model-index"]  # type: ignore[misc]
    (result,) = index["results"]
    assert result["dataset"]["name"] == "imagenet-1k" and result["metrics"][0]["value"] == 71.4
    fingerprint = fqvit("inspect", CLASSIFIER, "--json").json["fingerprint"]
    for words in (
        fingerprint,
        "| float | float | 1,000 | 72.00 |",
        'fqvit.load("hf:me/mine")',
        "fqvit-run fqvit_v1.fqvit",
        "fqvit web",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("file", "task", "call"),
    [
        (CLASSIFIER, "image-classification", "model.classify"),
        (TOKENS, "image-feature-extraction", "model.embed"),
        (DETECTOR, "object-detection", "model.detect"),
    ],
)
def test_the_task_follows_from_the_outputs(file: Path, task: str, call: str) -> None:
    done = fqvit("card", file)
    assert done.code == 0 and "placeholder for the licence" in done.err
    assert metadata(done.out)["pipeline_tag"] == task
    assert call in done.out and UNKNOWN_LICENCE in done.out and "Accuracy" not in done.out


def test_the_metadata_is_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    text = card(subject_of(CLASSIFIER), dataset='a "b": c')
    assert yaml.safe_load(text.split("---\n")[1])["datasets"] == ['a "b": c']


def test_detection_results_are_average_precisions(tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    path.write_text(
        json.dumps({"target": "x", "model": "mask_rcnn", "backend": "native", "box_AP": 70.5, "mask_AP": None, "images": 5})
    )
    assert read_evaluation(path).values == {"box_AP": 70.5}
    assert "| this program | native | 5 | 70.50 |" in card(subject_of(DETECTOR), [read_evaluation(path)])


def test_mistakes_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    assert_rejected(fqvit("card", CLASSIFIER, "--eval", tmp_path / "a.json"), "not a result of an evaluation")
    assert_rejected(fqvit("card", CLASSIFIER, "--eval", tmp_path / "b.json"), "cannot be read")
    assert_rejected(fqvit("card", CLASSIFIER, "--repo", "mine"), "--repo mine: expected a repository of the Hugging Face Hub")
    assert_rejected(fqvit("card", tmp_path / "none.fqvit"), "no such file")
    assert_rejected(fqvit("card", CLASSIFIER, "-o", CLASSIFIER), "is an input of this command")
    (tmp_path / "c.json").write_text(json.dumps({**RESULT, "model": "other"}))
    assert "is about other, but fqvit_v1.fqvit is distilled" in fqvit("card", CLASSIFIER, "--eval", tmp_path / "c.json").err
