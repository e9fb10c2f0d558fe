"""Collected ranges, counts and attention maps equal those computed directly from the model's values."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

import fqvit
from fqvit.models import embedded
from fqvit.models.graph import Node, trace
from fqvit.models.layers import LayerNorm, Softmax
from fqvit.models.load import build
from fqvit.models.pixels import normalise
from fqvit.report.attention import attention_layout, attention_maps
from fqvit.report.collect import AttentionHistogram, NormRanges, count
from tests.captured import captured


@pytest.fixture(params=embedded.MODELS)
def model(request: pytest.FixtureRequest) -> fqvit.FloatModel:
    return fqvit.load_model(request.param)


@torch.no_grad()
def values(model: fqvit.FloatModel, images: np.ndarray) -> tuple[list[Node], dict[str, Tensor]]:
    kept: dict[str, Tensor] = {}
    graph = trace(model.module)

    def keep(node: Node, y: Tensor) -> Tensor:
        kept[node.name] = y
        return y

    graph.run(normalise(images, model.preprocess), keep)
    return list(graph.nodes), kept


def test_ranges_are_measured_at_the_input_of_each_norm(model: fqvit.FloatModel) -> None:
    images = embedded.test_images()[0][:6]
    nodes, kept = values(model, images)
    ranges = NormRanges(trace(model.module))
    for part in (images[:2], images[2:]):
        own, found = values(model, part)
        for node in own:
            ranges.see(node, found[node.name])
    result = ranges.result()
    assert [one.norm for one in result] == [node.name for node in nodes if isinstance(node.leaf, LayerNorm)]
    for one in result:
        source = next(node.inputs[0] for node in nodes if node.name == one.norm)
        wanted = kept[source].reshape(-1, kept[source].shape[-1]).double().numpy()
        assert one.lo == pytest.approx(wanted.min(0), abs=1e-4) and one.hi == pytest.approx(wanted.max(0), abs=1e-4)


def test_masked_positions_of_attention_are_not_counted(model: fqvit.FloatModel) -> None:
    nodes, kept = values(model, embedded.test_images()[0][:2])
    histogram = AttentionHistogram()
    total = 0
    for node in nodes:
        histogram.see(node, kept[node.name])
        if isinstance(node.leaf, Softmax):
            mask = node.leaf.mask
            share = 1.0 if mask is None else float(mask.double().mean())
            total += round(kept[node.name].numel() * share)
    found = histogram.result(2)
    assert found is not None and found.images == 2
    assert found.total == found.log2.sum() == found.fine.sum() == total


def test_log2_codes_match_the_paper() -> None:
    p = torch.tensor([1.0, 0.5, 0.4, 1 / 3, 0.3, 1 / 16, 1 / 17, 2.0**-14, 2.0**-20, 0.0])
    found = count(p)
    # round(1 / p): 1, 2, 3 (2.5 rounds up), 3, 3, 16, 17, ...; 3 = 1.5 * 2 rounds up to 4 = 2^2, which is code 2
    assert found.log2.tolist() == [1, 1, 3, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2]
    assert found.below.tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2]


def test_maps_of_a_vit_show_the_attention_of_the_class_token() -> None:
    model = fqvit.load_model("fmnist_vit")
    pixels = embedded.test_images()[0][0]
    _, kept = values(model, pixels[None])
    graph = trace(model.module)
    layout = attention_layout(model, graph)
    assert layout is not None
    found = attention_maps(model, graph, layout, pixels)
    assert found.kind == "class token" and found.site == "blocks.3.attn.softmax"
    wanted = kept[found.site][0].mean(0)[0, 1:].reshape(7, 7).numpy()
    assert found.float_map == pytest.approx(wanted, abs=1e-6)
    assert [(one.method, one.bits) for one in found.stored] == [
        *(("uniform", bits) for bits in (8, 6, 4)),
        *(("log2", bits) for bits in (8, 6, 4)),
        ("relative", 4),
    ]
    uniform = (kept[found.site] * 15 + 0.5).floor() / 15
    assert found.stored[2].map == pytest.approx(uniform[0].mean(0)[0, 1:].reshape(7, 7).numpy(), abs=1e-6)
    noise = (uniform - kept[found.site]).double().square().sum() / kept[found.site].double().square().sum()
    assert found.stored[2].decibels == pytest.approx(-10 * float(torch.log10(noise)), abs=1e-6)


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_prefix_tokens_are_not_part_of_the_map(prefix: int) -> None:
    """The map is the attention of the first token or, without prefix tokens, 49 times the mean attention to each patch."""
    config = dataclasses.replace(
        embedded.FMNIST_VIT_CONFIG, prefix=prefix, **({} if prefix else {"pool": "mean", "norm_first": True})
    )
    model = fqvit.FloatModel("vit", build(config), embedded.FMNIST_PREPROCESS, None, "")
    p = torch.rand(1, 3, prefix + 49, prefix + 49)
    wanted = p[0].mean(0)[0, prefix:] if prefix else p[0].mean(0).mean(0) * 49
    layout = attention_layout(model, trace(model.module))
    assert layout is not None
    assert layout.as_map(p) == pytest.approx(wanted.reshape(7, 7).numpy(), abs=1e-4)


@pytest.mark.parametrize("site", ["layers.0.blocks.0.attn.softmax", "layers.0.blocks.1.attn.softmax"])
def test_maps_of_windows_put_every_token_back_at_its_position(site: str) -> None:
    """Plain and shifted windows of the embedded Swin: 14 x 14 tokens, four windows of 7 x 7."""
    model = fqvit.load_model("fmnist_swin")
    attention = model.module.get_submodule(site.removesuffix(".softmax"))
    index = attention.windows.index  # [W, T]: the token at each position of each window
    p = torch.rand(1, *index.shape[:1], 2, 49, 49)
    wanted = np.zeros(14 * 14)
    for window, tokens in enumerate(index.tolist()):
        for position, token in enumerate(tokens):
            wanted[token] = p[0, window, :, :, position].mean() * 49
    layout = attention_layout(model, trace(model.module).ending_at(site))
    assert layout is not None
    assert layout.as_map(p) == pytest.approx(wanted.reshape(14, 14), abs=1e-4)


def test_the_layout_of_captured_attention_comes_from_the_graph() -> None:
    model = captured("features")
    layout = attention_layout(model, trace(model.module))
    assert layout is not None and (layout.kind, layout.grid) == ("first token", (4, 4))
    p = torch.rand(1, 3, 19, 19)  # one class token and two registers before 16 patches
    assert layout.as_map(p) == pytest.approx(p[0].mean(0)[0, 3:].reshape(4, 4).numpy(), abs=1e-6)


def test_models_without_attention_between_all_tokens_have_no_maps() -> None:
    model = captured("hybrid")
    assert attention_layout(model, trace(model.module)) is None
