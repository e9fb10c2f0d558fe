"""Test `fqvit quantize` with profiles and with the recipes auto and w4, and `fqvit compare` on the resulting programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fqvit.cli.commands.quantize import account
from fqvit.ir.program import Program
from fqvit.models import embedded
from fqvit.models.load import build
from fqvit.quant.calibration import Choice, Measure, Raised
from tests.cli.command_line import assert_rejected, fqvit


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of an untrained fmnist_swin; these tests do not depend on its accuracy."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "fmnist_swin.safetensors"
    save_file(dict(build(embedded.FMNIST_SWIN_CONFIG).state_dict()), path)
    return path


def test_the_default_recipe_is_fqvit(weights: Path, tmp_path: Path) -> None:
    words = ("quantize", "fmnist_swin", "--weights", weights, "--images", 2, "--json", "-o")
    plain, named = fqvit(*words, tmp_path / "a.fqvit").json, fqvit(*words, tmp_path / "b.fqvit", "--recipe", "fqvit").json
    assert plain["fingerprint"] == named["fingerprint"] and (plain["recipe"], plain["bits"]) == ("fqvit", "8/8/4")
    assert plain["choice"] is None


def test_a_profile_is_applied_to_the_recipe(weights: Path, tmp_path: Path) -> None:
    words = ("quantize", "fmnist_swin", "--weights", weights, "--images", 2, "--json", "-o", tmp_path / "a.fqvit")
    fqvit(*words, "--recipe", "minmax", "--profile", "npu")
    recipe = Program.load(tmp_path / "a.fqvit").header.recipe
    assert recipe["name"] == "minmax-npu" and recipe["symmetric"] is True and recipe["mult"] == "short"
    profiled, named = fqvit(*words, "--profile", "npu").json, fqvit(*words, "--recipe", "npu").json
    assert (profiled["recipe"], profiled["fingerprint"]) == ("npu", named["fingerprint"])
    assert_rejected(fqvit(*words, "--profile", "tpu"), "profile 'tpu': expected npu")


def test_auto_prints_one_table_of_raised_parts(tmp_path: Path) -> None:
    """A limit of 100 percentage points is always met, so no part of the embedded model is raised."""
    out = tmp_path / "auto.fqvit"
    saved = tmp_path / "found.toml"
    done = fqvit("quantize", "--recipe", "auto", "--max-loss", 100, "--images", 8, "-o", out, "--save-recipe", saved)
    assert done.code == 0 and done.err == ""
    assert done.out.count("expected loss  ") + done.out.count("expected loss\n") == 1  # the header of one table
    assert "0 of 8 parts raised, weights of 16 of 16 layers narrowed" in done.out and "8 -> 6 -> 4" in done.out
    assert "(limit: 100), on 8 images" in done.out and "fingerprint" in done.out
    again = fqvit("quantize", "--recipe", saved, "-o", tmp_path / "again.fqvit", "--json").json
    assert again["fingerprint"] == Program.load(out).fingerprint()
    recipe = Program.load(out).header.recipe
    assert recipe["name"] == "auto" and recipe["max_loss"] is None


def test_the_json_output_contains_the_choice_of_auto(weights: Path, tmp_path: Path) -> None:
    out, saved = tmp_path / "auto.fqvit", tmp_path / "auto.json"
    words = ("quantize", "fmnist_swin", "--weights", weights, "--json", "-o")
    done = fqvit(*words, out, "--recipe", "auto", "--max-loss", 0, "--images", 4, "--save-calibration", saved)
    choice = done.json["choice"]
    assert len(done.out.splitlines()) == 1
    assert choice["max_loss"] == 0 and choice["images"] == 4 and choice["units"] >= len(choice["raised"])
    assert set(choice["start"]) == {"kl", "agreement", "loss"} and choice["end"]["loss"] <= choice["start"]["loss"]
    recipe = Program.load(out).header.recipe
    assert len(set(recipe["sites"]) - {"residual", "hidden"}) == sum(part["sites"] for part in choice["raised"])
    assert set(recipe.get("layer_bits", {})) == {step["layer"] for step in choice["narrowed"]}
    # The saved calibration contains the chosen bit widths, but not the record of the choice.
    again = fqvit(*words, tmp_path / "again.fqvit", "--calibration", saved).json
    assert again["choice"] is None and (tmp_path / "again.fqvit").read_bytes() == out.read_bytes()


def test_max_size_limits_the_file(tmp_path: Path) -> None:
    out = tmp_path / "auto.fqvit"
    words = ("quantize", "--recipe", "auto", "--images", 4, "--json", "-o", out)
    choice = fqvit(*words, "--max-size", "0.4MB").json["choice"]
    assert choice["reached"] and out.stat().st_size == choice["bytes"] <= 400_000 == choice["max_size"] and choice["narrowed"]
    assert_rejected(fqvit("quantize", "--max-size", "1MB"), "recipe fqvit does not search for bit widths", "--recipe auto")
    for size in ("0", "-1", "4 apples", "1e6"):
        assert_rejected(fqvit(*words, "--max-size", size), "expected a number of bytes")
    assert_rejected(fqvit(*words, "--save-recipe", tmp_path / "x.json"), "expected a name that ends in .toml")
    both = tmp_path / "x.toml"
    assert_rejected(fqvit("quantize", "-o", both, "--save-recipe", both), "x.toml: given for two outputs")


def test_the_option_bits_keeps_the_methods_of_a_recipe_file(tmp_path: Path) -> None:
    """This holds even if the file is named like a built-in recipe, to which --bits would add methods."""
    own, out = tmp_path / "fqvit.toml", tmp_path / "x.fqvit"
    own.write_text('base = "fqvit"\n')
    assert fqvit("quantize", "--recipe", own, "--bits", "6/6/4", "--images", 2, "-o", out).code == 0
    recipe = Program.load(out).header.recipe
    assert (recipe["name"], recipe["weight_bits"], recipe["rounding"]) == ("fqvit", 6, "weighted")


def test_max_loss_is_only_valid_with_recipe_auto(weights: Path, tmp_path: Path) -> None:
    for recipe in ("fqvit", "w4", "minmax"):
        assert_rejected(fqvit("quantize", "--recipe", recipe, "--max-loss", 1), "has no loss limit", "--recipe auto")
    assert_rejected(fqvit("quantize", "--max-loss", 1), "recipe fqvit has no loss limit")
    for loss in (-1, 101, "nan"):
        assert_rejected(fqvit("quantize", "--recipe", "auto", "--max-loss", loss), "expected 0 to 100")
    words = ("quantize", "fmnist_swin", "--weights", weights, "-o", tmp_path / "x.fqvit")
    assert_rejected(
        fqvit(*words, "--recipe", "auto", "--features", "pooled"),
        "the output is pooled, expected only logits",
        "--recipe fqvit",
    )
    saved = tmp_path / "saved.json"
    assert fqvit(*words, "--images", 1, "--save-calibration", saved).code == 0
    assert_rejected(fqvit(*words, "--calibration", saved, "--max-loss", 1), "Leave out --max-loss")


def test_a_saved_calibration_of_w4_gives_the_same_file(weights: Path, tmp_path: Path) -> None:
    saved, words = tmp_path / "saved.json", ("quantize", "fmnist_swin", "--weights", weights, "--json", "-o")
    first = fqvit(*words, tmp_path / "a.fqvit", "--recipe", "w4", "--images", 6, "--save-calibration", saved).json
    again = fqvit(*words, tmp_path / "b.fqvit", "--calibration", saved).json
    assert (tmp_path / "a.fqvit").read_bytes() == (tmp_path / "b.fqvit").read_bytes()
    assert first["bits"] == again["bits"] == "4/8/4" and first["fingerprint"] == again["fingerprint"]
    other = fqvit("quantize", "fmnist_vit", "--calibration", saved, "-o", tmp_path / "c.fqvit")
    assert_rejected(other, "layers.0.blocks.0.attn.qkv", "this layer has none", "Calibrate this model again")


def test_compare_simulates_w4_with_the_weights_of_the_program(weights: Path, tmp_path: Path) -> None:
    out = tmp_path / "w4.fqvit"
    assert fqvit("quantize", "fmnist_swin", "--weights", weights, "--recipe", "w4", "--images", 16, "-o", out).code == 0
    found = fqvit("compare", out, "--weights", weights, "--limit", 4, "--json").json
    worst = found["sites"][0]
    assert abs(worst["integer_db"] - worst["simulated_db"]) < 1


def test_compare_shows_the_gain_over_another_program(weights: Path, tmp_path: Path) -> None:
    ours, paper = tmp_path / "ours.fqvit", tmp_path / "paper.fqvit"
    words = ("quantize", "fmnist_swin", "--weights", weights, "--images", 8, "-o")
    assert fqvit(*words, ours).code == fqvit(*words, paper, "--recipe", "fq-vit").code == 0
    words = ("compare", ours, "--weights", weights, "--limit", 4)
    lines = fqvit(*words, "--baseline", paper).out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.endswith("baseline  gain"))
    integer, _, _, before, gain = map(float, lines[head + 2].split()[3:])
    assert abs(gain - (integer - before)) < 0.11
    found, alone = fqvit(*words, "--baseline", paper, "--json").json, fqvit("compare", paper, *words[2:], "--json").json
    assert found["baseline_db"] == {row["site"]: row["integer_db"] for row in alone["sites"]}
    other = tmp_path / "vit.fqvit"
    assert fqvit("quantize", "--images", 2, "-o", other).code == 0
    assert_rejected(fqvit(*words, "--baseline", other), "vit.fqvit", "Pass two programs of the same model")


def test_the_table_of_auto_shows_signs_and_an_unreachable_limit() -> None:
    good, bad = Measure(0.01, 99.0, 0.1), Measure(0.5, 70.0, 9.0)
    parts = [Raised("blocks.0", "residual", 2, 8, 16, 0.25), Raised("embed", "residual", 1, 8, 16, -0.001)]
    text = account(Choice(0.5, 128, bad, good, True, 9, parts))
    assert "-0.2500" in text and "+0.0010" in text and "8 -> 16" in text
    assert "2 of 9 parts raised; expected loss 0.10 percentage points of top-1 (limit: 0.5), on 128 images" in text
    assert "limit cannot be reached" in account(Choice(0.5, 128, bad, bad, False, 9, parts))
