"""Quantization parameters: affine, symmetric, log2 and relative codes, and groups of channels."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fqvit.quant.calibration import SavedSite
from fqvit.quant.observers import Ptf
from fqvit.quant.qparams import QParams, affine, concatenate, log2, log2_encode, relative, symmetric
from tests.factories import few, many

BITS = st.integers(2, 8)
ENDS = st.floats(-1e4, 1e4)


@many
@given(ENDS, ENDS, BITS)
def test_affine_codes_cover_the_range_and_represent_0_exactly(lo: float, hi: float, bits: int) -> None:
    q = affine(lo, hi, bits)
    lo, hi = min(lo, 0.0), max(hi, 0.0)
    scale, zero = float(q.scale[0]), int(q.zero[0])
    assert scale > 0 and 0 <= zero <= q.last == 2**bits - 1
    assert scale == (hi - lo) / q.last or (hi - lo) / q.last == 0
    assert zero == min(max(round(-lo / scale), 0), q.last)
    # The ends of the range are within one code, and 0 is represented exactly.
    assert (0 - zero) * scale <= lo + scale and (q.last - zero) * scale >= hi - scale
    assert float(q.decode(q.encode(torch.zeros(1, dtype=torch.float64)))[0]) == 0.0


def test_a_site_that_is_always_0_has_a_positive_scale() -> None:
    assert affine(0.0, 0.0, 8).scale[0] == 1.0 and affine(0.0, 0.0, 8).zero[0] == 0
    assert symmetric(0.0, 0.0, 8).scale[0] == 1.0 and symmetric(0.0, 0.0, 8).zero[0] == 128


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_symmetric_codes_map_the_largest_absolute_value_to_an_end_code(bits: int) -> None:
    for lo, hi in ((-3.0, 1.0), (-1.0, 3.0)):
        q = symmetric(lo, hi, bits)
        assert q.scale[0] * (2 ** (bits - 1) - 1) == pytest.approx(3.0) and q.zero[0] == 2 ** (bits - 1)


@pytest.mark.parametrize("lo, hi, zero", [(0.0, 1.0, 0), (-1.0, 0.0, 255), (2.0, 5.0, 0), (-5.0, -2.0, 255), (-1.0, 1.0, 128)])
def test_zero_points_of_one_sided_ranges_are_end_codes(lo: float, hi: float, zero: int) -> None:
    assert affine(lo, hi, 8).zero[0] == zero


@many
@given(st.integers(0, 255), st.integers(1, 2**20), st.integers(-(2**20), 2**20))
def test_encoding_rounds_half_up_then_clips(zero: int, double_scale: int, x: int) -> None:
    q = QParams(8, np.array([double_scale / 2.0]), np.array([zero]))
    code = int(q.encode(torch.tensor([x / 4.0], dtype=torch.float64))[0])
    assert code == min(max(math.floor(x / (2 * double_scale) + 0.5) + zero, 0), 255)


@few
@given(st.integers(0, 2**32 - 1), BITS)
def test_codes_are_fixed_points_of_decode_and_encode(seed: int, bits: int) -> None:
    rng = np.random.default_rng(seed)
    alpha = rng.integers(0, 4, 6).astype(np.uint8) if seed % 2 else None
    q = QParams(bits, np.array([float(rng.uniform(1e-3, 2))]), np.array([int(rng.integers(0, 2**bits))]), alpha)
    codes = torch.from_numpy(rng.integers(0, 2**bits, (5, 6)).astype(np.float64))
    assert torch.equal(q.encode(q.decode(codes)), codes)


def test_each_unit_of_alpha_doubles_the_scale_of_its_channel() -> None:
    q = QParams(8, np.array([0.5]), np.array([10]), np.array([0, 1, 3], np.uint8))
    assert q.channel_scales(3).tolist() == [0.5, 1.0, 4.0]
    assert q.encode(torch.tensor([4.0, 4.0, 4.0])).tolist() == [18, 14, 11]
    assert q.decode(torch.tensor([18.0, 14.0, 11.0])).tolist() == [4.0, 4.0, 4.0]
    assert q.tiled(2).channel_scales(6).tolist() == [0.5, 1.0, 4.0] * 2


def test_groups_of_channels_are_concatenated() -> None:
    q = concatenate([affine(0.0, 255.0, 8), affine(-1.0, 1.0, 8), affine(-255.0, 0.0, 8)])
    assert q.channel_scales(6).tolist() == [1, 1, 2 / 255, 2 / 255, 1, 1]
    assert q.channel_zeros(6).tolist() == [0, 0, 128, 128, 255, 255]
    assert q.encode(torch.tensor([7.0, 7, 0, 0, -7, -7])).tolist() == [7, 7, 128, 128, 248, 248]
    assert [q.group(i).zero.tolist() for i in range(3)] == [[0], [128], [255]]
    assert affine(-1.0, 1.0, 8).group(2).zero.tolist() == [128]
    assert QParams(8, np.array([1.0, 2]), np.array([3, 4])).encode(torch.tensor([[5.0, 6.0]])).tolist() == [[8, 7]]


def test_a_group_is_per_tensor_only_if_its_scales_and_zero_points_are_equal() -> None:
    q = QParams(8, np.array([1.0, 1, 2, 3, 3, 3, 4, 4, 4]), np.array([7, 7, 7, 0, 5, 0, 6, 6, 6]))
    assert [q.group(i).scale.tolist() for i in range(3)] == [[1, 1, 2], [3, 3, 3], [4]]
    assert [q.group(i).zero.tolist() for i in range(3)] == [[7, 7, 7], [0, 5, 0], [6]]


def test_tiling_repeats_per_channel_parameters_and_keeps_per_tensor_ones() -> None:
    q = QParams(8, np.array([1.0, 2]), np.array([3, 4])).tiled(3)
    assert q.channel_scales(6).tolist() == [1, 2] * 3 and q.channel_zeros(6).tolist() == [3, 4] * 3
    one = QParams(8, np.array([1.0]), np.array([3])).tiled(3)
    assert one.scale.tolist() == [1] and one.zero.tolist() == [3]


def slow_log2(p: float, last: int) -> int:
    r = math.floor(1 / max(p, 2.0**-30) + 0.5)
    top = r.bit_length() - 1
    return min(top + (2 * r >= 3 << top), last)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_log2_codes_match_a_slow_definition(bits: int) -> None:
    last = 2**bits - 1
    p = [1.0, 0.7, 2 / 3, 0.667, 0.5, 0.4, 1 / 3, 0.33, 0.25, 1 / 6, 0.1, 0.01, 1e-4, 2.0**-14, 2.0**-15, 1e-9, 0.0]
    got = log2_encode(torch.tensor(p, dtype=torch.float64), last)
    assert got.tolist() == [slow_log2(x, last) for x in p]
    assert got[0] == 0 and got[-1] == last


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_log2_codes_are_exact_for_every_integer_ratio(bits: int) -> None:
    """1 / p takes every integer that 4-bit codes distinguish, and more."""
    ratios = range(1, 2**16 + 1)
    got = log2_encode(1 / torch.tensor(ratios, dtype=torch.float64), 2**bits - 1)
    assert got.tolist() == [min(r.bit_length() - 1 + (2 * r >= 3 << r.bit_length() - 1), 2**bits - 1) for r in ratios]


@pytest.mark.parametrize("bits", [5, 8])
def test_wide_log2_codes_saturate_at_30(bits: int) -> None:
    p = torch.tensor([2.0**-29, 2.0**-30, 2.0**-33, 0.0])
    assert log2_encode(p, 2**bits - 1).tolist() == [29, 30, 30, 30]


def test_relative_levels_are_powers_of_two_three_midpoints_and_0() -> None:
    powers = [2**k for k in range(15, 3, -1)]
    assert relative(4, 197).levels == (*sorted([*powers, 24576, 12288, 6144], reverse=True), 0)
    assert relative(3, 197).levels == (*powers[:7], 0) and relative(2, 197).levels == (*powers[:3], 0)
    assert relative(5, 197).levels == tuple(range(32)) and relative(8, 197).levels == tuple(range(256))
    # The sum of a row of 8-bit values, all at the largest level, must fit 31 bits.
    for tokens in (256, 257, 1024, 5000):
        top = relative(4, tokens).levels[0]
        assert 255 * tokens * top <= 2**31 < 2 * 255 * tokens * top or top == 2**15


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_relative_codes_choose_the_nearest_level_and_the_larger_one_of_a_tie(bits: int) -> None:
    q = relative(bits, 197)
    weights = np.array(q.levels) / max(q.levels)  # powers of two and midpoints: the boundaries are exact
    row = np.concatenate([weights, (weights[1:] + weights[:-1]) / 2, np.linspace(0, 1, 101)])
    nearest = np.abs(row[:, None] - weights).argmin(1)  # the first of a tie, which is the larger level
    rows = torch.from_numpy(row) * torch.tensor([[1.0], [0.25], [0.5]])  # levels are relative to the largest value of each row
    assert q.encode(rows).tolist() == [nearest.tolist()] * 3


def test_log2_parameters_encode_logarithms() -> None:
    p = torch.tensor([[1.0, 0.5], [0.1, 0.0]])
    assert log2(4, False).encode(p).tolist() == log2(4, True).encode(p).tolist() == [[0, 1], [3, 15]]


def test_the_last_log2_code_means_0_with_zero_code() -> None:
    codes = torch.tensor([0.0, 1.0, 14.0, 15.0])
    assert log2(4, False).decode(codes).tolist() == [1.0, 0.5, 2.0**-14, 2.0**-15]
    assert log2(4, True).decode(codes).tolist() == [1.0, 0.5, 2.0**-14, 0.0]


@pytest.mark.parametrize("q", [log2(4, False), log2(2, True), relative(3, 197), relative(8, 197)])
def test_parameters_of_attention_survive_a_json_round_trip(q: QParams) -> None:
    restored = msgspec.json.decode(msgspec.json.encode(SavedSite.of(q)), type=SavedSite).qparams()
    codes = torch.tensor([[0.0, 1.0, q.last]])
    assert restored.bits == q.bits and torch.equal(restored.decode(codes), q.decode(codes))


@few
@given(st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_ptf_parameters_match_their_formulas(seed: int, k: int) -> None:
    """scale = range / 255 / 2^k and zero = round(-min / (2^k * scale)), with the range extended to include 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 5, generator=generator) * torch.tensor([0.1, 1.0, 3.0, 9.0, 30.0])
    observer = Ptf("site", 8, k)
    observer.observe(x)
    found = observer.result()
    lo, hi = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    assert found.scale == pytest.approx((hi - lo) / 255 / 2**k, rel=1e-6)
    assert found.zero == min(max(round(-lo / (found.scale * 2**k)), 0), 255)
    assert found.alpha.min() >= 0 and found.alpha.max() <= k
    wide, narrow = int(found.alpha[4]), int(found.alpha[0])
    assert wide == k and narrow <= wide


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("tokens", [1, 257, 4113, 40000])
def test_levels_on_the_curve_fall_from_the_largest_to_0(bits: int, tokens: int) -> None:
    levels = relative(bits, tokens, "curve").levels
    assert len(levels) == 2**bits and list(levels) == sorted(levels, reverse=True) and levels[-1] == 0
    assert levels[0] * tokens * 255 < 2**31 and (tokens > 257 or levels[0] == 2**15)
    assert bits > 4 or tokens > 257 or len(set(levels)) == 2**bits
    u = np.linspace(1, 0, 2**bits)
    np.testing.assert_allclose(np.array(levels) / levels[0], (u**2 + 4 * u**4) / 5, atol=0.51 / levels[0])


def test_wide_codes_without_the_curve_are_evenly_spaced() -> None:
    assert relative(8, 257).levels == tuple(range(256)) and relative(5, 257).levels == tuple(range(32))


@pytest.mark.parametrize("spread", [1.0, 2.0, 3.0])
def test_8_bit_codes_on_the_curve_have_less_error_than_evenly_spaced_ones_if_few_weights_are_large(spread: float) -> None:
    p = torch.softmax(spread * torch.randn(64, 257, generator=torch.Generator().manual_seed(0)), -1)
    curve, even = (float((q.decode(q.encode(p)) - p).square().sum()) for q in (relative(8, 257, "curve"), relative(8, 257)))
    assert curve < even


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0])
def test_the_curve_has_less_error_than_powers_for_smooth_attention(spread: float) -> None:
    """Softmax of normal scores over 257 tokens, as in a vision transformer."""
    p = torch.softmax(spread * torch.randn(64, 257, generator=torch.Generator().manual_seed(0)), -1)
    errors = {}
    for kind in ("powers", "curve"):
        q = relative(4, 257, kind)
        errors[kind] = float((q.decode(q.encode(p)) - p).square().sum())
    assert errors["curve"] < errors["powers"]
