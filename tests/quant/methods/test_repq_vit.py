"""RepQ-ViT: percentiles, codes of base sqrt(2) and folded scales against direct formulas, and whole networks."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from fqvit.quant.methods import reparameterize as method
from fqvit.quant.methods.reparameterize import affine_rows, attention_codes, final_readers, quantiles, round_rows
from fqvit.quant.qparams import affine, log_sqrt2
from fqvit.quant.recipe import RECIPES, SiteRule
from fqvit.quant.simulate import Simulation
from tests.factories import MODELS, calibration_of, float_model, images_for
from tests.factories import one_thread as one_thread

REPQ = RECIPES["repq-vit"]
OBSERVED = msgspec.structs.replace(REPQ, intervals="observed")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
def test_attention_codes_have_two_levels_per_octave_and_a_zero(bits: int) -> None:
    q, last = log_sqrt2(bits, 0.8), 2**bits - 1
    values = torch.cat([torch.tensor([0.0, 1e-30, 0.8, 1.0]), random(500).mul(4).sub(3).exp().clamp(max=1.0)])
    codes, decoded = q.encode(values), q.decode(q.encode(values))
    for x, code, y in zip(values.tolist(), codes.tolist(), decoded.tolist(), strict=True):
        exact = -2 * math.log2(x / 0.8) if x else math.inf
        assert 0 <= code <= last and (abs(code - min(max(exact, 0), last)) <= 0.5 + 1e-4)
        assert y == pytest.approx(0.0 if code == last else 0.8 * 2 ** (-code / 2), rel=1e-6)


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_quantiles_are_those_of_torch(count: int) -> None:
    x, shares = random(3, count), [0.001, 0.5, 0.999]
    expected = torch.quantile(x.double(), torch.tensor(shares, dtype=torch.float64), dim=1).float()
    torch.testing.assert_close(quantiles(x, shares), expected)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_range_of_a_row_is_given_by_the_percentile_with_the_least_error(bits: int) -> None:
    x = random(4, 5000, seed=bits)
    x[1] += 3  # mostly positive: the range is extended to 0
    x[2, 7] = 40.0  # an outlier
    x[3] = 0.0
    scale, zero = affine_rows(x, bits)
    for i, row in enumerate(x):
        tried = []
        for share in method.PERCENTILES:
            q = affine(float(row.double().quantile(1 - share)), float(row.double().quantile(share)), bits)
            tried.append((float((q.decode(q.encode(row)) - row).square().sum()), float(q.scale[0]), int(q.zero[0])))
        error, expected, middle = min(tried)
        found = ((row / float(scale[i]) + 0.5).floor() + zero[i]).clamp(0, 2**bits - 1).sub(zero[i]).mul(float(scale[i]))
        assert float((found - row).square().sum()) == pytest.approx(error, rel=1e-3, abs=1e-9)
        assert float(scale[i]) == pytest.approx(expected, rel=1e-4) and abs(int(zero[i]) - middle) <= 1


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
def test_weights_have_one_scale_and_zero_point_per_output(bits: int) -> None:
    weight = random(6, 40, seed=bits).double().numpy()
    weight[1] = np.abs(weight[1])
    bias = random(6, seed=1).double().numpy()
    bias[2] = 1e12
    found = round_rows(weight, bias, bits)
    assert found.w.dtype == np.int8 and found.groups is None
    span = found.w.max(1).astype(int) - found.w.min(1).astype(int)
    assert (span < 2**bits).all()
    assert np.abs(found.bias).max() <= 2**30
    rows = [0, 1, 3, 4, 5]
    np.testing.assert_allclose((found.bias * found.scale)[rows], bias[rows], atol=float(found.scale[rows].max()) / 2)
    outside = np.abs(found.w * found.scale[:, None] - weight)[rows] > found.scale[rows, None] * 0.501
    assert outside.mean() < 0.06  # only values beyond the percentiles are clipped


def test_scales_per_channel_equal_one_scale_per_layer_after_reparameterization() -> None:
    """As published, with scales s and zero points z per channel: r1 = s / mean(s), r2 = z - round(mean(z)).

    The norm computes (x + s * r2) / r1, and the weights W are replaced by W * r1.
    """
    x, weight = random(50, 12) * torch.arange(1, 13) + random(12, seed=1), random(5, 12, seed=2)
    s, z = affine_rows(x.T.contiguous(), 4)
    codes = ((x / s + 0.5).floor() + z).clamp(0, 15)
    one, middle = s.mean(), z.mean().round()
    r1, r2 = s / one, z - middle
    moved = ((((x + s * r2) / r1) / one + 0.5).floor() + middle).clamp(0, 15)
    assert float((moved != codes).double().mean()) < 0.01  # only float rounding at the middle between two codes
    per_channel = ((codes - z) * s) @ weight.double().T
    per_layer = ((codes - middle) * one) @ (weight * r1).T - (weight * r1) @ (r2 * one)
    torch.testing.assert_close(per_layer, per_channel)
    # W * s and W * r1 differ by a constant factor, so both are rounded to the same codes.
    bias = np.zeros(5)
    ours, theirs = (round_rows((weight.double() * each).numpy(), bias, 4).w for each in (s, r1))
    assert (ours == theirs).all()


def test_the_scale_of_attention_has_the_least_error() -> None:
    values = (4 * random(1, 20000)).softmax(-1) * 300
    q = attention_codes(values, 4)
    errors = []
    for scale in (float(values[0].double().quantile(share)) for share in method.PERCENTILES):
        each = log_sqrt2(4, scale)
        errors.append((float((each.decode(each.encode(values)) - values).square().sum()), scale))
    assert float(q.scale[0]) == pytest.approx(min(errors)[1], rel=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_the_simulation_reproduces_the_outputs_computed_while_scales_were_chosen(kind: str) -> None:
    model = float_model(kind)
    images = images_for(model.preprocess, 4)
    before = calibration_of(model, OBSERVED)
    run = method.Reparameterization(model, before)
    outputs: dict[str, Tensor] = {}

    def quantize_node(node, exact, simulated):  # type: ignore[no-untyped-def]
        found = run.quantize_node(node, exact, simulated)
        outputs[node.name] = torch.cat(found)
        return found

    with torch.no_grad():
        method.run_in_lockstep(run.graph, model.preprocess, images, quantize_node, None, "")
    after = method.reparameterize(model, before, images)
    torch.testing.assert_close(Simulation(model, after).run(images), outputs[run.graph.output], rtol=1e-4, atol=1e-4)
    for node in run.graph.nodes:
        q = after.sites.get(node.name)
        if q is not None and node.leaf.role == "attention":
            assert q.log2 and q.octave == 2 and q.zero_code
        elif q is not None and node.leaf.role == "norm":
            last = any(reader.leaf.role == "logits" for reader in final_readers(run.graph, node.name))
            assert (len(q.scale) == 1) == (last or not run._reparameterized(node.name))
        elif q is not None:
            assert len(q.scale) == run.plans[node.name].groups


def test_rules_fix_ranges_and_bits() -> None:
    sites = {"blocks.0.norm1": SiteRule(range=(-2.0, 2.0)), "blocks.0.mlp.act": SiteRule(bits=3)}
    model = float_model("vit")
    found = calibration_of(model, msgspec.structs.replace(REPQ, sites=sites)).sites
    assert len(found["blocks.0.norm1"].scale) == 1 and float(found["blocks.0.norm1"].scale[0]) == pytest.approx(4 / 255)
    assert found["blocks.0.mlp.act"].bits == 3
