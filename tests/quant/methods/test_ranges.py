"""Tests of scales chosen for the least squared error: each kind of site, and the unevenly spaced codes of GELU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fqvit.models.layers import Role
from fqvit.quant import channels
from fqvit.quant.methods.ranges import least_error, sample_rows
from fqvit.quant.plan import SitePlan
from fqvit.quant.qparams import QParams, affine


def heavy_tails(rows: int, size: int, seed: int = 0) -> Tensor:
    """Values whose extremes are many standard deviations from 0, with a different scale and mean per channel."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=generator) ** 3
    return x * (0.2 + torch.rand(size, generator=generator)) + torch.randn(size, generator=generator)


def error(x: Tensor, q: QParams) -> float:
    return float((q.decode(q.encode(x)) - x).square().sum())


def site(role: Role, bits: int) -> SitePlan:
    return SitePlan("site", "channels", bits, role, k=4)


def covering(x: Tensor, role: Role, bits: int) -> QParams:
    """Return parameters that cover all rows, without a search."""
    low, high = (
        ends.clamp(max=0).double().numpy() if least else ends.clamp(min=0).double().numpy()
        for least, ends in (
            (True, x.amin(0)),
            (False, x.amax(0)),
        )
    )
    v = channels.symmetric_channels(low, high, bits) if role == "context" else None
    return channels.qparams(site(role, bits), low, high, v)


@pytest.mark.parametrize("role", ["norm", "qkv", "value", "context", "gelu"])
@pytest.mark.parametrize("bits", [4, 6])
def test_the_search_reduces_the_error_and_keeps_the_structure_of_the_scales(role: Role, bits: int) -> None:
    x = heavy_tails(500, 24)
    x = torch.nn.functional.gelu(x) if role == "gelu" else x
    before = covering(x, role, bits)
    after = least_error(site(role, bits), x, before, torch.ones(24))
    assert error(x, after) < (0.8 if bits == 4 else 1.0) * error(x, before)
    assert (after.bits, len(after.scale), after.alpha) == (bits, 24, None)
    assert 0 <= after.zero.min() and after.zero.max() <= after.last
    if role == "context":
        ratio = after.scale / before.scale
        np.testing.assert_allclose(ratio, ratio[0])
    if role == "gelu":
        powers = np.log2(after.scale / after.scale.min())
        np.testing.assert_allclose(powers, np.rint(powers), atol=1e-9)
    if role == "qkv":
        assert len(set(after.scale[:8])) == len(set(after.scale[8:16])) == 1
    if role in ("value", "context"):
        assert (after.zero == 2 ** (bits - 1)).all()


def test_one_scale_for_all_channels_is_searched_too() -> None:
    x = heavy_tails(500, 24)
    before = affine(float(x.min()), float(x.max()), 4)
    after = least_error(SitePlan("site", "range", 4, "norm"), x, before, torch.ones(24))
    assert len(after.scale) == 1 and error(x, after) < 0.8 * error(x, before)


@pytest.mark.parametrize("bits", [3, 4, 5, 6])
def test_spaced_codes_of_gelu_are_bytes_with_as_many_values_as_the_bits_allow(bits: int) -> None:
    x = torch.nn.functional.gelu(2 * torch.randn(500, 24, generator=torch.Generator().manual_seed(0)) - 1)
    even = least_error(site("gelu", bits), x, covering(x, "gelu", bits), torch.ones(24))
    q = least_error(site("gelu", bits), x, covering(x, "gelu", bits), torch.ones(24), spaced=True)
    assert (q.bits, q.width, len(q.grid), len(q.scale)) == (8, bits, 2**bits, 1)
    assert list(q.grid) == sorted(set(q.grid)) and 0 <= q.grid[0] and q.grid[-1] <= 255
    assert int(q.zero[0]) in q.grid  # 0 is exact
    codes = q.encode(x)
    assert set(codes.unique().int().tolist()) <= set(q.grid)
    assert error(x, q) < error(x, even)


def test_evenly_spaced_codes_of_gelu_are_kept_if_they_have_less_error() -> None:
    """With 7 bits, a grid uses half of all bytes. One scale per channel then reduces the error more than uneven spacing."""
    x = torch.nn.functional.gelu(2 * torch.randn(500, 24, generator=torch.Generator().manual_seed(0)) - 1)
    q = least_error(site("gelu", 7), x, covering(x, "gelu", 7), torch.ones(24), spaced=True)
    assert (q.bits, q.width, q.grid) == (7, 7, ())


def test_codes_of_a_grid_are_the_nearest_ones() -> None:
    q = QParams(8, np.array([0.5]), np.array([2], np.int64), grid=(0, 2, 3, 10))
    x = torch.tensor([[-9.0, -0.6, -0.4, 0.2, 0.3, 2.2, 2.3, 99.0]])
    assert q.encode(x).int().tolist() == [[0, 0, 2, 2, 3, 3, 10, 10]]
    assert q.decode(q.encode(x))[0, -1] == 4.0


def test_rows_are_sampled_evenly() -> None:
    batches = [torch.arange(60.0).reshape(2, 15, 2) + 60 * i for i in range(3)]
    assert sample_rows(batches, 1000).shape == (90, 2)
    few = sample_rows(batches, 10)
    assert few.shape == (10, 2) and few[-1, 0] > 100


@pytest.mark.parametrize("bits", [4, 6])
def test_codes_of_a_neuron_with_a_wide_range_have_the_wanted_bits(bits: int) -> None:
    x = torch.nn.functional.gelu(220 * torch.rand(400, 1, generator=torch.Generator().manual_seed(0)) ** 3)
    q = least_error(site("gelu", bits), x, covering(x, "gelu", bits), torch.ones(1), spaced=True)
    assert q.width == bits and error(x, q) <= error(
        x, least_error(site("gelu", bits), x, covering(x, "gelu", bits), torch.ones(1))
    )
