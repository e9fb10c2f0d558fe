"""Histograms: bins, their edges, counts that do not depend on batching, and the quantization error of a bin."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fqvit.quant.histogram import INDEX_BITS, LEAST_EXPONENT, Histogram, squared_error

LARGEST = float(torch.finfo(torch.float32).max)
EXTREMES = [0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-30, 1.0, -1.0, 4.0, 255.99998, 1e10, LARGEST, -LARGEST]

values = st.one_of(
    st.sampled_from(EXTREMES), st.floats(width=32, allow_nan=False, allow_infinity=False), st.floats(-4, 4, width=32)
)


@st.composite
def channels_and_cuts(draw: st.DrawFn) -> tuple[Tensor, list[int]]:
    """Draw rows [R, 3], with one channel of both signs, one non-negative and one non-positive; and where to split the rows."""
    rows = torch.tensor(draw(st.lists(st.tuples(values, values, values), min_size=1, max_size=40)), dtype=torch.float32)
    rows[:, 1].abs_()
    rows[:, 2] = -rows[:, 2].abs()
    return rows, sorted(draw(st.lists(st.integers(0, len(rows)), max_size=4)))


def observed(*parts: Tensor, bins: int = 16) -> Histogram:
    histogram = Histogram(3, bins)
    for part in parts:
        if len(part):
            histogram.observe(part, part.amin(0).numpy().astype(np.float64), part.amax(0).numpy().astype(np.float64))
    return histogram


def assert_same(a: Histogram, b: Histogram) -> None:
    for key, value in a.state().items():
        np.testing.assert_array_equal(value, b.state()[key], err_msg=key)
    np.testing.assert_array_equal(a.exponent, b.exponent)


@settings(max_examples=300, deadline=None)
@given(channels_and_cuts())
def test_merging_any_split_gives_the_histogram_of_all_rows(case: tuple[Tensor, list[int]]) -> None:
    rows, cuts = case
    parts = [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    whole = observed(rows)
    assert_same(observed(*parts), whole)
    assert_same(observed(*reversed(parts)), whole)
    merged = Histogram(3, 16)
    for part in reversed(parts):
        merged.merge(observed(part))
    assert_same(merged, whole)
    assert_same(Histogram.from_state(merged.state()), whole)


@settings(max_examples=200, deadline=None)
@given(channels_and_cuts())
def test_every_value_lies_in_the_bin_that_counts_it(case: tuple[Tensor, list[int]]) -> None:
    rows, _ = case
    lower, upper, counts = observed(rows).edges()
    assert (counts.sum(1) == len(rows)).all()
    for channel in range(3):
        x = rows[:, channel].double().numpy()
        for a, b, count in zip(lower[channel], upper[channel], counts[channel], strict=True):
            assert ((x >= a) & (x <= b)).sum() >= count
        assert (lower[channel] <= upper[channel]).all()


def least_exponent(low: float, high: float, bins: int) -> int:
    """Find the least exponent for which low and high are less than `bins` bins apart and all indices fit INDEX_BITS bits."""
    for e in range(LEAST_EXPONENT, 129):
        first, last = math.trunc(math.ldexp(low, -e)), math.trunc(math.ldexp(high, -e))
        if last - first < bins and max(-first, last) < 2**INDEX_BITS:
            return e
    raise AssertionError((low, high))


@pytest.mark.parametrize("bins", [8, 512, 8192])
def test_bins_are_as_narrow_as_possible(bins: int) -> None:
    ends = [0.0, 1e-45, 2.0**-100, 1e-30, 0.001, 1.0, 3.9999, 4.0, 7.0, 8.0, 1000.0, 1001.0, 1e10, LARGEST]
    ends += [-x for x in ends]
    pairs = np.array([(low, high) for low in ends for high in ends if low <= high], np.float32)
    histogram = Histogram(len(pairs), bins)
    histogram.observe(torch.from_numpy(pairs.T.copy()), *pairs.T.astype(np.float64))
    assert histogram.exponent.tolist() == [least_exponent(low, high, bins) for low, high in pairs.astype(np.float64)]


def test_zeros_are_counted_per_channel() -> None:
    _, _, counts = observed(torch.zeros(5, 3)).edges()
    assert counts.max(1).tolist() == [5, 5, 5]


def test_empty_histograms_can_be_restored_and_merged() -> None:
    empty = Histogram(3, 16)
    assert_same(Histogram.from_state(empty.state()), Histogram(3, 16))
    histogram = observed(torch.ones(2, 3))
    histogram.merge(empty)
    empty.merge(Histogram(3, 16))
    assert_same(histogram, observed(torch.ones(2, 3)))
    assert_same(empty, Histogram(3, 16))


def test_counts_move_to_the_device_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the meta device, which holds no values and supports every operation needed here except bincount."""
    monkeypatch.setattr(torch, "bincount", lambda index, minlength: index.new_zeros(minlength, dtype=torch.int64))
    histogram = observed(torch.ones(2, 3))
    histogram.observe(torch.ones(2, 3, device="meta"), np.ones(3), np.ones(3))
    assert histogram._counts.device.type == "meta"


def test_bins_are_widened_if_a_single_channel_grows() -> None:
    small = torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])
    for end in (100.0, -100.0):
        for channel in range(3):
            large = torch.zeros(1, 3)
            large[0, channel] = end
            assert_same(observed(small, large), observed(torch.cat([small, large])))


def test_widening_the_bins_keeps_earlier_counts() -> None:
    small, large = torch.full((5, 3), 2.0**-20), torch.full((2, 3), -1000.0)
    histogram = observed(small, large, bins=512)
    assert histogram.exponent.tolist() == [1, 1, 1]
    _, _, counts = histogram.edges()
    assert counts.sum(1).tolist() == [7, 7, 7] and counts.max() == 5


def test_at_least_half_of_the_bins_cover_the_range() -> None:
    rows = torch.randn(4000, 3) * torch.tensor([1.0, 10.0, 0.01]) + torch.tensor([0.0, 100.0, -3.0])
    histogram = observed(rows, bins=512)
    width = 2.0**histogram.exponent
    assert ((histogram.high - histogram.low) / width > 255).all()


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("width", [1e-6, 0.01, 0.3, 1.0, 7.7, 5000.0])
def test_squared_error_is_the_mean_over_a_fine_grid(bits: int, width: float) -> None:
    scale, lowest = 0.37, -1
    highest = lowest + 2**bits - 1
    for middle in (-3.0, 0.0, 0.185, 0.2, 30.0, 120.0):
        a, b = middle - width / 2, middle + width / 2
        x = a + (np.arange(400_000) + 0.5) / 400_000 * (b - a)
        expected = np.mean((x - scale * np.clip(np.rint(x / scale), lowest, highest)) ** 2)
        got = squared_error(np.array([a]), np.array([b]), scale, lowest, highest)[0]
        assert got == pytest.approx(expected, rel=1e-5)


def test_squared_error_of_an_interval_of_width_0_is_that_of_its_point() -> None:
    point = np.array([0.3])
    assert squared_error(point, point, 1.0, -10, 10)[0] == pytest.approx(0.09)


def test_bins_are_adjacent_and_only_the_one_around_0_has_both_signs() -> None:
    rows = torch.arange(-7, 9, dtype=torch.float32)[:, None].repeat(1, 3)
    lower, upper, counts = observed(rows, bins=16).edges()
    assert (counts == 1).all()
    np.testing.assert_array_equal(lower[0], [-7, -7, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7, 8])
    np.testing.assert_array_equal(upper[0], [-7, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7, 8, 8])


@pytest.mark.parametrize("value", [1e-3, 5.0, -1e-6])
def test_bins_do_not_depend_on_a_constant_first_batch(value: float) -> None:
    first = torch.full((4, 3), value)
    rows = torch.cat([first, value * (1 + torch.linspace(0, 1, 30)[:, None].repeat(1, 3) / 8)])
    assert_same(observed(first, rows[4:]), observed(rows))
