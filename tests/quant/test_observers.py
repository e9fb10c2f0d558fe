"""Observers: merging, edge cases, and results against their definitions.

EMA: exponential moving average. OMSE: the range with the least mean squared error. PTF: power-of-two factor.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fqvit.errors import FqvitError
from fqvit.quant.observers import OMSE_STRIDE, Attended, Ema, MinMax, Observer, Omse, Percentile, Ptf, RangeObserver
from fqvit.quant.quantile import tail

SITE = "blocks.3.attn.scores"
MAKERS: dict[str, Callable[[], Any]] = {
    "minmax": lambda: MinMax(SITE),
    "attended": lambda: Attended(SITE),
    "ema": lambda: Ema(SITE, 0.3),
    "percentile": lambda: Percentile(SITE, 0.9, 0.3),
    "omse": lambda: Omse(SITE, 4),
    "omse-last": lambda: Omse(SITE, 4, last_batch=True),
    "ptf": lambda: Ptf(SITE),
    "ptf-last": lambda: Ptf(SITE, k=4, last_batch=True),
}


def fed(observer: Any, batches: list[Tensor]) -> Any:
    for x in batches:
        observer.observe(x)
    return observer


def outcome(observer: Any) -> Any:
    if isinstance(observer, RangeObserver):
        return observer.range()
    r = observer.result()
    return r.scale, r.zero, r.alpha.tolist()


def batches_of(count: int, seed: int, channels: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    spread = 4.0 ** torch.randint(-6, 7, (count, 1, 1, channels), generator=generator)
    return list(torch.randn(count, 2, 9, channels, generator=generator) * spread)


def assert_equal_state(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal_state(a[key], b[key])
    else:
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 8), cuts=st.lists(st.integers(0, 8), max_size=3), seed=st.integers(0, 10_000))
def test_merged_observers_equal_one_observer_of_all_batches(kind: str, count: int, cuts: list[int], seed: int) -> None:
    batches = batches_of(count, seed)
    whole = fed(MAKERS[kind](), batches)
    bounds = [0, *sorted(min(cut, count) for cut in cuts), count]
    merged = MAKERS[kind]()
    for a, b in itertools.pairwise(bounds):
        part = fed(MAKERS[kind](), batches[a:b])
        merged.merge(Observer.from_state(pickle.loads(pickle.dumps(part.state()))))
    assert_equal_state(merged.state(), whole.state())
    assert outcome(merged) == outcome(whole)
    assert merged.batches == count and merged.elements == count * 2 * 9 * 6


@pytest.mark.parametrize("kind", MAKERS)
def test_a_site_without_data_is_reported_by_name(kind: str) -> None:
    observer = MAKERS[kind]()
    observer.observe(torch.zeros(0, 6))
    with pytest.raises(FqvitError, match=r"^blocks.3.attn.scores: no calibration data. Pass at least one image.$"):
        outcome(observer)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, -1])
@pytest.mark.parametrize("kind", MAKERS)
def test_non_finite_values_are_reported_with_the_site(kind: str, position: int, bad: float) -> None:
    poisoned = torch.randn(40, 100, 6)
    poisoned.view(-1)[position] = bad
    later = fed(MAKERS[kind](), [poisoned, torch.randn(2, 6)])
    observer = fed(MAKERS[kind](), [torch.randn(2, 6)])
    observer.merge(later)
    with pytest.raises(FqvitError, match=r"^blocks.3.attn.scores: observed NaN or infinite"):
        outcome(observer)
    single = fed(MAKERS[kind](), [torch.randn(2, 6)])
    single.merge(fed(MAKERS[kind](), [poisoned]))
    with pytest.raises(FqvitError, match=r"^blocks.3.attn.scores: observed NaN or infinite"):
        outcome(single)


@pytest.mark.parametrize("largest", [False, True])
def test_the_quantile_of_elements_with_a_nan_is_nan(largest: bool) -> None:
    flat = torch.randn(10_000)
    flat[1234] = math.nan
    assert math.isnan(tail(flat, 0.999, largest))


@pytest.mark.parametrize("kind", MAKERS)
def test_merging_an_empty_observer_changes_nothing(kind: str) -> None:
    batches = batches_of(3, 5)
    observer = fed(MAKERS[kind](), batches)
    observer.merge(MAKERS[kind]())
    assert_equal_state(observer.state(), fed(MAKERS[kind](), batches).state())


@pytest.mark.parametrize("kind", MAKERS)
def test_sites_of_zeros_give_a_valid_result(kind: str) -> None:
    observer = fed(MAKERS[kind](), [torch.zeros(4, 6)])
    if isinstance(observer, RangeObserver):
        assert observer.range() == (0.0, 0.0)
    else:
        levels = 255 * 2**observer.k  # the range 0..1 is used instead of 0..0
        assert observer.result().scale == pytest.approx(1 / levels) and not observer.result().alpha.any()


@pytest.mark.parametrize("kind", ["minmax", "ema", "percentile", "omse"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ranges_always_include_0(kind: str, sign: float) -> None:
    low, high = outcome(fed(MAKERS[kind](), [sign * (5 + torch.rand(50, 6))]))
    assert (low == 0.0 and high > 0) if sign > 0 else (high == 0.0 and low < 0)


def test_minmax_is_the_range_of_all_batches() -> None:
    batches = batches_of(5, 1)
    stacked = torch.stack(batches)
    assert fed(MinMax(SITE), batches).range() == (float(stacked.min()), float(stacked.max()))


def test_the_range_of_attended_scores_starts_below_the_smallest_row_maximum() -> None:
    scores = torch.tensor([[30.0, -400.0], [5.0, 4.0], [90.0, 3.0]])
    assert fed(Attended(SITE), [scores]).range() == (5.0 - Attended.REACH, 90.0)
    # Scores that are all near their row maximum keep their whole range.
    assert fed(Attended(SITE), [torch.tensor([[-1.0, 2.0]])]).range() == (-1.0, 2.0)


def test_ema_averages_batches_in_order() -> None:
    batches = [torch.tensor([[-1.0, 1.0]]), torch.tensor([[-3.0, 2.0]]), torch.tensor([[-2.0, 10.0]])]
    low, high = fed(Ema(SITE, 0.25), batches).range()
    assert low == pytest.approx(0.75 * (0.75 * -1 + 0.25 * -3) + 0.25 * -2)
    assert high == pytest.approx(0.75 * (0.75 * 1 + 0.25 * 2) + 0.25 * 10)
    assert fed(Ema(SITE, 0.25), batches[::-1]).range() != (low, high)


def test_ema_drops_only_batches_below_float64_precision() -> None:
    rng = np.random.default_rng(0)
    ends = rng.uniform(1, 2, 600).astype(np.float32)
    ema = fed(Ema(SITE, 0.2), [torch.tensor([[float(end)]]) for end in ends])
    assert len(ema.state()["recent"]) < 250
    exact = float(ends[0])
    for end in ends[1:]:
        exact = 0.8 * exact + 0.2 * float(end)
    assert ema.range()[1] == pytest.approx(exact, rel=1e-15)


def test_ema_with_a_momentum_of_1_is_the_last_batch() -> None:
    ema = fed(Ema(SITE, 1.0), [torch.tensor([[-9.0, 9.0]]), torch.tensor([[-3.0, 2.0]])])
    assert ema.range() == (-3.0, 2.0) and ema.state()["recent"].tolist() == [[-3.0, 2.0]]


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (3, 1), (7, 11), (64, 50), (199, 997)])
@pytest.mark.parametrize("quantile", [0.6, 0.99, 0.999, 0.99999, 1.0])
def test_percentile_is_the_quantile_of_all_elements(shape: tuple[int, int], quantile: float) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)) ** 3
    low, high = fed(Percentile(SITE, quantile), [x]).range()
    exact = np.quantile(x.double().numpy(), [1 - quantile, quantile])
    np.testing.assert_allclose((low, high), (min(exact[0], 0), max(exact[1], 0)), rtol=1e-9)


def test_invalid_momentum_and_quantile_are_rejected() -> None:
    for momentum in (0.0, 0.0009, 1.1, math.nan):
        with pytest.raises(FqvitError, match=f"momentum {momentum}, expected 0.001 to 1"):
            Ema(SITE, momentum)
    for quantile in (0.2, 0.5, 1.1, math.nan):
        with pytest.raises(FqvitError, match=f"quantile {quantile}, expected above 0.5 and at most 1"):
            Percentile(SITE, quantile)
    assert Ema(SITE, 0.001).momentum == 0.001 and Percentile(SITE, 1.0, 1.0).quantile == 1.0


def omse_by_definition(x: np.ndarray[Any, np.dtype[np.float64]], low: float, high: float, bits: int) -> list[float]:
    levels = 2**bits - 1
    errors = []
    for percent in range(90):
        scale = (high - low) * (1 - percent / 100) / levels
        zero = round(-low * (1 - percent / 100) / scale)
        errors.append(float((((np.clip(np.rint(x / scale), -zero, levels - zero)) * scale - x) ** 2).sum()))
    return errors


@pytest.mark.parametrize("last_batch", [False, True])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_omse_is_the_argmin_over_the_sampled_elements(bits: int, last_batch: bool) -> None:
    normal = torch.randn(5, 8, 200, 97, generator=torch.Generator().manual_seed(bits))
    x = normal[0] / normal[1:].square().mean(0).sqrt()  # Student's t, 4 degrees of freedom: heavy tails
    low, high = fed(Omse(SITE, bits, last_batch), list(x)).range()
    sample = torch.stack([batch.reshape(-1)[::OMSE_STRIDE] for batch in x]).double().numpy()
    errors = omse_by_definition(sample[-1] if last_batch else sample, float(x.min()), float(x.max()), bits)
    percent = round(100 * (1 - high / float(x.max())))
    assert low == pytest.approx(float(x.min()) * (1 - percent / 100))
    assert errors[percent] <= 1.005 * min(errors)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_omse_ranges_of_one_sign_start_at_0(sign: float) -> None:
    x = sign * (5 + torch.rand(400, 97, generator=torch.Generator().manual_seed(0)))
    end = max(fed(Omse(SITE, 4), [x]).range(), key=abs)
    sample = x.reshape(-1)[::OMSE_STRIDE].double().numpy()
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    errors = omse_by_definition(sample, low, high, 4)
    assert errors[round(100 * (1 - end / (low + high)))] <= 1.005 * min(errors)


def test_omse_shrinks_the_range_by_at_most_89_percent() -> None:
    x = torch.linspace(0, 1, 5200).reshape(100, 52).contiguous()
    x[0, 1] = 100.0  # between two of the sampled elements
    low, high = fed(Omse(SITE), [x]).range()
    assert low == 0.0 and high == pytest.approx(11.0)


@pytest.mark.parametrize("last_batch", [False, True])
def test_omse_counts_every_13th_element_once(last_batch: bool) -> None:
    counts = fed(Omse(SITE, last_batch=last_batch), [torch.randn(9, 100), torch.randn(4, 100)]).state()["histogram"]["counts"]
    assert counts.sum() == math.ceil(400 / OMSE_STRIDE) + (0 if last_batch else math.ceil(900 / OMSE_STRIDE))


@pytest.mark.parametrize("shape", [(40, OMSE_STRIDE * 2), (4, 10, OMSE_STRIDE * 2), (OMSE_STRIDE, 40, OMSE_STRIDE * 14)])
def test_omse_samples_every_channel(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    x[..., 1] = 1.0
    counts = fed(Omse(SITE), [x]).state()["histogram"]["counts"]
    assert (counts > 0).sum() == 2


def ptf_by_definition(x: Tensor, bits: int, k: int) -> tuple[float, int, np.ndarray[Any, np.dtype[np.float64]]]:
    """Scale, zero point and errors [k + 1, C], from all elements."""
    v = x.double().numpy().reshape(-1, x.shape[-1])
    low, high, levels = min(v.min(), 0.0), max(v.max(), 0.0), 2**bits - 1
    scale = (high - low) / levels / 2**k
    zero = int(np.clip(np.rint(-low / (2**k * scale)), 0, levels))
    scales = [scale * 2**alpha for alpha in range(k + 1)]
    errors = [((v - (np.clip(np.rint(v / s) + zero, 0, levels) - zero) * s) ** 2).sum(0) for s in scales]
    return float(scale), zero, np.array(errors)


@pytest.mark.parametrize("last_batch", [False, True])
@pytest.mark.parametrize(("bits", "k"), [(8, 3), (8, 0), (6, 2), (4, 5)])
def test_ptf_is_the_argmin_over_all_elements(bits: int, k: int, last_batch: bool) -> None:
    generator = torch.Generator().manual_seed(bits + k)
    spread = 2.0 ** torch.linspace(-7, 2, 64)
    x = torch.randn(6, 100, 64, generator=generator) * spread + torch.randn(64, generator=generator) * spread
    result = fed(Ptf(SITE, bits, k, last_batch), list(x)).result()
    scale, zero, errors = ptf_by_definition(x, bits, k)
    assert result.scale == pytest.approx(scale, rel=1e-15) and result.zero == zero
    if last_batch:
        v = x[-1].double().numpy()
        scales = [scale * 2**alpha for alpha in range(k + 1)]
        codes = [np.clip(np.rint(v / s) + zero, 0, 2**bits - 1) - zero for s in scales]
        errors = np.array([((v - code * s) ** 2).sum(0) for code, s in zip(codes, scales, strict=True)])
    assert result.alpha.dtype == np.uint8 and result.alpha.max() <= k
    chosen = np.take_along_axis(errors, result.alpha[None].astype(np.int64), 0)[0]
    assert (chosen <= 1.02 * errors.min(0)).all()
    assert (result.alpha == errors.argmin(0)).mean() > 0.95


@pytest.mark.parametrize(("bits", "k"), [(8, 3), (4, 0), (6, 5)])
def test_symmetric_ptf_has_the_middle_zero_point_and_maps_the_largest_value_to_the_last_code(bits: int, k: int) -> None:
    x = torch.tensor([[-6.0, 0.1], [2.0, -0.05]])
    result = fed(Ptf(SITE, bits, k, symmetric=True), [x]).result()
    middle = 2 ** (bits - 1)
    assert result.zero == middle and result.scale == pytest.approx(6 / (middle - 1) / 2**k)
    assert result.alpha[0] == k and (k == 0 or result.alpha[1] < k)


def test_the_zero_point_of_ptf_for_values_of_one_sign_is_the_first_or_last_code() -> None:
    assert fed(Ptf(SITE), [torch.tensor([[0.0, 3.0], [1.0, 2.0]])]).result().zero == 0
    assert fed(Ptf(SITE), [torch.tensor([[0.0, -3.0], [-1.0, -2.0]])]).result().zero == 255


@pytest.mark.parametrize(("sign", "zero"), [(1.0, 0), (-1.0, 255)])
def test_the_range_of_ptf_includes_0_for_values_of_one_sign(sign: float, zero: int) -> None:
    result = fed(Ptf(SITE, k=3), [sign * torch.tensor([[3.0, 4.0], [5.0, 2.0]])]).result()
    assert result.scale == pytest.approx(5 / 255 / 8) and result.zero == zero


def test_the_default_settings_are_those_of_the_papers_code() -> None:
    """The exception is last_batch: the paper's code always uses only the last batch, which must be requested here."""
    defaults = {observer.__name__: observer(SITE).state()["settings"] for observer in (MinMax, Ema, Percentile, Omse, Ptf)}
    assert defaults == {
        "MinMax": {},
        "Ema": {"momentum": 0.01},
        "Percentile": {"quantile": 0.99999, "momentum": 0.01},
        "Omse": {"bits": 8, "last_batch": False},
        "Ptf": {"bits": 8, "k": 3, "last_batch": False, "symmetric": False},
    }


def test_views_and_bfloat16_give_the_same_result_as_contiguous_float32() -> None:
    x = torch.randn(4, 6, 9, generator=torch.Generator().manual_seed(0)).bfloat16()
    for make in MAKERS.values():
        view = x.transpose(1, 2)
        assert outcome(fed(make(), [view])) == outcome(fed(make(), [view.float().contiguous()]))
