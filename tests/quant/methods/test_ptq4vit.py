"""PTQ4ViT: twin codes against their definition, gradients against autograd, search against the full grid, whole networks."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fqvit.models.graph import trace
from fqvit.models.layers import Context, Linear, Patches, Scores
from fqvit.models.pixels import normalise
from fqvit.quant.channels import GELU_DEPTH
from fqvit.quant.methods import hessian
from fqvit.quant.methods.hessian import Operand, coded, search, squared_gradients, uniform
from fqvit.quant.methods.twin import MAX_BITS, exponents, twin_attention, twin_gelu
from fqvit.quant.recipe import RECIPES, SiteRule, with_bits
from fqvit.quant.simulate import Simulation
from tests.factories import MODELS, calibration_of, float_model, images_for
from tests.factories import one_thread as one_thread

PTQ4VIT = RECIPES["ptq4vit"]
OBSERVED = msgspec.structs.replace(PTQ4VIT, intervals="observed")


@pytest.fixture(autouse=True)
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hessian, "FACTORS", np.linspace(0.2, 1.2, 11))
    monkeypatch.setattr(hessian, "START", 8)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
def test_twin_attention_has_a_fine_and_a_coarse_range(bits: int) -> None:
    half = 2 ** (bits - 1)
    values = torch.cat([torch.linspace(0, 1, 300), torch.rand(300, generator=torch.Generator().manual_seed(0)) ** 8])
    for m in (0, 1, exponents(bits)[-1]):
        q = twin_attention(bits, m)
        coarse, fine = 1 / half, 1 / half / 2**m
        levels = sorted({i * s for i in range(half) for s in (coarse, fine)})
        assert len(q.grid) == len(levels) <= 2**bits and q.bits <= MAX_BITS
        found = q.decode(q.encode(values.double()))
        for x, y in zip(values.double().tolist(), found.tolist(), strict=True):
            assert abs(y - x) == pytest.approx(min(abs(level - x) for level in levels), abs=1e-12)
            if x < (half - 1) * fine:  # inside the fine range: as the fine quantizer alone
                assert y == pytest.approx(fine * np.floor(x / fine + 0.5), abs=1e-12)
            elif x >= coarse:  # beyond both the fine range and the gap between the ranges
                nearest = coarse * min(np.floor(x / coarse + 0.5), half - 1)
                assert abs(y - x) <= abs(nearest - x) + 1e-12


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
@pytest.mark.parametrize("scale", [1e-6, 0.003, 0.08, 0.6, 30.0])
def test_twin_gelu_is_fine_below_zero_and_coarse_above(bits: int, scale: float) -> None:
    half, q = 2 ** (bits - 1), twin_gelu(bits, scale)
    fine = float(q.scale[0])
    ratio = np.log2(scale / fine)
    assert ratio == pytest.approx(round(ratio)) and ratio >= 0 and len(q.grid) == 2**bits and q.bits <= MAX_BITS
    if 0 < ratio < exponents(bits)[-1]:
        assert GELU_DEPTH <= half * fine < 2 * GELU_DEPTH  # the codes cover GELU's negative range, but not twice that range
    values = F.gelu(3 * random(400)).double()
    expected = torch.where(
        values < 0,
        fine * (values / fine + 0.5).floor().clamp(min=-half),
        scale * (values / scale + 0.5).floor().clamp(max=half - 1),
    )
    torch.testing.assert_close(q.decode(q.encode(values)), expected, rtol=1e-9, atol=1e-9)


def test_search_finds_the_best_candidate_of_every_group_one_operand_at_a_time() -> None:
    w, x = random(3, 4, 6), random(20, 6, seed=1)
    first = uniform(w, w.abs().amax((1, 2), keepdim=True) / 4, 3)
    second = uniform(x, x.abs().max().view(1) / 4, 3)
    target = F.linear(x, w.flatten(0, 1))
    weight = random(20, 12, seed=2).square()

    def errors(w: Tensor, x: Tensor) -> Tensor:
        return ((F.linear(x, w.flatten(0, 1)) - target).square() * weight).sum(0).view(3, 4).sum(1)

    a, b = search(first, second, errors)
    best = errors(first.quantized(a), second.quantized(b))
    for i in range(first.count):
        assert (errors(first.quantized(torch.full((3,), i)), second.quantized(b)) >= best - 1e-5).all()
    for i in range(second.count):
        assert errors(first.quantized(a), second.quantized(torch.tensor([i]))).sum() >= best.sum() - 1e-5


def test_search_keeps_an_operand_with_one_candidate() -> None:
    one = Operand(1, 1, 0, lambda _: torch.ones(1))
    free = uniform(torch.ones(1), torch.ones(1) / 2, 2)  # with a factor f, its value is f / 2
    index, fixed = search(free, one, lambda a, b: (a * b - 0.4).square())
    assert float(hessian.FACTORS[int(index)]) == pytest.approx(0.8) and fixed.tolist() == [0]


def test_uniform_operands_are_rounded_by_the_formula() -> None:
    x = random(2, 5, 3)
    operand = uniform(x, torch.tensor([0.1, 0.3]).view(2, 1, 1), 4)
    found = operand.quantized(torch.tensor([2, 7]))
    for part, unit, factor in zip(range(2), (0.1, 0.3), hessian.FACTORS[[2, 7]], strict=True):
        scale = unit * factor
        torch.testing.assert_close(found[part], (x[part] / scale + 0.5).floor().clamp(-8, 7) * scale)
    grid = [twin_attention(4, m) for m in (0, 3)]
    values = random(9).softmax(0)
    assert torch.equal(coded(values, grid).quantized(torch.tensor([1])), grid[1].decode(grid[1].encode(values)))


def test_squared_gradients_are_those_of_the_log_probability_of_a_drawn_class() -> None:
    """At the logits, the gradient is softmax - one-hot; at earlier products, autograd of the rest of the network gives it."""
    model = float_model("vit")
    graph, images = trace(model.module), images_for(model.preprocess, 6)
    squares = squared_gradients(graph, model.preprocess, images)
    products = [node.name for node in graph.nodes if isinstance(node.leaf, Linear | Patches | Scores | Context)]
    assert set(squares) == set(products)
    logits = graph.run(normalise(images, model.preprocess)).detach()
    possible = [(logits.softmax(1) - F.one_hot(torch.tensor(c), logits.shape[1])).square() for c in range(logits.shape[1])]
    found = squares[graph.output][:, 0]
    drawn = torch.stack([(found - each).abs().amax(1) for each in possible]).min(0)
    assert float(drawn.values.max()) < 1e-5
    name = "blocks.1.attn.context"
    kept: list[Tensor] = []

    def visit(node, y):  # type: ignore[no-untyped-def]
        if node.name == name:
            y = y.detach().requires_grad_()
            kept.append(y)
        return y

    loss = F.cross_entropy(graph.run(normalise(images, model.preprocess), visit), drawn.indices, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, kept)
    heads = squares[name].shape[2]
    tokens = hessian.sample_indices(gradient.shape[1], hessian.TOKENS)
    expected = gradient.unflatten(-1, (heads, -1)).transpose(1, 2)[:, None][..., tokens, :].square()
    torch.testing.assert_close(squares[name], expected, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("bits", ["8/8/8", "4/4/4"])
def test_every_product_gets_searched_codes(kind: str, bits: str) -> None:
    model = float_model(kind)
    found = calibration_of(model, with_bits(PTQ4VIT, bits), count=6)
    graph = found.graph(model)
    width = int(bits[0])
    for node in graph.nodes:
        q = found.sites.get(node.name)
        if q is None:
            continue
        assert q.width <= width
        if node.leaf.role in ("attention", "gelu"):
            assert q.grid
        elif node.leaf.role == "qkv":
            assert len(q.scale) % 3 == 0 and (q.zero == 2 ** (width - 1)).all()
        else:
            assert len(q.scale) == 1 and q.zero.tolist() == [2 ** (width - 1)]
    linear = [node for node in graph.nodes if isinstance(node.leaf, Linear | Patches)]
    assert set(found.weights) == {node.name for node in linear}
    for node in linear:
        weights = found.weights[node.name]
        most = len(weights.scale) if isinstance(node.leaf, Patches) else 3 if node.leaf.role == "qkv" else 1
        assert len(np.unique(weights.scale)) <= most
        assert np.abs(weights.w.astype(int)).max() < 2 ** (width - 1)
    assert torch.isfinite(Simulation(model, found).run(images_for(model.preprocess, 2))).all()


def test_each_scale_has_the_least_weighted_error_given_the_others() -> None:
    """Check fc1 of the last block: no other factor of the weight scale has a smaller weighted error of the outputs."""
    model = float_model("vit")
    images, before = images_for(model.preprocess, 5), calibration_of(model, with_bits(OBSERVED, "4/4/4"))
    found = hessian.search_by_hessian(model, before, images)
    graph, name = found.graph(model), "blocks.1.mlp.fc1"
    values: dict[str, Tensor] = {}
    graph.run(normalise(images, model.preprocess), lambda node, y: values.setdefault(node.name, y.detach()))
    node = graph.node(name)
    x, weight, q = values[node.inputs[0]], node.leaf.weight.detach(), found.sites[node.inputs[0]]  # type: ignore[union-attr, operator]
    assert x.shape[1] <= hessian.TOKENS  # every token is scored
    square = squared_gradients(graph, model.preprocess, images)[name]
    inputs, unit = q.decode(q.encode(x)), float(weight.abs().max()) / 8  # type: ignore[operator, union-attr]

    def error(scale: float) -> float:
        w = (weight / scale + 0.5).floor().clamp(-7, 7) * scale  # type: ignore[operator]
        return float(((F.linear(inputs, w) - F.linear(x, weight)).square() * square).sum())  # type: ignore[arg-type]

    ours = float(found.weights[name].scale[0] / q.scale[0])
    assert error(ours) <= min(error(unit * float(factor)) for factor in hessian.FACTORS) * (1 + 1e-4)


def test_rules_fix_ranges_and_a_site_keeps_the_choice_of_its_first_reader() -> None:
    model = float_model("vit")
    sites = {"blocks.0.attn.qkv": SiteRule(range=(-2.0, 2.0)), "blocks.1.mlp.act": SiteRule(range=(-0.17, 3.0))}
    found = calibration_of(model, msgspec.structs.replace(PTQ4VIT, sites=sites), count=6).sites
    assert found["blocks.0.attn.qkv"].scale.tolist() == pytest.approx([4 / 255])
    assert not found["blocks.1.mlp.act"].grid and found["blocks.0.mlp.act"].grid


def test_the_search_also_works_for_other_outputs_than_logits_and_for_few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fqvit.quant.methods.lockstep.MAX_ELEMENTS", 2000)
    model = float_model("distilled")
    found = calibration_of(model, PTQ4VIT, count=4, features="pooled")
    assert found.weights and all(np.isfinite(q.scale).all() for q in found.sites.values())


def test_the_scales_found_for_every_head_are_at_least_as_good_as_the_initial_scales() -> None:
    q, k = random(2, 1, 2, 5, 3), random(2, 1, 2, 5, 3, seed=1)
    units = [x.abs().amax((0, 1, 3, 4)).view(-1, 1, 1) / 4 for x in (q, k)]
    first, second = uniform(q, units[0], 3), uniform(k, units[1], 3)
    target = q @ k.transpose(-2, -1)

    def errors(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.transpose(-2, -1) - target).square().sum((0, 1, 3, 4))

    a, b = search(first, second, errors)
    best = errors(first.quantized(a), second.quantized(b))
    start = errors(first.quantized(torch.full((2,), first.start)), second.quantized(torch.full((2,), second.start)))
    assert (best <= start + 1e-6).all()
