"""`fqvit table` compares rows with float and published results, writes three formats, and resumes after a kill."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from fqvit.cli.commands.study import ModelArgument, named_models
from fqvit.errors import FqvitError
from fqvit.models import embedded
from fqvit.quant.recipe import load_recipe
from fqvit.study import cells
from fqvit.study.cells import CellResult
from fqvit.study.methods import DEFAULT, FLOAT, Method, parse, with_images
from fqvit.study.published import MODELS, TOP1, published
from fqvit.study.sweep import draw
from fqvit.study.table import flat, grid, markdown, row
from tests.cli.command_line import assert_rejected, fqvit

SMALL = ("table", "--models", "fmnist_vit", "--images", 32, "--limit", 64)


def result(ranks: list[int], predictions: list[int]) -> CellResult:
    arrays = (np.array(values, "<i4").tobytes() for values in (predictions, ranks))
    return CellResult(1000, 1.0, 2.0, 6_000_000, "abc", *arrays, [])


def rows_of(model: str, *methods: str) -> list[object]:
    exact = result([0, 0, 3, 9], [1, 2, 3, 4])
    found = [row(model, FLOAT, exact, exact)]
    return found + [row(model, Method(name, load_recipe(name)), result([0, 1, 0, 7], [1, 5, 6, 4]), exact) for name in methods]


def test_a_row_is_compared_with_float_image_by_image() -> None:
    _, found = rows_of("deit_tiny_patch16_224", "fq-vit")
    assert (found.top1, found.top5, found.agreement) == (50.0, 75.0, 50.0)
    assert (found.against_float.lost, found.against_float.gained, found.against_float.difference) == (1, 1, 0.0)
    assert (found.bits, found.published, found.runs) == ("8/8/4", 71.07, "integer")


def test_every_published_row_has_a_value_or_none_for_each_model() -> None:
    assert {len(figures) for figures in TOP1.values()} == {len(MODELS)}
    assert published("vit_base_patch16_224", "minmax", "8/8/8") == 23.64
    assert published("vit_base_patch16_224", "fq-vit-8", "8/8/8") == 83.31
    assert published("vit_base_patch16_224", "minmax", "4/8/8") is None
    assert published("vit_tiny_patch16_224", "minmax", "8/8/8") is None
    assert published("deit_tiny_patch16_224", "bit-split", "8/8/8") is None


def test_markdown_has_an_overview_of_several_models_and_aligned_columns() -> None:
    rows = rows_of("deit_tiny_patch16_224", "minmax", "fq-vit") + rows_of("fmnist_vit", "minmax")
    text = markdown(rows)
    first, *rest = text.split("\n\n")
    assert "50.0 (71.07)" in first and "fmnist_vit" in first.splitlines()[0]
    for part in (first, *rest):
        lines = [line for line in part.splitlines() if line.startswith("|")]
        assert len({len(line) for line in lines}) <= 1
    assert "published" in text and "50,000" in text
    assert "published" not in markdown(rows_of("fmnist_vit", "minmax")).partition("top-1 in percent")[0]


def test_methods_have_their_own_bits_or_run_once_for_each_of_the_given_bits() -> None:
    assert [method.label for method in parse("minmax, fq-vit@8/8/8", "8/8/8,4/8/4")] == [
        "minmax@8/8/8",
        "minmax@4/8/4",
        "fq-vit@8/8/8",
    ]
    found = with_images(parse("fq-vit@4/8/4", None)[0], 17)
    assert found.bits == "4/8/4" and found.recipe is not None and found.recipe.images == 17
    assert len(parse(DEFAULT, None)) == len(DEFAULT.split(","))
    for words, said in (
        ("", "no recipe given"),
        ("minmax,minmax", "minmax is given twice"),
        ("nonsense", "no such recipe"),
        ("minmax@8", "W/A/ATTN"),
    ):
        with pytest.raises(FqvitError, match=said):
            parse(words, None)


def test_the_table_is_written_as_markdown_csv_and_json(tmp_path: Path) -> None:
    out = [tmp_path / f"t{suffix}" for suffix in (".md", ".csv", ".json")]
    words = [word for path in out for word in ("-o", path)]
    done = fqvit(*SMALL, "--methods", "minmax", "--cache", tmp_path / "cells", *words)
    assert done.code == 0 and done.out == out[0].read_text()
    with out[1].open() as file:
        rows = list(csv.DictReader(file))
    saved = json.loads(out[2].read_text())
    assert [row["method"] for row in rows] == ["float", "minmax"] == [row["method"] for row in saved["rows"]]
    assert float(rows[1]["top1"]) == pytest.approx(saved["rows"][1]["top1"], abs=1e-3)
    again = fqvit(*SMALL, "--methods", "minmax", "--cache", tmp_path / "cells", "--json").json
    assert again["reused"] == 2 and again["rows"] == saved["rows"] and again["failed"] == []


@pytest.mark.parametrize("name, shown", [("ptq4vit", "PTQ4ViT *"), ("repq-vit", "RepQ-ViT *")])
def test_simulated_baselines_are_rows_of_the_table(
    name: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fqvit.quant.methods.hessian.FACTORS", np.linspace(0.3, 1.2, 10))
    monkeypatch.setattr("fqvit.quant.methods.hessian.START", 8)
    monkeypatch.setattr("fqvit.quant.methods.hessian.ROUNDS", 1)
    monkeypatch.setattr("fqvit.quant.methods.hessian.IMAGES", 8)
    words = ("--methods", f"{name}@8/8/8,{name}@6/6/6", "--cache", tmp_path / "cells", "-o", tmp_path / "t.md", "--json")
    rows = fqvit(*SMALL, *words).json["rows"]
    assert [(row["method"], row["bits"], row["runs"]) for row in rows[1:]] == [
        (f"{name}@{bits}", bits, "simulation") for bits in ("8/8/8", "6/6/6")
    ]
    assert all(row["agreement"] >= 90 for row in rows) and f"| {shown} " in (tmp_path / "t.md").read_text()
    assert published("deit_small_patch16_224", name, "6/6/6") == {"ptq4vit": 76.28, "repq-vit": 78.90}[name]


def test_a_recipe_file_with_a_size_limit_is_a_row_of_the_table(tmp_path: Path) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text('base = "auto"\nrounding = "nearest"\nmax_size = 420000\n')
    (_, row) = fqvit(*SMALL, "--methods", recipe, "--cache", tmp_path / "cells", "--json").json["rows"]
    assert row["method"] == "small" and row["runs"] == "integer" and 300_000 < row["file_bytes"] <= 420_000


def test_a_failed_cell_is_named_and_the_others_are_printed(tmp_path: Path) -> None:
    recipe = tmp_path / "stray.toml"
    recipe.write_text('base = "minmax"\n[sites."no.such.site"]\nbits = 8\n')
    done = fqvit(*SMALL, "--methods", f"{recipe},minmax", "--cache", tmp_path / "cells")
    assert done.code == 2 and "| MinMax" in done.out
    assert len(done.err.splitlines()) == 1 and "1 cell failed" in done.err and "no.such.site" in done.err


def test_an_unreadable_image_is_reported_once_for_all_cells(tmp_path: Path) -> None:
    images, labels = embedded.test_images()
    for i in range(110):
        folder = tmp_path / "images" / str(labels[i])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[i, :, :, 0]).save(folder / f"{i:03}.png")
    (folder / "broken.png").write_text("no image")
    folders = ("--calib", tmp_path / "images", "--data", tmp_path / "images", "--cache", tmp_path / "cells")
    done = fqvit("table", "--methods", "minmax,ema", *folders)
    assert done.code == 0 and len(done.err.splitlines()) == 1, done.err
    assert "skipped 1 image of 111" in done.err and "broken.png" in done.err


def test_mistakes_are_reported_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ("--cache", tmp_path / "cells")
    assert_rejected(fqvit("table", "--models", "fmnist_vitt", *cache), "fmnist_vitt", "Did you mean")
    assert_rejected(fqvit(*SMALL, "--methods", "fq-vitt", *cache), "fq-vitt", "no such recipe")
    assert_rejected(fqvit(*SMALL, "-o", tmp_path / "t.xlsx", *cache), "t.xlsx", ".md, .csv or .json")
    assert_rejected(fqvit(*SMALL, "-o", tmp_path / "no" / "t.md", *cache), "no such folder")
    assert_rejected(fqvit(*SMALL, "--calib", tmp_path / "none", *cache), "none: no such folder")
    assert_rejected(fqvit("table", "--models", "deit_tiny", *cache), "deit_tiny", "no weights")
    assert_rejected(fqvit("table", "--models", "fmnist_vit", "--images", 0, *cache), "--images 0")
    assert_rejected(fqvit("table", "--models", "fmnist_vit,deit_tiny", *cache), "deit_tiny", "no weights")
    assert_rejected(fqvit("table", "--models", "fmnist_vit,fmnist_swin=no.pth", *cache), "no.pth: no such file")
    assert_rejected(fqvit("table", "--models", "fmnist_vit,other.pth", *cache), "other.pth: no such file")
    assert_rejected(fqvit("table", "--models", "fmnist_vit,fmnist_vit", *cache), "fmnist_vit is given twice")
    assert_rejected(fqvit("table", "--models", "", *cache), "--models: empty, expected names")
    assert_rejected(fqvit(*SMALL, "--methods", "", *cache), "--methods: no recipe given")
    assert_rejected(fqvit("sweep-k", "--models", "fmnist_vit", "--recipe", "minmax", *cache), "no Power-of-Two Factor")
    assert_rejected(fqvit("sweep-k", "--models", "fmnist_vit", "--largest", 9, *cache), "--largest 9")

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    assert_rejected(fqvit(*SMALL), "no home folder", "--cache DIR")


def test_a_recipe_file_cannot_take_the_name_of_a_builtin_recipe(tmp_path: Path) -> None:
    for file, text in (("fq-vit.toml", ""), ("mine.toml", 'name = "fq-vit"\n')):
        (tmp_path / file).write_text(f'{text}base = "minmax"\n')
        with pytest.raises(FqvitError, match="the name fq-vit belongs to a built-in recipe"):
            parse(str(tmp_path / file), None)


def test_names_of_files_may_contain_any_characters(tmp_path: Path) -> None:
    path = tmp_path / "a|b@c.toml"
    path.write_text('base = "minmax"\n')
    assert [method.label for method in parse(f"{path},{path}@4/8/8", None)] == ["a|b@c", "a|b@c@4/8/8"]
    assert grid(["name"], [["a|b\nc"]], 1).splitlines()[-1] == "| a\\|b c |"


def test_empty_items_among_bits_are_ignored() -> None:
    assert [method.label for method in parse("minmax", "8/8/8,")] == ["minmax@8/8/8"]


def test_cells_with_different_images_are_not_compared() -> None:
    exact = result([0, 0, 3], [1, 2, 3])
    other = msgspec.structs.replace(exact, skipped=["a.png"])
    said = r"^skipped images: 1 with minmax and 0 with the float model, expected the same images\. .*--fresh"
    with pytest.raises(FqvitError, match=said):
        row("fmnist_vit", Method("minmax", load_recipe("minmax")), other, exact)


def test_a_cache_that_cannot_be_written_ends_the_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, write: object) -> None:
        raise FqvitError(f"{path}: cannot be written (No space left on device).")

    monkeypatch.setattr(cells, "write_atomically", full)
    done = fqvit(*SMALL, "--methods", "minmax,ema", "--cache", tmp_path / "cells")
    assert_rejected(done, "No space left")
    assert "missing" not in done.err


def test_a_sweep_without_finished_cells_can_be_drawn() -> None:
    assert "no K was measured" in draw(rows_of("fmnist_vit"))


def test_models_are_given_by_name_file_or_hub_repository() -> None:
    assert named_models("deit_tiny", None, "a.pth") == [ModelArgument("deit_tiny", "a.pth")]
    assert named_models(None, ["deit_tiny=a.pth,vit_tiny=hf:o/n", "hf:o/m", "x/vit_tiny.safetensors", "fmnist_vit"], None) == [
        ModelArgument("deit_tiny", "a.pth"),
        ModelArgument("vit_tiny", "hf:o/n"),
        ModelArgument(None, "hf:o/m"),
        ModelArgument(None, "x/vit_tiny.safetensors"),
        ModelArgument("fmnist_vit", None),
    ]
    assert named_models(None, None, "vit_tiny.safetensors") == [ModelArgument(None, "vit_tiny.safetensors")]
    for models in (["a", "b"], ["a=b.pth"]):
        with pytest.raises(FqvitError, match="expected one model name without a checkpoint"):
            named_models(None, models, "c.pth")


def test_a_killed_run_repeats_no_finished_step(tmp_path: Path) -> None:
    words = [*map(str, SMALL), "--methods", "minmax,ema,percentile", "--cache", str(tmp_path / "cells"), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fqvit", *words], stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "cells").glob("result-*.json"))) < 2 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").glob("*.json")}
    resumed = fqvit(*words).json
    whole = fqvit(*words[:-2], str(tmp_path / "other"), "--json").json
    assert resumed["reused"] >= 2
    for name, written in finished.items():
        assert (tmp_path / "cells" / name).stat().st_mtime_ns == written, "a finished step was done again"
    timed = ("seconds", "calibration_seconds")
    for mine, theirs in zip(resumed["rows"], whole["rows"], strict=True):
        assert {k: v for k, v in mine.items() if k not in timed} == {k: v for k, v in theirs.items() if k not in timed}


def test_sweep_k_measures_every_k_and_draws_a_figure(tmp_path: Path) -> None:
    figure = tmp_path / "k.svg"
    words = ("sweep-k", "--models", "fmnist_vit", "--limit", 32, "--largest", 2, "--cache", tmp_path / "cells", "-o", figure)
    done = fqvit(*words, "--json").json
    assert [row["k"] for row in done["rows"]] == [None, 0, 1, 2]
    assert figure.read_text().startswith("<?xml") and "Power-of-Two" in fqvit(*words).out


def test_a_flat_row_has_no_nested_values() -> None:
    found = flat(rows_of("fmnist_vit", "minmax")[1])
    assert all(not isinstance(value, dict | list) for value in found.values()) and found["images"] == 4
