"""Test per-channel scales: the observer works, and the codes cover the observed ranges."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fqvit.errors import FqvitError
from fqvit.ir.program import Site
from fqvit.lowering.sites import scale_counts
from fqvit.quant import channels
from fqvit.quant.calibrate import SiteObserver
from fqvit.quant.channels import ChannelRange, Floats
from fqvit.quant.observers import Observer
from fqvit.quant.plan import SitePlan
from fqvit.quant.qparams import SCALE_GRID, QParams
from fqvit.quant.recipe import RECIPES
from tests.factories import few, many

SITE = "blocks.3.norm1"
BITS = st.integers(2, 8)
SEEDS = st.integers(0, 2**32 - 1)


def seen(*batches: torch.Tensor) -> ChannelRange:
    observer = ChannelRange(SITE)
    for batch in batches:
        observer.observe(batch)
    return observer


def ranges(seed: int, count: int) -> tuple[Floats, Floats]:
    """Draw ranges of many sizes that include 0; some channels are always 0."""
    rng = np.random.default_rng(seed)
    width = np.exp2(rng.uniform(-20, 6, (2, count))) * (rng.random((2, count)) > 0.2)
    return -width[0], width[1]


def representable(q: QParams, count: int) -> tuple[Floats, Floats]:
    """Return the smallest and largest value that the codes of each channel represent."""
    scales, zeros = q.channel_scales(count), q.channel_zeros(count)
    return -zeros * scales, (q.last - zeros) * scales


def covers(q: QParams, low: Floats, high: Floats, slack: float) -> bool:
    """Return whether low and high exceed the values that the codes represent by at most `slack` times the scale."""
    first, last = representable(q, len(low))
    room = (slack + 1e-9) * q.channel_scales(len(low))
    return bool((first - room <= low).all() and (high <= last + room).all())


@few
@given(SEEDS, st.integers(1, 6), st.integers(0, 6))
def test_merged_observers_equal_one_observer_of_all_batches(seed: int, count: int, cut: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batches = list(torch.randn(count, 2, 5, 7, generator=generator) * 4.0 ** torch.randint(-4, 5, (7,), generator=generator))
    whole, merged = seen(*batches), seen(*batches[:cut])
    later = Observer.from_state(pickle.loads(pickle.dumps(seen(*batches[cut:]).state())))
    assert isinstance(later, ChannelRange)
    merged.merge(later)
    for a, b in zip(merged.ranges(), whole.ranges(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (merged.batches, merged.elements) == (whole.batches, whole.elements)


@pytest.mark.parametrize("bad", [0, 1])
def test_non_finite_values_are_reported_after_a_merge(bad: int) -> None:
    halves = [seen(torch.full((1, 3), math.nan if i == bad else 1.0)) for i in range(2)]
    halves[0].merge(halves[1])
    with pytest.raises(FqvitError, match="observed NaN"):
        halves[0].ranges()


def test_the_range_of_a_channel_covers_all_its_values_and_0() -> None:
    low, high = seen(torch.tensor([[1.0, -2.0, 3.0]]), torch.tensor([[2.0, -1.0, -3.0]])).ranges()
    assert low.tolist() == [0, -2, -3] and high.tolist() == [2, 0, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_reported_with_the_site(bad: float) -> None:
    with pytest.raises(FqvitError, match=r"^blocks\.3\.norm1: observed NaN or infinite"):
        seen(torch.ones(2, 3), torch.tensor([[0.0, bad, 1.0]]), torch.ones(2, 3)).ranges()
    with pytest.raises(FqvitError, match=r"^blocks\.3\.norm1: observed NaN or infinite"):
        seen(torch.tensor([[0.0, bad, 1.0], [1.0, 1.0, 1.0]])).ranges()  # only one end of the range is not finite


def test_a_site_without_data_is_reported_by_name() -> None:
    with pytest.raises(FqvitError, match=r"^blocks\.3\.norm1: no calibration data"):
        ChannelRange(SITE).ranges()


@many
@given(SEEDS, st.integers(1, 9))
def test_scales_lie_on_a_grid_that_a_file_stores_exactly(seed: int, count: int) -> None:
    exact = np.exp2(np.random.default_rng(seed).uniform(-25, 5, count))
    scales = channels.on_grid(exact)
    unit = scales.max() / SCALE_GRID
    assert scales.max() == exact.max()
    assert (scales >= exact * (1 - 1e-11)).all() and (scales <= exact + unit).all()  # rounded up by less than one unit
    np.testing.assert_array_equal(channels.on_grid(scales), scales)
    read_back(QParams(8, scales, np.zeros(count, np.int64)))


def read_back(q: QParams, groups: int = 1) -> None:
    units, counts = scale_counts(q, groups)
    assert counts.dtype == np.uint16 and counts.min() >= 1 and len(counts) == len(q.scale) // groups
    # Units are stored with nine digits.
    site = Site("norm", q.bits, units, tuple([0] * groups), steps="counts")
    np.testing.assert_allclose(site.scales_and_zeros({"counts": counts})[0], q.scale, rtol=1e-8)


@many
@given(SEEDS, st.integers(1, 9), BITS)
def test_symmetric_and_affine_codes_cover_every_channel(seed: int, count: int, bits: int) -> None:
    low, high = ranges(seed, count)
    symmetric = channels.symmetric_channels(low, high, bits)
    assert covers(symmetric, low, high, 0) and set(symmetric.zero.tolist()) == {2 ** (bits - 1)}
    affine = channels.affine_channels(low, high, bits)
    assert covers(affine, low, high, 0.5) and affine.zero.min() >= 0 and affine.zero.max() <= affine.last
    for q in (symmetric, affine):
        read_back(q)
    # No scale is much larger than necessary, unless it is the smallest scale of the grid.
    wide = np.maximum(high - low, (high - low).max() / SCALE_GRID)
    assert (affine.scale <= wide / affine.last * 2 + 1e-300).all() or not wide.any()


@many
@given(SEEDS, st.integers(1, 5), BITS)
def test_q_and_k_have_per_tensor_scales_and_v_per_channel_scales(seed: int, size: int, bits: int) -> None:
    low, high = ranges(seed, 3 * size)
    q = channels.qkv(low, high, bits)
    assert len(q.scale) == len(q.zero) == 3 * size
    assert all(len(q.group(i).scale) == 1 for i in (0, 1)) and covers(q, low, high, 0.5)
    v = q.scale[2 * size :]
    assert v.min() >= v.max() * channels.NARROWEST * (1 - 1e-9)
    read_back(q, 3)


def test_small_scales_of_v_are_stored_exactly_next_to_large_scales_of_q() -> None:
    """A common grid for Q, K and V would round the scales of V to 0."""
    low, high = np.array([-1e4, -1e4, -1e-3, -1e-4]).repeat([2, 2, 1, 1]), np.ones(6)
    high[4:] = 1e-3
    read_back(channels.qkv(low, high, 8), 3)


@many
@given(SEEDS, st.integers(1, 5), BITS)
def test_scales_of_the_attention_output_are_those_of_v_times_a_common_factor(seed: int, size: int, bits: int) -> None:
    low, high = ranges(seed, size)
    v = channels.qkv(*ranges(seed + 1, 3 * size), bits).group(2)
    q = channels.context(low, high, v, bits)
    ratio = q.scale / v.scale
    assert np.allclose(ratio, ratio[0], rtol=1e-12) and covers(q, low, high, 1e-6)
    assert len(q.scale) == len(v.scale) and set(q.zero.tolist()) == {2 ** (bits - 1)}


@many
@given(SEEDS, st.integers(1, 9), BITS, st.integers(0, 8))
def test_gelu_scales_differ_by_powers_of_two_and_cover_every_channel(seed: int, count: int, bits: int, k: int) -> None:
    high = ranges(seed, count)[1]
    q = channels.gelu(np.full(count, -0.16), high, bits, k)
    assert covers(q, np.full(count, -0.16), high, 1)
    assert q.zero.min() >= 0 and q.zero.max() <= q.last
    kinds = {}
    for scale, zero in zip(q.scale.tolist(), q.zero.tolist(), strict=True):
        assert kinds.setdefault(scale, zero) == zero  # channels with the same scale share a table
    power = np.log2(q.scale.max() / q.scale)
    assert np.array_equal(power, np.rint(power)) and power.max() <= k
    read_back(q)


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_gelu_channel_that_is_never_positive_has_the_last_code_as_zero_point(bits: int) -> None:
    q = channels.gelu(np.full(2, -0.1), np.zeros(2), bits, 4)
    assert q.zero.tolist() == [q.last] * 2
    # The same holds next to a channel that is wider by almost a power of two, where rounding up could exceed the last code.
    for j in range(1, 9):
        wide = np.nextafter(0.17 * 2**j - 0.17, 0)
        assert channels.gelu(np.full(2, -0.1), np.array([wide, 0.0]), bits, 8).zero.max() <= q.last


@pytest.mark.parametrize("count", [1, 4])
def test_a_site_that_is_always_0_has_scales_of_ordinary_size(count: int) -> None:
    nothing = np.zeros(count)
    symmetric, affine = channels.symmetric_channels(nothing, nothing, 8), channels.affine_channels(nothing, nothing, 8)
    triple = channels.qkv(np.zeros(3 * count), np.zeros(3 * count), 8)
    after = channels.context(nothing, nothing, triple.group(2), 8)
    for q in (symmetric, affine, triple, after):
        assert 1e-3 < q.scale.min() and q.scale.max() <= 1


@many
@given(SEEDS, st.integers(1, 9), BITS, st.integers(0, 8))
def test_symmetric_gelu_outputs_cover_their_channels(seed: int, count: int, bits: int, k: int) -> None:
    high = ranges(seed, count)[1]
    q = channels.symmetric_gelu(high, bits, k)
    assert covers(q, np.full(count, -0.17), high, 0) and set(q.zero.tolist()) == {2 ** (bits - 1)}
    power = np.log2(q.scale.max() / q.scale)
    assert np.array_equal(power, np.rint(power)) and power.max() <= k


def test_a_narrow_channel_keeps_its_scale_unless_a_minimum_is_given() -> None:
    low, high = np.array([-1.0, -1e-3]), np.array([0.5, 1e-4])
    scales = channels.symmetric_channels(low, high, 8).scale
    assert scales[1] == pytest.approx(1e-3 / 127, rel=0.1) and scales[0] == pytest.approx(1 / 127, rel=1e-4)
    assert channels.symmetric_channels(low, high, 8, 0.25).scale[1] == pytest.approx(0.25 / 127, rel=1e-4)


@pytest.mark.parametrize("quantize", [channels.symmetric_channels, channels.affine_channels])
def test_a_constant_channel_has_the_smallest_scale_of_the_grid(quantize: Any) -> None:
    scale = quantize(np.array([-1.0, 0.0]), np.array([0.5, 0.0]), 8).scale
    assert scale[0] / scale[1] == pytest.approx(SCALE_GRID)


def test_gelu_ranges_are_tight() -> None:
    assert channels.gelu(np.zeros(2), np.array([3.0, 1.0]), 8, 0).scale == pytest.approx([3.17 / 255] * 2)
    assert channels.symmetric_gelu(np.array([3.0, 1.0]), 8, 0).scale == pytest.approx([3 / 127] * 2)
    # Narrow channels have finer scales, by powers of two up to 2^k.
    assert channels.gelu(np.zeros(2), np.array([3.0, 0.1]), 8, 2).scale == pytest.approx([3.17 / 255, 3.17 / 255 / 4])
    assert channels.symmetric_gelu(np.array([3.0, 1.0]), 8, 2).scale == pytest.approx([3 / 127, 3 / 127 / 2])
    assert channels.symmetric_gelu(np.zeros(1), 8, 0).scale == pytest.approx([0.17 / 127])


def test_q_and_k_have_the_middle_code_as_zero_point_only_on_request() -> None:
    low, high = np.zeros(6), np.arange(1.0, 7.0)
    assert channels.qkv(low, high, 8).zero.tolist() == [0, 0, 0, 0, 128, 128]
    assert channels.qkv(low, high, 8, True).zero.tolist() == [128] * 6


@pytest.mark.parametrize(
    ("role", "symmetric", "same"),
    [
        ("norm", False, channels.affine_channels),
        ("norm", True, channels.symmetric_channels),
        ("gelu", False, lambda low, high, bits: channels.gelu(low, high, bits, 2)),
        ("gelu", True, lambda low, high, bits: channels.symmetric_gelu(high, bits, 2)),
    ],
)
def test_the_role_of_a_site_selects_its_quantization(role: Any, symmetric: bool, same: Any) -> None:
    low, high = np.array([-0.1, -0.1, 0.0]), np.array([1.0, 2.0, 3.0])
    site = SitePlan(SITE, "channels", 6, role, k=2, symmetric=symmetric)
    q, wanted = channels.qparams(site, low, high, None), same(low, high, 6)
    np.testing.assert_array_equal(q.scale, wanted.scale)
    np.testing.assert_array_equal(q.zero, wanted.zero)


@many
@given(SEEDS, st.integers(1, 40), BITS, st.integers(0, 8), st.floats(0.05, 1))
def test_no_gelu_channel_has_a_smaller_range_than_the_floor(seed: int, count: int, bits: int, k: int, quantile: float) -> None:
    """A neuron that is silent in all calibration images may fire in others."""
    low, high = np.full(count, -0.16), ranges(seed, count)[1]
    floor = float(np.quantile(high, quantile))
    for middle in (False, True):
        site = SitePlan("act", "channels", bits, "gelu", k=k, symmetric=middle)
        q = channels.qparams(site, low, high, None, quantile)
        assert covers(q, low, np.maximum(high, floor), 1)
        power = np.log2(q.scale.max() / q.scale)
        assert np.allclose(power, np.rint(power)) and power.max() <= k
    read_back(q)


def test_the_gelu_floor_is_itself_one_of_the_ranges() -> None:
    """Many channels have exactly this range, so it must not be rounded up to the next power of two."""
    high = np.array([5.0, 1.0, 1.0, 1.0, 0.1])
    site = SitePlan("act", "channels", 8, "gelu", k=4)
    q = channels.qparams(site, np.full(5, -0.17), high, None, 0.5)
    assert q.scale[1:] == pytest.approx([1.17 / 255] * 4) and q.scale[0] == pytest.approx(8 * 1.17 / 255)
    # Without a floor, scales are fractions of the largest scale, and the silent channel has the smallest scale.
    assert channels.qparams(site, np.full(5, -0.17), high, None).scale[-1] == pytest.approx(5.17 / 255 / 16)


def test_channels_observed_in_few_rows_share_one_range() -> None:
    """Per-channel ranges of few rows would saturate most channels of the next image."""
    generator = torch.Generator().manual_seed(0)
    site = SiteObserver(SitePlan(SITE, "channels", 8, "norm"), RECIPES["fqvit"])
    site.observe(torch.randn(2, 96, generator=generator))
    q = site.qparams()
    assert len(set(q.scale)) == len(set(q.zero)) == 1
    fresh = torch.randn(64, 96, generator=generator)
    assert float((q.decode(q.encode(fresh)) - fresh).abs().mean()) < float(q.scale[0])
    site.observe(torch.randn(channels.FEW_ROWS, 96, generator=generator))
    assert len(set(site.qparams().scale)) > 48


def test_a_shared_range_keeps_q_k_and_v_apart() -> None:
    low, high = channels.shared_range("qkv", -np.arange(1.0, 7.0), np.arange(1.0, 7.0))
    assert high.tolist() == [2, 2, 4, 4, 6, 6] and low.tolist() == [-2, -2, -4, -4, -6, -6]
