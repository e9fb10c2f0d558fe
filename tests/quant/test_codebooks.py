"""Codebooks of groups: how they are fitted, and rounding to their levels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fqvit.quant import codebooks as module
from fqvit.quant.codebooks import Groups, fit_groups, number_of_codebooks
from tests.factories import few


def random_groups(seed: int, outputs: int = 3, inputs: int = 11, size: int = 4) -> Groups:
    rng = np.random.default_rng(seed)
    books = np.sort(rng.integers(-127, 128, (5, 8)), 1).astype(np.int8)
    return Groups(rng.integers(0, 5, (outputs, -(-inputs // size))).astype(np.uint8), books, size)


@few
@given(st.integers(0, 2**32 - 1))
def test_values_are_rounded_to_the_nearest_level(seed: int) -> None:
    groups, rng = random_groups(seed), np.random.default_rng(seed)
    values = np.concatenate([rng.uniform(-140, 140, (3, 5)), rng.integers(-260, 260, (3, 6)) / 2], 1)
    levels = groups.codebooks[groups.of_weights(11)].astype(float)
    found = groups.nearest(torch.from_numpy(values)).numpy()
    distances = np.abs(levels - values[..., None])
    np.testing.assert_array_equal(np.abs(found - values), distances.min(-1))
    larger = np.where(distances == distances.min(-1, keepdims=True), levels, -999).max(-1)
    np.testing.assert_array_equal(found, larger)
    for first in range(11):
        column = groups.nearest(torch.from_numpy(values[:, first : first + 1]), first).numpy()
        np.testing.assert_array_equal(column, found[:, first : first + 1])


@few
@given(st.integers(0, 2**32 - 1))
def test_every_value_in_the_cell_of_a_level_is_rounded_to_it(seed: int) -> None:
    groups, rng = random_groups(seed), np.random.default_rng(seed)
    w = groups.nearest(torch.from_numpy(rng.uniform(-130, 130, (3, 11)))).numpy().astype(np.int8)
    low, high = groups.cells(w)
    assert bool((low < high).all())
    for share in (0.001, 0.3, 0.999):
        values = low + share * (high - low)
        np.testing.assert_array_equal(groups.nearest(values).numpy(), w)
        first, last = groups.extent(11)
        assert bool(((values >= first) & (values <= last)).all())
    assert groups.steps(11).shape == (3, 11) and float(groups.steps(11).min()) > 0


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_fitted_codebooks_are_ascending_and_contain_0(bits: int) -> None:
    rng = np.random.default_rng(bits)
    values = rng.normal(size=(128, 30)) * np.exp2(rng.uniform(-3, 0, (128, 1)))
    values *= 127 / np.abs(values).max()
    found = fit_groups(values, np.ones_like(values), 8, bits)
    assert found.codebooks.shape == (16, 2**bits) and found.choice.shape == (128, 4)
    assert (np.diff(found.codebooks.astype(int)) >= 0).all() and (found.codebooks == 0).any(1).all()
    assert found.codebooks.min() >= -127


def test_levels_that_occur_are_found_exactly() -> None:
    levels = np.array([-100, -20, 0, 90.0])
    values = levels[np.random.default_rng(0).integers(0, 4, (16, 32))]
    found = fit_groups(values, np.ones_like(values), 8, 2)
    np.testing.assert_array_equal(found.nearest(torch.from_numpy(values)).numpy(), values)


def test_codebooks_have_much_less_error_than_evenly_spaced_levels() -> None:
    """One scale per group and evenly spaced levels, the scale being a power of two."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=(64, 64))
    values *= 127 / np.abs(values).max(1, keepdims=True)
    groups = values.reshape(64, 8, 8)
    unit = np.exp2(np.ceil(np.log2(np.abs(groups).max(-1, keepdims=True) / 7)))
    even = np.square(np.rint(groups / unit) * unit - groups).sum()
    found = fit_groups(values, np.ones_like(values), 8, 4).nearest(torch.from_numpy(values)).numpy()
    assert np.square(found - values).sum() < 0.45 * even


def test_errors_of_important_weights_count_more() -> None:
    values = 127 * np.random.default_rng(2).uniform(-1, 1, (64, 32))
    importance = np.where(np.arange(32) % 2 == 0, 1.0, 1e-3) * np.ones((64, 1))
    equal, weighted = (
        np.square(fit_groups(values, each, 8, 3).nearest(torch.from_numpy(values)).numpy() - values)
        for each in (np.ones_like(values), importance)
    )
    assert weighted[:, ::2].sum() < equal[:, ::2].sum() and weighted[:, 1::2].sum() > equal[:, 1::2].sum()


@pytest.mark.parametrize("rows, books", [(1, 1), (15, 1), (16, 2), (127, 15), (128, 16), (199, 16)])
def test_a_layer_with_few_groups_has_few_codebooks(rows: int, books: int) -> None:
    values = np.tile([127.0, 3.0, -4.0], (rows, 1))  # two groups per row
    found = fit_groups(values, np.ones_like(values), 2, 2)
    assert found.codebooks.shape == (books, 4) and number_of_codebooks(2 * rows) == books
    assert found.nearest(torch.zeros(rows, 3, dtype=torch.float64)).abs().max() == 0


def test_codebooks_of_large_layers_are_fitted_to_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    values = 127 * np.random.default_rng(3).uniform(-1, 1, (64, 64))
    whole = fit_groups(values, np.ones_like(values), 8, 4)
    monkeypatch.setattr(module, "SAMPLE", 128)
    sampled = fit_groups(values, np.ones_like(values), 8, 4)
    errors = [np.square(each.nearest(torch.from_numpy(values)).numpy() - values).sum() for each in (whole, sampled)]
    assert errors[0] < errors[1] < 1.5 * errors[0]
