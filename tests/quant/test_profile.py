"""Profile npu (neural processing units): zero points are the middle code, and constant multipliers have at most 16 bits."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from fqvit.errors import FqvitError
from fqvit.ir.attention import Attend, MatMul, ShiftMatMul
from fqvit.ir.ops import Add, LayerNorm, Linear, Mean
from fqvit.ir.program import Program
from fqvit.lowering.lower import lower
from fqvit.models.graph import run_float, trace
from fqvit.models.pixels import normalise
from fqvit.quant.calibration import Calibration
from fqvit.quant.qparams import symmetric
from fqvit.quant.recipe import RECIPES, Recipe, SiteRule, load_recipe, with_profile
from fqvit.runtime.reference import run
from tests.factories import MODELS, calibration_of, float_model, images_for


def multipliers(program: Program) -> Iterator[int]:
    for op in program.ops:
        if isinstance(op, Linear) and op.out != "acc":
            yield int(program.constants[op.part("mult")].max())
        elif isinstance(op, MatMul | Attend | ShiftMatMul | Mean):
            yield op.mult
        elif isinstance(op, Add):
            for term in op.terms:
                yield term.mult if isinstance(term.mult, int) else int(program.constants[term.mult].max())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", ["fqvit", "fq-vit", "minmax"])
def test_programs_for_npu_have_middle_zero_points_and_short_multipliers(kind: str, name: str) -> None:
    model = float_model(kind)
    calibration = calibration_of(model, with_profile(load_recipe(name), "npu"))
    for site, q in calibration.sites.items():
        if q.log2 or q.levels or site.endswith("softmax"):
            assert q.last - q.zero[0] <= 127 or q.levels or q.log2, site
        else:
            assert q.bits == 8 and (q.zero == 128).all(), site
    program = lower(model, calibration)
    assert max(multipliers(program)) < 2**16
    assert not any(isinstance(op, Linear) and op.out == "acc" for op in program.ops)
    zeros = [op.zero for op in program.ops if isinstance(op, LayerNorm | Mean)]
    zeros += [op.y_zero for op in program.ops if isinstance(op, MatMul | Attend | ShiftMatMul | Add | Mean)]
    assert set(zeros) == {128}
    images = images_for(model.preprocess, 8, 3)
    exact = run_float(trace(model.module), normalise(images, model.preprocess)).numpy()
    assert np.corrcoef(exact.ravel(), run(program, images).ravel())[0, 1] > 0.95


def test_recipe_npu_is_the_default_recipe_with_the_profile() -> None:
    profiled = with_profile(load_recipe("fqvit"), "npu")
    assert msgspec.structs.replace(profiled, name="npu") == RECIPES["npu"]


def test_the_profile_removes_only_the_bits_of_wide_rules() -> None:
    rules = {"residual": SiteRule(bits=16), "hidden": SiteRule(bits=12, observer="omse"), "gelu": SiteRule(observer="ema")}
    found = with_profile(Recipe(name="mine", residual="tensor", sites=rules), "npu")
    assert found.sites == {"hidden": SiteRule(observer="omse"), "gelu": SiteRule(observer="ema")}
    assert found.residual == "ptf" and with_profile(load_recipe("minmax"), "npu").residual == "tensor"


def test_the_profile_keeps_rules_with_8_bits_and_removes_rules_with_9() -> None:
    rules = {"residual": SiteRule(bits=8), "norm": SiteRule(bits=6), "hidden": SiteRule(bits=9), "scores": SiteRule(bits=8)}
    found = with_profile(Recipe(name="mine", residual="tensor", sites=rules), "npu")
    assert found.sites == {name: rule for name, rule in rules.items() if name != "hidden"} and found.residual == "tensor"


def test_unknown_profiles_are_rejected() -> None:
    with pytest.raises(FqvitError, match="profile 'tpu': expected npu"):
        with_profile(load_recipe("fqvit"), "tpu")


@pytest.mark.parametrize("low, high", [(-3.0, 1.0), (0.0, 5.0), (-2.0, 0.0), (0.0, 0.0)])
def test_symmetric_codes_cover_the_range(low: float, high: float) -> None:
    q = symmetric(low, high, 8)
    assert q.zero[0] == 128 and -128 * q.scale[0] <= low and high <= 127 * q.scale[0] * (1 + 1e-12)


def test_default_values_are_not_recorded_in_programs() -> None:
    """Programs from before these fields existed keep their fingerprints."""
    model = float_model("mean")
    assert not {"symmetric", "mult"} & lower(model, calibration_of(model, "fqvit")).header.recipe.keys()
    recorded = lower(model, calibration_of(model, "npu")).header.recipe
    assert recorded["symmetric"] is True and recorded["mult"] == "short"


def test_a_saved_calibration_keeps_the_profile() -> None:
    model = float_model("mean")
    calibration = calibration_of(model, "npu")
    again = lower(model, Calibration.from_json(calibration.to_json()))
    assert again.fingerprint() == lower(model, calibration).fingerprint()
