"""`fqvit ablate` measures the method with each part on and off, next to the paper's bit operations and accuracies.

The parts are PTF (Power-of-Two Factor), LIS (Log-Int-Softmax) and 4-bit attention.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fqvit.errors import FqvitError
from fqvit.models.zoo import find
from fqvit.quant.qparams import log2
from fqvit.quant.recipe import Recipe, check_integer, load_recipe
from fqvit.study.ablation import markdown, rows, settings
from fqvit.study.bitops import layers_of
from fqvit.study.cells import CellResult
from fqvit.study.methods import FLOAT
from fqvit.study.table import row
from tests.cli.command_line import fqvit


def test_there_are_eight_settings_plus_partial() -> None:
    found = settings()
    assert [setting.partial for setting in found] == [True] + 8 * [False]
    assert len({(s.ptf, s.lis, s.attention_bits) for s in found if not s.partial}) == 8
    simulated = [s for s in found if s.method.recipe is not None and not s.method.recipe.integer]
    assert {(s.partial, s.lis, s.attention_bits) for s in simulated} == {(True, False, 8), (False, True, 8)}


def test_settings_equal_the_recipes_of_the_same_method() -> None:
    known = {(s.ptf, s.lis, s.attention_bits): s.method.recipe for s in settings() if not s.partial}
    for key, name in (((False, False, 8), "minmax"), ((True, False, 8), "fq-vit-8"), ((True, True, 4), "fq-vit")):
        found, wanted = known[key], load_recipe(name)
        assert found is not None
        for field in ("residual", "attention_bits", "log2_attention", "k", "channels", "branches", "qkv", "observer"):
            assert getattr(found, field) == getattr(wanted, field), (name, field)


def test_rows_of_vit_base_have_the_papers_results() -> None:
    result = CellResult(1000, 1.0, 1.0, 1, "", *(np.array([0], "<i4").tobytes() for _ in range(2)), [])
    model = "vit_base_patch16_224"
    cells = [row(model, method, result, result) for method in (FLOAT, *(s.method for s in settings()))]
    flat_rows = rows(cells, {model: layers_of(find(model).config)})
    found = {
        (r["ptf"], r["lis"], r["attention_bits"]): (r["published"], round(r["bitops"], 2)) for r in flat_rows if r["bitops"]
    }
    assert found[False, False, 8] == (23.64, 1118.51)
    assert found[True, False, 8] == (83.31, 1118.52)
    assert found[True, False, 4] == (7.96, 1118.34)
    assert found[True, True, 4] == (82.68, 1117.76)
    assert flat_rows[0]["published"] == 84.53 and flat_rows[1]["bitops"] is None
    text = markdown(cells, flat_rows)
    assert "1117.76" in text and "7.96" in text and "partial 8/8/8 *" in text


def test_wide_log2_codes_exist_only_in_simulation() -> None:
    with pytest.raises(FqvitError, match="attention codes are only simulated"):
        check_integer(Recipe(name="wide", attention="log2-wide", attention_bits=8))
    q = log2(8, zero_code=True)
    p = torch.tensor([1.0, 0.5, 2.0**-20])
    assert torch.equal(q.decode(q.encode(p)), p), "small values keep their power of two"


def test_the_command_measures_and_draws_every_setting(tmp_path: Path) -> None:
    figure = tmp_path / "figure.svg"
    words = ("ablate", "--models", "fmnist_vit", "--limit", 16, "--images", 16, "--cache", tmp_path / "cells")
    done = fqvit(*words, "-o", figure, "--json").json
    assert len(done["rows"]) == 10 and done["failed"] == []
    assert {found["runs"] for found in done["rows"]} == {"float", "integer", "simulation"}
    assert all(found["images"] == 16 for found in done["rows"])
    assert figure.read_text().startswith("<?xml") and "Log-Int-Softmax" in figure.read_text()
