"""Tests of the comparison per site: the rebuilt simulation, signal-to-noise ratios, and float models that do not match."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from fqvit.errors import FqvitError
from fqvit.evaluate.compare import Comparer, calibration_of, compare
from fqvit.models.config import ViTConfig
from fqvit.models.layers import LayerNorm
from fqvit.models.load import build
from fqvit.quant.simulate import Simulation


def test_the_simulation_rebuilt_from_a_program_matches_that_of_its_calibration(made: Any) -> None:
    rebuilt = calibration_of(made.program, made.program.header.output.features())
    assert rebuilt.recipe == made.calibration.recipe
    assert set(rebuilt.sites) == set(made.calibration.sites)
    for name, q in rebuilt.sites.items():
        wanted = made.calibration.sites[name]
        assert (q.bits, q.log2, q.zero.tolist()) == (wanted.bits, wanted.log2, wanted.zero.tolist()), name
        np.testing.assert_allclose(q.scale, wanted.scale, rtol=1e-8)
        np.testing.assert_array_equal(q.alpha, wanted.alpha)
    mine, theirs = (Simulation(made.model, c).run(made.images[:4]) for c in (rebuilt, made.calibration))
    torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max()))


def test_compensated_weights_are_taken_from_the_program(compensated: Any) -> None:
    """Compensated weights cannot be recomputed without the calibration images."""
    mine = Comparer(compensated.program, compensated.model).simulation
    theirs = Simulation(compensated.model, compensated.calibration)
    for name, (weight, bias) in theirs.weights.items():
        torch.testing.assert_close(mine.weights[name][0], weight, rtol=1e-5, atol=0, msg=name)
        torch.testing.assert_close(mine.weights[name][1], bias, rtol=1e-5, atol=1e-9, msg=name)
    for name, q in compensated.calibration.sites.items():
        np.testing.assert_allclose(mine.sites[name].channel_scales(len(q.scale)), q.scale, rtol=1e-8)
        np.testing.assert_array_equal(mine.sites[name].channel_zeros(len(q.zero)), q.zero)


def test_all_sites_and_the_logits_are_compared_lowest_ratio_first(made: Any) -> None:
    found = compare(made.program, made.model, [made.images[:2], made.images[2:8]])
    assert found.images == 8
    assert {row.site for row in found.sites} == {*made.program.header.sites, made.program.header.output.buffer}
    ratios = [row.integer_db for row in found.sites]
    assert ratios == sorted(ratios)
    assert found.integer_agreement is not None and 0 <= found.integer_agreement <= 100


def test_integer_and_simulated_ratios_are_close_and_rounding_only_one_site_gives_no_lower_ratio(made: Any) -> None:
    for row in compare(made.program, made.model, [made.images[:12]]).sites:
        assert row.integer_db is not None and row.simulated_db is not None
        assert math.isclose(row.integer_db, row.simulated_db, abs_tol=2.5), row
        if row.role != "logits":
            assert row.alone_db is not None and row.alone_db > row.integer_db - 1, row
            assert row.integer_db > 3, row


def test_features_are_compared_without_logits(features: Any) -> None:
    found = compare(features.program, features.model, [features.images[:2]])
    assert found.integer_agreement is None
    assert "head" not in {row.site for row in found.sites}


def test_a_float_model_without_the_sites_of_the_program_is_rejected(made: Any) -> None:
    shallow = ViTConfig(image=(16, 16), patch=4, channels=3, classes=7, width=24, depth=1, heads=3, hidden=48)
    other = dataclasses.replace(made.model, module=build(shallow).eval())
    with pytest.raises(FqvitError, match="the program has this site, but .* does not"):
        compare(made.program, other, [made.images[:1]])


def test_a_comparison_without_images_is_rejected(made: Any) -> None:
    with pytest.raises(FqvitError, match="no images"):
        compare(made.program, made.model, [])


def test_a_float_model_with_nan_or_infinite_values_is_rejected(made: Any) -> None:
    module = copy.deepcopy(made.model.module)
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, LayerNorm):
                part.weight.fill_(3e38)
    with pytest.raises(FqvitError, match=r"norm\d?: the float model gives NaN or infinite values"):
        compare(made.program, dataclasses.replace(made.model, module=module), [made.images[:1]])
