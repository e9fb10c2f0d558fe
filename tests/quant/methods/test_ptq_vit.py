"""Post-training quantization for ViT: scores against their definitions, search against the full grid, and whole networks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fqvit.models import embedded
from fqvit.models.graph import Node, run_float, trace
from fqvit.models.layers import BiasedScores, Context, Linear, Patches, Scores
from fqvit.models.load import load_model
from fqvit.models.pixels import normalise
from fqvit.quant.calibrate import calibrate
from fqvit.quant.methods import similarity
from fqvit.quant.methods.similarity import FACTORS, THETA, Correlation, Operand, RankingLoss, search, search_intervals
from fqvit.quant.recipe import RECIPES, SiteRule, with_bits
from fqvit.quant.simulate import Simulation
from tests.factories import calibration_of, float_model, images_for
from tests.factories import one_thread as one_thread

PTQ = RECIPES["ptq-vit"]
OBSERVED = msgspec.structs.replace(PTQ, intervals="observed")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def slow_ranking(exact: Tensor, quantized: Tensor) -> float:
    """Compute the ranking loss row by row and pair by pair."""
    total, pairs = 0.0, 0
    for a, b in zip(exact.reshape(-1, exact.shape[-1]).tolist(), quantized.reshape(-1, exact.shape[-1]).tolist(), strict=True):
        for i in range(len(a)):
            for j in range(i + 1, len(a)):
                total += max(0.0, THETA - (b[i] - b[j]) * float(np.sign(a[i] - a[j])))
                pairs += 1
    return total / max(pairs, 1)


def ranking(exact: Tensor, quantized: Tensor) -> float:
    return float(RankingLoss(exact)(quantized[None]))


def correlation(x: Tensor, y: Tensor) -> float:
    return float(Correlation(x)(y[None]))


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("tokens", [1, 2, 3, 17])
def test_ranking_loss_equals_the_mean_over_all_pairs(spread: float, tokens: int) -> None:
    """Cases range from uniform rows, in which no difference exceeds THETA, to rows with one large value."""
    exact = (spread * random(2, 3, 5, tokens)).softmax(-1)
    noisy = (spread * (random(2, 3, 5, tokens) + 0.3 * random(2, 3, 5, tokens, seed=1))).softmax(-1)
    for quantized in (exact, noisy, noisy.flip(-1)):
        assert ranking(exact, quantized) == pytest.approx(slow_ranking(exact, quantized), rel=1e-5, abs=1e-7)


def test_ranking_loss_handles_masked_and_equal_elements() -> None:
    scores = random(4, 6, 9) * 3
    scores[..., 2] = scores[..., 5]
    scores[..., 6:] = -torch.inf
    exact, noisy = scores.softmax(-1), (scores + random(4, 6, 9, seed=3)).softmax(-1)
    assert ranking(exact, noisy) == pytest.approx(slow_ranking(exact, noisy), rel=1e-5)
    assert ranking(exact, exact) < ranking(exact, noisy)
    pair = torch.tensor([[0.9, 0.1]])
    assert ranking(pair, pair.flip(-1)) == pytest.approx(slow_ranking(pair, pair.flip(-1))) == pytest.approx(0.2 + 0.8)
    both = RankingLoss(exact)(torch.stack([noisy, exact]))
    assert both.tolist() == pytest.approx([ranking(exact, noisy), ranking(exact, exact)])


def test_correlation_is_the_mean_pearson_correlation_per_image() -> None:
    x, y = random(5, 7, 3), random(5, 7, 3) + 0.5 * random(5, 7, 3, seed=1)
    expected = [torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item() for a, b in zip(x, y, strict=True)]
    assert correlation(x, y) == pytest.approx(np.mean(expected), abs=1e-6)
    assert correlation(x, 3 * x - 2) == pytest.approx(1, abs=1e-6) and correlation(x, -x) == pytest.approx(-1, abs=1e-6)
    assert np.isfinite(correlation(x, torch.ones_like(x))) and np.isfinite(correlation(torch.ones_like(x), x))


def test_correlation_distinguishes_nearly_equal_outputs() -> None:
    x, noise = random(2, 100), random(2, 100, seed=1)
    assert correlation(x, x + 1e-4 * noise) < correlation(x, x + 0.99e-4 * noise) < 1


def quantized(x: Tensor, scale: float, low: int, high: int) -> Tensor:
    return torch.stack(
        [scale * min(max(np.floor(float(v) / scale + 0.5), low), high) * torch.ones(()) for v in x.flatten()]
    ).view(x.shape)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_search_ends_at_scales_that_cannot_be_improved_one_at_a_time(bits: int) -> None:
    """Given the other operand's factor, each factor is the best of the grid, by torch.corrcoef of the products."""
    last = 2 ** (bits - 1) - 1
    w, x = random(3, 4, seed=bits), random(2, 5, 4, seed=bits + 1)
    first = Operand(w, float(w.abs().max()) / last, -last, last)
    second = Operand(x, float(x.abs().max()) / last, -last - 1, last)
    target = Correlation(F.linear(x, w))
    factors = search(lambda w, x: target(x @ w[:, None].transpose(-2, -1)), first, second)

    def slow(f: float, g: float) -> float:
        y = F.linear(
            quantized(x, second.scale * g, second.low, second.high), quantized(w, first.scale * f, first.low, first.high)
        )
        pairs = zip(F.linear(x, w), y, strict=True)
        return float(np.mean([torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1].item() for a, b in pairs]))

    best = slow(*factors)
    assert best >= max(slow(float(f), factors[1]) for f in FACTORS[::3]) - 1e-6
    assert best >= max(slow(factors[0], float(g)) for g in FACTORS[::3]) - 1e-6
    assert best >= slow(1.0, 1.0) - 1e-6


def test_search_alternates_between_the_operands_starting_at_factor_1() -> None:
    """Both factors start at 1. The first is chosen while the second is 1, then the second is chosen for the new first."""
    score = lambda a, b: -(a * b - 0.9).abs().flatten().double()  # noqa: E731
    one = Operand(torch.ones(1), 1.0, -1, 1)  # quantized with a factor f, its value is f
    best = [float(FACTORS[np.argmin(np.abs(FACTORS - 0.9))])]
    best.append(float(FACTORS[np.argmin(np.abs(FACTORS * best[0] - 0.9))]))
    found = search(score, one, one)
    assert (
        found[0] == pytest.approx(best[0], abs=0.05) and abs(found[0] * found[1] - 0.9) <= abs(best[0] * best[1] - 0.9) + 1e-7
    )
    assert search(score, one, one, (False, True))[0] == 1.0
    assert search(score, one, one, (True, False))[1] == 1.0
    assert search(score, one, one, (False, False)) == (1.0, 1.0)
    assert (FACTORS[0], FACTORS[-1], len(FACTORS)) == (0.5, 1.2, 100)


def test_search_alternates_until_neither_factor_changes() -> None:
    """If the score depends mostly on a - b, each turn changes a factor only slightly, so one turn per factor is not enough."""
    score = lambda a, b: -(9 * (a - b).square() + (a - 0.6).square() + (b - 0.6).square()).flatten().double()  # noqa: E731
    one = Operand(torch.ones(1), 1.0, -1, 1)
    a, b = search(score, one, one)

    def at(a: float, b: float) -> float:
        return float(score(torch.tensor([a]), torch.tensor([b])))

    assert at(a, b) >= max(at(float(f), b) for f in FACTORS) - 1e-6
    assert at(a, b) >= max(at(a, float(f)) for f in FACTORS) - 1e-6
    assert abs(a - 0.6) < 0.15 and abs(b - 0.6) < 0.15


@pytest.mark.parametrize("limit, most", [(8, 2), (7, 1), (1, 1)])
def test_search_tries_as_many_scales_at_once_as_memory_allows_and_stops_at_a_fixed_point(
    limit: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(similarity, "CHUNK", limit)
    first, second = Operand(torch.ones(2), 1.0, -1, 1), Operand(torch.ones(4), 1.0, -1, 1)
    tried: list[int] = []

    def score(a: Tensor, b: Tensor) -> Tensor:
        tried.append(max(len(a), len(b)))
        return -(a[:, 0] - 0.7).abs().double() - (b[:, 0] - 1.1).abs().double()

    for free, turns in (((True, True), 3), ((True, False), 1), ((False, True), 1), ((False, False), 0)):
        tried.clear()
        found = search(score, first, second, free)
        assert found == pytest.approx((0.7 if free[0] else 1.0, 1.1 if free[1] else 1.0), abs=0.004)
        assert sum(tried) == turns * len(FACTORS) and set(tried) <= {most}


def test_q_k_and_v_each_have_their_own_scale() -> None:
    model = float_model("vit")
    searcher = similarity.Searcher(model, calibration_of(model, OBSERVED, count=2))
    parts = [node.name for node in searcher.graph.nodes if node.name.startswith("blocks.0.attn") and node.leaf.role == "route"]
    assert [searcher._source(name) for name in parts[:3]] == [("blocks.0.attn.qkv", part) for part in range(3)]
    assert searcher._source("blocks.0.norm1") == ("blocks.0.norm1", 0)


def test_sampled_tokens_are_distinct_and_include_the_first() -> None:
    for size, count in ((1, 4), (4, 4), (9, 32), (50, 8), (200, 32)):
        chosen = similarity.sample_indices(size, count).tolist()
        assert chosen[0] == 0 and chosen == sorted(set(chosen)) and len(chosen) == min(size, count) and chosen[-1] < size
        assert chosen == similarity.sample_indices(size, count).tolist()


@pytest.mark.parametrize("kind", ["distilled", "swin"])
def test_products_are_scored_against_the_float_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is what the float model computes: a linear layer's output, or the attention map after scores. An attention map
    is scored by its correlation with the target minus 0.1 times the ranking loss. Scales that an earlier product chose, or that
    the recipe fixes, are not searched. The output is the product of the quantized operands; the bias of a linear layer corrects
    its mean error."""
    model = float_model(kind)
    images = images_for(model.preprocess, 3)
    targets: list[Tensor] = []
    calls: list[tuple[similarity.Score, tuple[bool, bool], list[Operand]]] = []
    recipe = OBSERVED if kind == "swin" else msgspec.structs.replace(OBSERVED, sites={"attention": SiteRule(range=(0.0, 1.0))})

    class Recorded(Correlation):
        def __init__(self, target: Tensor) -> None:
            targets.append(target)
            super().__init__(target)

    def recorded(score: similarity.Score, first: Operand, second: Operand, free: tuple[bool, bool]) -> tuple[float, float]:
        calls.append((score, free, [first, second]))
        return (0.7 if free[0] else 1.0), (0.8 if free[1] else 1.0)

    monkeypatch.setattr(similarity, "Correlation", Recorded)
    monkeypatch.setattr(similarity, "search", recorded)
    searcher = similarity.Searcher(model, calibration_of(model, recipe, count=2))
    float_outputs: dict[str, Tensor] = {}
    fixed = [node.name for node in searcher.graph.nodes if kind == "distilled" and node.leaf.role == "attention"]
    chosen = {(name, 0) for name in fixed}

    def codes(name: str, xs: Sequence[Tensor]) -> tuple[Tensor, float]:
        site, group = searcher._source(name)
        q = searcher.sites[site]
        scale, zero = float(q.scale[group]), int(q.zero[group])
        return (torch.cat(list(xs)) / scale + 0.5).floor().clamp(-zero, q.last - zero), scale

    def quantize_node(node: Node, float_inputs: similarity.InputBatches, raw: similarity.InputBatches) -> list[Tensor]:
        float_outputs[node.name] = torch.cat([node.leaf(*xs, *node.params) for xs in zip(*float_inputs, strict=True)])
        before, sites = len(calls), dict(searcher.sites)
        found = searcher.quantize_node(node, float_inputs, raw)
        product = isinstance(node.leaf, Linear | Patches | Scores | BiasedScores | Context)
        assert len(calls) - before == int(product), node.name
        if not product:
            return found
        ((score, free, operands),) = calls[before:]
        if isinstance(node.leaf, Patches):
            assert free == (True, False)
        else:
            sources = [searcher._source(name) for name in node.inputs]
            for (site, group), operand in zip(sources, operands[-len(sources) :], strict=True):
                q = sites[site]
                ends = (-int(q.zero[group]), q.last - int(q.zero[group]))
                assert (operand.scale, operand.low, operand.high) == (q.scale[group], *ends), node.name
            quantized = [codes(name, xs) for name, xs in zip(node.inputs, raw, strict=True)]
            if isinstance(node.leaf, Linear):
                linear = searcher.weights[node.name]
                w, bias = torch.from_numpy(linear.w).double(), torch.from_numpy(linear.bias)
                ours = (quantized[0][0].double() @ w.T + bias) * linear.scale[0]
                error = (ours - float_outputs[node.name]).flatten(0, -2).mean(0).abs().max()
                assert error <= linear.scale[0] / 2 * 1.001 + 1e-6, node.name
            else:
                ours = node.leaf(*(x * scale for x, scale in quantized), *node.params).double()
            torch.testing.assert_close(torch.cat(found).double(), ours, rtol=1e-4, atol=1e-4)
            expected = tuple(source not in chosen for source in sources)
            assert free == ((True, *expected) if isinstance(node.leaf, Linear) else expected), node.name
            chosen.update(sources)
        target = targets[-1]
        if isinstance(node.leaf, Linear | Patches):
            y = float_outputs[node.name].reshape(3, -1, target.shape[-1])
            torch.testing.assert_close(
                target, y[:, similarity.sample_indices(y.shape[1], similarity.TOKENS)], rtol=1e-4, atol=1e-4
            )
        elif not isinstance(node.leaf, Context):  # the target is the attention map after the next softmax
            (softmax,) = (other for other in searcher.graph.nodes if node.name in other.inputs)
            maps = softmax.leaf(float_outputs[node.name])
            maps = maps[:, None] if maps.ndim == 4 else maps
            windows, tokens = (
                similarity.sample_indices(maps.shape[1], similarity.WINDOWS),
                similarity.sample_indices(maps.shape[3], similarity.TOKENS),
            )
            torch.testing.assert_close(target, maps[:, windows][..., tokens, :], rtol=1e-4, atol=1e-5)
            q, k = (similarity._split_windows(x)[:, windows] for x in float_inputs)
            q, k = q[..., tokens, :] * 1.3, k * 0.9
            scores = (q * node.leaf.scale) @ k.transpose(-2, -1)  # type: ignore[operator]
            if kind == "distilled":  # has neither a bias nor a mask
                other = scores.softmax(-1)
                expected_score = correlation(target, other) - 0.1 * slow_ranking(target, other)
                assert float(score(q[None], k[None])) == pytest.approx(expected_score, abs=1e-5)
        return found

    with torch.no_grad():
        similarity.run_in_lockstep(searcher.graph, model.preprocess, images, quantize_node, None, "")
    searched = [name for name, q in searcher.sites.items() if (name, 0) in chosen and name not in fixed]
    before = calibration_of(model, recipe, count=2).sites
    assert searched and all((searcher.sites[name].scale != before[name].scale).any() for name in searched)


def test_a_large_bias_saturates_at_2_to_the_30(monkeypatch: pytest.MonkeyPatch) -> None:
    model = float_model("vit")
    searcher = similarity.Searcher(model, calibration_of(model, OBSERVED, count=2))
    node = searcher.graph.node("head")
    leaf = Linear(node.leaf.weight.shape[1], 2, "logits")  # type: ignore[union-attr, index]
    with torch.no_grad():
        leaf.bias.copy_(torch.tensor([1e9, -1e9]))  # type: ignore[union-attr]
        leaf.weight.mul_(1e-3)
        x = [random(2, leaf.weight.shape[1])]
        searcher._linear(similarity.dataclasses.replace(node, leaf=leaf), [x], [x])
    assert searcher.weights["head"].bias.tolist() == [2**30, -(2**30)]


def test_the_first_product_that_reads_a_site_chooses_its_scale() -> None:
    model = float_model("vit")
    searcher = similarity.Searcher(model, calibration_of(model, OBSERVED, count=2))
    scales = [searcher.sites["norm"].scale[0]]
    for seed in (0, 1):
        x = [random(2, 24, seed=seed) * 3]
        with torch.no_grad():
            searcher._linear(searcher.graph.node("head"), [x], [x])
        scales.append(searcher.sites["norm"].scale[0])
    assert scales[0] != scales[1] == scales[2]


def test_the_patch_embedding_gets_the_best_scale_of_the_grid() -> None:
    """It reads exact inputs, so every factor of its weight scale can be tried directly."""
    model = float_model("vit")
    images = images_for(model.preprocess, 6)
    before = calibrate(model, [images], OBSERVED)
    after = search_intervals(model, before, images)
    node = trace(model.module).node("patch_embed.proj")
    leaf = node.leaf
    std = torch.tensor(model.preprocess.std)[:, None, None]
    folded, bias = (leaf.weight / std).detach(), leaf.bias.detach()  # type: ignore[union-attr, operator]
    start = float(folded.abs().max()) / 127
    x = normalise(images, model.preprocess)
    exact = node.leaf(x).detach()[:, similarity.sample_indices(9, similarity.TOKENS)]

    def slow(factor: float) -> float:
        codes = (folded / (start * factor) + 0.5).floor().clamp(-127, 127) * start * factor
        y = F.conv2d(x, codes * std, bias, leaf.patch).flatten(2).transpose(1, 2)  # type: ignore[arg-type]
        return correlation(exact, y[:, similarity.sample_indices(9, similarity.TOKENS)])

    chosen = float(after.weights[node.name].scale[0]) * 255 / start
    scores = [slow(float(f)) for f in FACTORS]
    assert min(abs(chosen - FACTORS)) < 1e-6 and slow(chosen) == pytest.approx(max(scores), abs=2e-6)


@pytest.mark.parametrize("kind", ["vit", "distilled", "mean", "padded swin"])
def test_the_search_and_the_simulation_compute_the_same_outputs(kind: str) -> None:
    """The outputs of the search are close to those of the simulation, and the logits have no mean error."""
    model = float_model(kind)
    images = images_for(model.preprocess, 12)
    start = calibration_of(model, RECIPES["ptq-vit"], count=2)
    searcher = similarity.Searcher(model, start)
    outputs: dict[str, Tensor] = {}

    def quantize_node(node: Node, exact: similarity.InputBatches, raw: similarity.InputBatches) -> list[Tensor]:
        found = searcher.quantize_node(node, exact, raw)
        outputs[node.name] = torch.cat(found)
        return found

    with torch.no_grad():
        similarity.run_in_lockstep(searcher.graph, model.preprocess, images, quantize_node, None, "")
    calibration = similarity.dataclasses.replace(start, sites=searcher.sites, weights=searcher.weights)
    ours = Simulation(model, calibration).run(images)
    assert (ours - outputs[searcher.graph.output]).abs().mean() < 0.02 * ours.std()
    exact = run_float(trace(model.module), normalise(images, model.preprocess))
    scale = searcher.weights[searcher.graph.output].scale
    assert ((exact - outputs[searcher.graph.output]).mean(0).abs().numpy() <= scale + 1e-5).all()


def test_each_layer_has_one_weight_scale_and_scales_lie_on_the_grid() -> None:
    model = float_model("swin")
    plain = calibrate(model, [images_for(model.preprocess, 6)], OBSERVED)
    found = calibrate(model, [images_for(model.preprocess, 6)], PTQ)
    graph = trace(model.module)
    for name, q in found.sites.items():
        ratio = q.scale / plain.sites[name].scale
        assert ((ratio > 0.4999) & (ratio < 1.2001)).all() and np.array_equal(q.zero, plain.sites[name].zero)
    moved = [name for name, q in found.sites.items() if (q.scale != plain.sites[name].scale).all()]
    assert len(moved) == len(found.sites)
    for name, weights in found.weights.items():
        assert len(set(weights.scale)) == 1 and np.abs(weights.w.astype(int)).max() <= 127
        assert weights.w.shape[0] == graph.node(name).leaf.weight.shape[0]  # type: ignore[union-attr, index]


def test_ranges_fixed_by_the_recipe_are_kept() -> None:
    rules = {"blocks.0.norm1": SiteRule(range=(-2.0, 2.0)), "blocks.0.attn.qkv": SiteRule(range=(-3.0, 3.0))}
    recipe = msgspec.structs.replace(PTQ, sites=rules)
    found = calibration_of(float_model("vit"), recipe)
    assert found.sites["blocks.0.norm1"].scale.tolist() == [2 / 127]
    assert found.sites["blocks.0.attn.qkv"].scale.tolist() == [3 / 127] * len(found.sites["blocks.0.attn.qkv"].scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", embedded.MODELS)
def test_search_beats_observed_scales_at_5_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similarity, "IMAGES", 6)
    monkeypatch.setattr(similarity, "TOKENS", 8)
    monkeypatch.setattr(similarity, "FACTORS", FACTORS[::4])
    model = load_model(name)
    images = embedded.test_images()[0][::4]
    exact = run_float(trace(model.module), normalise(images, model.preprocess))
    error = {}
    for intervals in ("observed", "similarity"):
        recipe = with_bits(msgspec.structs.replace(PTQ, intervals=intervals), "5/5/5")
        found = Simulation(model, calibrate(model, [embedded.calibration_images()[:32]], recipe)).run(images)
        error[intervals] = float((found - exact).square().mean())
    assert error["similarity"] < error["observed"]


def test_the_progress_of_the_search_counts_the_nodes() -> None:
    model = float_model("vit")
    seen: list[object] = []

    def progress(items, count, label):  # type: ignore[no-untyped-def]
        seen.append((count, label))
        return items

    calibrate(model, [images_for(model.preprocess, 3)], PTQ, progress=progress)
    assert seen == [(1, "calibrating"), (len(trace(model.module).nodes), "searching intervals")]
